"""Code that rounds to half precision in a forward of any dtype, and how to leave that out.

Some models round queries and keys to bf16 also where they compute in fp32. A difference in the last digit, as sums in
another order give, may then become a step of bf16, and hides what a comparison in fp32 is there to show.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwise.verification.bound import HALF

_TARGETS = {Tensor.bfloat16: torch.bfloat16, Tensor.half: torch.float16}
_CASTS = {Tensor.to, Tensor.type}


class _Unrounded(TorchFunctionMode):
    """Leaves tensors of a wider dtype as they are where code casts them to half precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _TARGETS and func not in _CASTS:
            return func(*args, **kwargs)
        wide = isinstance(args[0], Tensor) and args[0].dtype in (torch.float32, torch.float64)
        if not wide or not (func in _TARGETS or _is_half(args[1:]) or _is_half(kwargs.values())):
            return func(*args, **kwargs)
        rest = [value for value in args[1:] if not _is_half([value])]
        options = {name: value for name, value in kwargs.items() if not _is_half([value])}
        return args[0].to(*rest, **options) if func is Tensor.to and (rest or options) else args[0]


def _is_half(values: Any) -> bool:
    return any(isinstance(value, torch.dtype) and value in HALF for value in values)


def unrounded(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return a context in which a forward of fp32 or fp64 rounds nothing to half precision; others do as they do."""
    return nullcontext() if dtype in HALF else _Unrounded()
