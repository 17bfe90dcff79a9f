"""What the two passes of the check share: findings with a repair, and the numbers a call is given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwise.errors import Finding
from shardwise.plan.layout import Shard
from shardwise.plan.repair import Repair
from shardwise.plan.resolve import PlannedModule, ResolvedPlan
from shardwise.plan.rules import Call


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


_ARITHMETIC = frozenset(
    """add sub mul div pow rsub true_divide __rtruediv__ __rsub__ __rpow__ floor_divide add_ sub_ mul_
    div_""".split()
)


def scalars(call: Call) -> tuple[float, ...]:
    """Return the floats among the arguments, and for arithmetic the integers too: sizes may hide in them."""
    found: list[float] = []
    for value in flat((call.args, call.kwargs)):
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if isinstance(value, float):
            found.append(round(value, 12))
        elif is_integer and call.name in _ARITHMETIC:
            found.append(value)
    return tuple(found)


def flat(value: Any) -> list[Any]:
    """Return what nested lists, tuples and dicts hold, in order."""
    if isinstance(value, (list, tuple)):
        return [inner for item in value for inner in flat(item)]
    if isinstance(value, dict):
        return flat(list(value.values()))
    return [value]


def slice_starts(call: Call) -> tuple[int, ...]:
    """Return where the slices of an index start: a bound baked into code is the same on a rank."""
    if call.name == "narrow":
        return (call.argument(2, "start", 0),)
    if call.name not in ("__getitem__", "__setitem__"):
        return ()
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    return tuple(
        item.start or 0 for item in index if isinstance(item, slice) and not isinstance(item.start, Tensor)
    )
