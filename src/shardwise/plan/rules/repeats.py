"""How a whole tensor repeats its values, so that it may follow a size that is divided on a rank.

An attention mask expanded over the heads is whole, and yet meets sharded heads without harm: on a rank the code expands
it over the rank's heads only. So each whole tensor carries, for each dim, a factor r: the values do not change
within runs of r indices. A dim whose factor is its size is repeated all along. Unknown is 1, which is always true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd, prod
from typing import Any

from torch import Tensor

from shardwise.plan.rules import Call
from shardwise.plan.rules.elementwise import (
    BINARY,
    BINARY_IN_PLACE,
    CASTS,
    LIKE,
    LINEAR,
    LINEAR_COMPLEX,
    LINEAR_IN_PLACE,
    NEW,
    PRODUCTS,
    QUOTIENTS,
    SUMS,
    UNARY,
    UNARY_IN_PLACE,
    operand,
)
from shardwise.plan.rules.index import produced, spelled_out
from shardwise.plan.rules.shape import EXPANSIONS, PERMUTATIONS, REPETITIONS, VIEWS, keeps_values, permutation

Factors = tuple[int, ...]

CONSTANTS = {"zeros", "ones", "full", "empty", "fill_", "zero_", *LIKE, *NEW}
REPEATING = {*EXPANSIONS, *REPETITIONS, "expand_as", "repeat_interleave"}
"""Functions whose result repeats even where nothing in their arguments does."""
RANDOM = {"dropout", "alpha_dropout"}
ELEMENTWISE = {
    *LINEAR, *LINEAR_COMPLEX, *UNARY, *UNARY_IN_PLACE, *LINEAR_IN_PLACE, *SUMS, *PRODUCTS, *QUOTIENTS, *BINARY,
    *BINARY_IN_PLACE,
} - RANDOM  # fmt: skip


def repeats(call: Call) -> Factors | None:
    """Return the factor of each dim of the whole result of a call; None if nothing is known to repeat.

    A function that writes in place is asked as well: `__setitem__` answers for its target.
    """
    if call.name == "__setitem__":
        return _written(call)
    if not isinstance(call.output, Tensor):
        return None
    if call.name in CONSTANTS:
        return tuple(max(size, 1) for size in call.output.shape)
    rule = FACTORS.get(call.name)
    known = any(r > 1 for t in call.tensors for r in _factors(call, t))
    if rule is None or not (known or call.name in REPEATING):
        return None
    factors = rule(call)
    return factors if factors is not None and any(r > 1 for r in factors) else None


def _factors(call: Call, tensor: Tensor) -> Factors:
    """Return the factors of an argument; a dim of size 1 has factor 1, its size."""
    return call.repeated(tensor)


def _aligned(tensors: Sequence[Tensor], call: Call) -> Factors:
    """Return the factors of a function of each element, its operands aligned at the last dim."""
    ndim, factors = max(t.ndim for t in tensors), []
    for dim in range(-ndim, 0):
        facing = [(t.shape[dim], _factors(call, t)[dim]) for t in tensors if t.ndim >= -dim]
        factors.append(gcd(*(r for size, r in facing if size != 1)) or 1)
    return tuple(factors)


def _elementwise(call: Call) -> Factors | None:
    return _aligned(call.tensors, call)


def _cast(call: Call) -> Factors | None:
    return _factors(call, operand(call))


def view_repeats(source: Sequence[int], target: Sequence[int], factors: Factors) -> Factors:
    """Return the factors of a tensor of shape `source` when it is viewed as `target`.

    A factor r of a dim with t elements behind each index says that the flat index may change between multiples of t
    within a multiple of t r. Runs of neighbouring dims that repeat all along join.
    """
    if not prod(source):
        return (1,) * len(target)
    runs: list[tuple[int, int]] = []
    for dim in reversed(range(len(source))):
        step = prod(source[dim + 1 :])
        if factors[dim] > 1:
            joined = runs and runs[-1][1] == step
            runs.append((runs.pop()[0] if joined else step, step * factors[dim]))
    result = []
    for dim, size in enumerate(target):
        step = prod(target[dim + 1 :])
        inside = [gcd(size, stop // step) for start, stop in runs if step % start == 0 and stop % step == 0]
        result.append(max([1, *inside]))
    return tuple(result)


def _view(call: Call) -> Factors | None:
    x = operand(call)
    if not keeps_values(call):
        return None
    return view_repeats(x.shape, call.output.shape, _factors(call, x))


def _permute(call: Call) -> Factors | None:
    x = operand(call)
    return tuple(_factors(call, x)[dim] for dim in permutation(call, x.ndim))


def _expand(call: Call) -> Factors | None:
    """A dim that is new, was of size 1 or repeated all along is so again; others keep their runs."""
    x, output = operand(call), call.output
    new = output.ndim - x.ndim
    kept = [
        size if r == old else r
        for size, old, r in zip(output.shape[new:], x.shape, _factors(call, x), strict=True)
    ]
    return (*output.shape[:new], *kept)


def _repeat_interleave(call: Call) -> Factors | None:
    x, times, dim = operand(call), call.argument(1, "repeats"), call.argument(2, "dim")
    if dim is None or not isinstance(times, int):
        return None
    return tuple(r * times if i == dim % x.ndim else r for i, r in enumerate(_factors(call, x)))


def _cat(call: Call) -> Factors | None:
    tensors = [t for t in call.argument(0, "tensors") if t.ndim == call.output.ndim]
    return tuple(gcd(*(_factors(call, t)[dim] for t in tensors)) for dim in range(call.output.ndim))


def _stack(call: Call) -> Factors | None:
    tensors = call.argument(0, "tensors")
    kept = [gcd(*(_factors(call, t)[dim] for t in tensors)) for dim in range(tensors[0].ndim)]
    kept.insert(call.argument(1, "dim", 0) % call.output.ndim, 1)
    return tuple(kept)


def _getitem(call: Call) -> Factors | None:
    """Slices of what repeats all along do so too; other slices may start within a run."""
    x, entries = operand(call), spelled_out(operand(call), call.args[1])
    if any(isinstance(entry, (Tensor, list, bool)) for entry in entries):
        return None
    sizes = iter(zip(x.shape, _factors(call, x), strict=True))
    result = []
    for entry in entries:
        size, r = next(sizes) if entry is not None else (1, 1)
        if isinstance(entry, slice):
            length = len(range(*entry.indices(size)))
            result.append(max(length, 1) if r == size else r if length == size else 1)
        elif produced(entry):
            result.append(1)
    return tuple(result)


def _written(call: Call) -> Factors | None:
    """Writing one number into slices keeps what repeats along the dims that are written all along."""
    x, index, value = call.args
    entries = [entry for entry in spelled_out(x, index) if entry is not None]
    if len(entries) != x.ndim or (isinstance(value, Tensor) and value.ndim):
        return None
    pairs = zip(entries, x.shape, _factors(call, x), strict=True)
    return tuple(r if _all_of(entry, size) else 1 for entry, size, r in pairs)


def _all_of(entry: Any, size: int) -> bool:
    return isinstance(entry, slice) and entry.indices(size) == (0, size, 1)


FACTORS: dict[str, Callable[[Call], Factors | None]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(CASTS, _cast),
    **dict.fromkeys((*VIEWS, "squeeze", "unsqueeze"), _view),
    **dict.fromkeys(PERMUTATIONS, _permute),
    **dict.fromkeys((*EXPANSIONS, *REPETITIONS, "expand_as"), _expand),
    "repeat_interleave": _repeat_interleave,
    "cat": _cat,
    "concat": _cat,
    "concatenate": _cat,
    "stack": _stack,
    "__getitem__": _getitem,
}
"""How the factors pass through a function. One that is not listed is taken to lose them."""
