"""The numbers that a call is given, as the two passes of the check compare them.

A number in the model's code is right on a rank if it is the number of the whole model, or if it is a size and the rank
has a part of that size. Sizes that give the shape of a result are left out here: shapes are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from shardwise.plan.layout import Shard, followers
from shardwise.plan.rules import Call
from shardwise.plan.rules.elementwise import NEW, operand
from shardwise.plan.rules.index import consumed, spelled_out
from shardwise.plan.rules.shape import EXPANSIONS, REPETITIONS

Place = int | tuple[int, ...]
"""An index on a rank, or what it may be there."""

_SIZED = frozenset(
    """view reshape unflatten split chunk split_with_sizes tensor_split repeat_interleave
    zeros ones empty full rand randn""".split()
).union(EXPANSIONS, REPETITIONS, NEW)
"""Functions whose integers are sizes of the result, but for the number that fills it."""

_INDEXING = frozenset(["__getitem__", "__setitem__", "narrow", "select"])


def scalars(call: Call) -> tuple[float, ...]:
    """Return the numbers among the arguments that are neither sizes nor indices."""
    if call.name in _INDEXING:
        return tuple(_numbers(_beside_the_index(call)))
    found = list(_numbers((call.args, call.kwargs)))
    if call.name not in _SIZED:
        return tuple(found)
    fill = call.argument(2 if call.name == "new_full" else 1, "fill_value") if "full" in call.name else None
    return (*(value for value in found if isinstance(value, float)), *_numbers(fill))


def places(call: Call) -> tuple[Place, ...]:
    """Return the indices that a call takes, and where its slices start: a bound may be baked into code."""
    if call.name not in _INDEXING:
        return ()
    x, found = operand(call), list[Place]()
    for dim, entry in _entries(call, x):
        if isinstance(entry, slice) and not any(isinstance(b, Tensor) for b in (entry.start, entry.step)):
            found += [_on_a_rank(call, x, dim, entry.start or 0, entry.step or 1), entry.step or 1]
        elif type(entry) is int:
            found.append(_on_a_rank(call, x, dim, entry, 1))
    return tuple(found)


def _beside_the_index(call: Call) -> Any:
    """Return what is written into a slice, or along which dim a slice is taken."""
    if call.name.startswith("__"):
        return call.args[2:]
    return call.argument(1, "dim")


def _entries(call: Call, x: Tensor) -> Iterator[tuple[int, Any]]:
    """Yield (dim, slice or index) of a call that takes a tensor apart."""
    if not call.name.startswith("__"):
        dim, at = call.argument(1, "dim") % x.ndim, call.argument(2, "start", call.kwargs.get("index"))
        yield dim, slice(at, None) if call.name == "narrow" else at
        return
    dim = 0
    for entry in spelled_out(x, call.args[1]):
        if dim < x.ndim:
            yield dim, entry
        dim += consumed(entry)


def _on_a_rank(call: Call, x: Tensor, dim: int, start: int, step: int) -> Place:
    """Return what an index of a dim is on a rank: less along a shard, and along what follows a divided size."""
    layout = call.layout(x)
    if isinstance(layout, Shard) and layout.dim == dim:
        return layout.scaled(start, call.rank, call.degree) if step == 1 else start
    if call.repeated(x)[dim] > 1:
        return followers(start, call.degree, call.shares)
    return start


def _numbers(value: Any) -> Iterator[float]:
    """Yield the numbers in nested lists, tuples and dicts; every NaN is the same one, which is equal to itself."""
    if isinstance(value, float):
        yield math.nan if math.isnan(value) else round(value, 12)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)
