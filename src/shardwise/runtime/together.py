"""Queries and keys that are read together are normed by one sum over the ranks.

An attention computes its queries and keys, and then norms one after the other over all heads: two sums, each of a
number per token, where time goes into the calls. The projections leave word of what they returned. The first norm sums
for all that is waiting, and the others find theirs. Code that norms its queries before it computes its keys sums twice,
as it would without, and so does a compiled model. What is summed follows from the order of calls alone, never from
which tensors are still alive, so the ranks agree.
"""

from __future__ import annotations

import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.plan.resolve import ResolvedPlan
from shardwise.plan.styles import AcrossHeadNorm, ColwiseParallel


@dataclass(frozen=True)
class Summand:
    """A slice of features on this rank, and how many features there are on all ranks, copies counted."""

    tensor: Tensor
    width: int


Statistics = Callable[[Sequence[Summand]], list[tuple[Tensor, ...]]]


class Together:
    """What waits for the norms of one attention."""

    def __init__(self) -> None:
        self._waiting: dict[str, Summand] = {}
        self._found: list[tuple[weakref.ref[Tensor], tuple[Tensor, ...]]] = []

    def leave(self, path: str, output: Tensor, width: int) -> None:
        """Leave word of what a projection returned."""
        if not torch.compiler.is_compiling():
            self._waiting[path] = Summand(output, width)

    def take(self, own: Summand, statistics: Statistics) -> tuple[Tensor, ...]:
        """Return the statistic of a slice of features, and keep those of all that waits beside it."""
        for i, (tensor, found) in enumerate(self._found):
            if tensor() is own.tensor:
                del self._found[i]
                return found
        others = [one for one in self._waiting.values() if one.tensor is not own.tensor]
        others = [one for one in others if one.tensor.dtype == own.tensor.dtype]
        self._waiting = {}
        mine, *theirs = statistics([own, *others])
        self._found = [(weakref.ref(one.tensor), found) for one, found in zip(others, theirs, strict=True)]
        return mine

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as one with nothing waiting."""
        return (Together, ())


_QUERY_OR_KEY = re.compile(r"(?:^|_)(?:q|k|query|key)(?:_|$)")


def sum_together(model: nn.Module, plan: ResolvedPlan) -> None:
    """Let the norms over all heads of each attention sum together, with the projections that they norm."""
    attentions: dict[str, list[nn.Module]] = defaultdict(list)
    normed: dict[str, int] = defaultdict(int)
    for m in plan.modules:
        owner, _, name = m.path.rpartition(".")
        module = model.get_submodule(m.path)
        normed_by = isinstance(m.style, ColwiseParallel) and isinstance(module, nn.Linear)
        if (isinstance(m.style, AcrossHeadNorm) or normed_by) and _QUERY_OR_KEY.search(name):
            attentions[owner].append(module)
            normed[owner] += isinstance(m.style, AcrossHeadNorm)
    for owner, modules in attentions.items():
        together = Together()
        for module in modules if normed[owner] > 1 else ():
            vars(module)["tp_together"] = together
