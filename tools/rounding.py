"""Models whose code rounds to bf16 in a forward of any dtype: their numbers cannot be compared in fp32 as they are."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ROUNDS_IN_ANY_DTYPE = {
    "Kandinsky5Transformer3DModel": (Tensor.to, (torch.bfloat16,)),
    "SanaWMTransformer3DModel": (Tensor.bfloat16, ()),
}
"""Classes whose code rounds queries and keys to bf16 in every forward, also in one of fp32, and the call that does."""


class _Unrounded(TorchFunctionMode):
    """Leaves out a forward's own rounding to bf16, which turns a difference in a last digit into a step of bf16."""

    def __init__(self, rounds: tuple[Any, tuple[Any, ...]]) -> None:
        super().__init__()
        self._rounds = rounds

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (func, args[1:]) == self._rounds and args[0].dtype == torch.float32:
            return args[0]
        return func(*args, **(kwargs or {}))


def exactly(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which a model computes in the dtype of its weights: one process and ranks alike."""
    rounds = ROUNDS_IN_ANY_DTYPE.get(type(model).__name__)
    return _Unrounded(rounds) if rounds else nullcontext()
