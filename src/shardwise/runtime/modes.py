"""What torch keeps for each thread: whether gradients are recorded, and whether tensors are inference tensors.

A tensor that is made in inference mode is one for good. Outside of that mode, and in a thread that is not in it, such a
tensor cannot be written to, nor trained. So weights are loaded outside of it, whatever mode the caller is in, and a
thread of ours starts in the modes of the one that starts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

_P = ParamSpec("_P")
_T = TypeVar("_T")


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leave inference mode for a while; gradients are recorded inside if they were outside. Also a decorator."""
    recorded = torch.is_grad_enabled()  # leaving the mode would turn them on
    with torch.inference_mode(False), torch.set_grad_enabled(recorded):
        yield


@contextmanager
def in_the_mode_of(model: nn.Module) -> Iterator[None]:
    """Be in inference mode if a model was made in it, whose tensors take no others then; else be outside of it."""
    with torch.inference_mode() if _is_of_inference(model) else outside_inference_mode():
        yield


def _is_of_inference(model: nn.Module) -> bool:
    return any(
        tensor.is_inference() for tensors in (model.parameters(), model.buffers()) for tensor in tensors
    )


def ordinary(tensor: Tensor) -> Tensor:
    """Return a tensor that can be written to in any mode: a copy of one that was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


def in_modes_of_this_thread(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a function that does in another thread what `function` would do in this one."""
    inference, recorded = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with torch.inference_mode(inference), torch.set_grad_enabled(recorded):
            return function(*args, **kwargs)

    return run
