"""The findings of the check: with the change of the plan that would repair it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from shardwise.errors import Finding
from shardwise.plan.layout import Shard
from shardwise.plan.repair import Repair
from shardwise.plan.resolve import PlannedModule, ResolvedPlan


@dataclass(frozen=True)
class CheckFinding(Finding):
    """A finding with the change of the plan that would repair it."""

    repair: Repair | None = None

    __str__ = Finding.__str__


def watched_shards(model: nn.Module, plan: ResolvedPlan) -> Iterator[tuple[PlannedModule, Tensor, Shard]]:
    """Yield the sharded parameters that the model's own code reads, outside of any style that speaks for them."""
    for planned in plan.modules:
        if not planned.style.opaque:
            for name, layout in planned.layouts.items():
                if isinstance(layout, Shard):
                    yield planned, model.get_submodule(planned.path).get_parameter(name), layout


DIVIDE_FIX = "a size in the code is not divided: add DivideAttributes(...) for the attribute it comes from"
CONSTANT_FIX = (
    "a constant comes from a size that is divided or sharded: divide its attribute too, or not at all"
)
