"""What a forward without weights is told where its code asks for values: how it goes on depends on them.

A mixture of experts sends each token where a router says, and a router has weights. Any choice is as good as another
for what is checked, so the tokens are spread evenly: then every expert has some.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SAME = frozenset(["view", "reshape", "flatten", "contiguous"])
"""Functions that keep all values."""


class Answers:
    """Remembers what is known of tensors without values, and answers for them."""

    def __init__(self) -> None:
        self._choices: dict[int, tuple[Tensor, int]] = {}  # holds the tensors, so that ids stay unique
        self._filled: dict[int, tuple[Tensor, Any]] = {}

    def note(self, name: str, args: Any, kwargs: Any, output: Any) -> None:
        """Remember what a call tells of its output: of how many things `topk` chose, what `full` filled in."""
        if name == "topk":
            dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
            self._choices[id(output.indices)] = (output.indices, args[0].shape[dim])
        elif name == "full":
            fill = args[1] if len(args) > 1 else kwargs["fill_value"]
            self._filled[id(output)] = (output, fill)
        elif name in _SAME and id(args[0]) in self._choices:
            self._choices[id(output)] = (output, self._choices[id(args[0])][1])

    def answer(self, name: str, args: Any) -> Any:
        """Return what a call gives that asks for values which are not there; None if it asks for none."""
        tensor = args[0] if args and isinstance(args[0], Tensor) and args[0].is_meta else None
        if name == "bincount" and id(tensor) in self._choices:
            assert tensor is not None
            return _evenly(tensor.numel(), self._choices[id(tensor)][1])
        if name == "tolist" and id(tensor) in self._filled:
            assert tensor is not None
            return _nested(self._filled[id(tensor)][1], list(tensor.shape))
        return None


def _evenly(count: int, bins: int) -> Tensor:
    """Return the sizes of `bins` parts of `count` things that differ by one at most."""
    with torch._C.DisableTorchFunction():
        return torch.tensor([count // bins + (i < count % bins) for i in range(bins)])


def _nested(value: Any, shape: list[int]) -> Any:
    """Return a tensor of equal values as lists."""
    if not shape:
        return value
    return [_nested(value, shape[1:]) for _ in range(shape[0])]
