"""Rules of functions that move elements without changing them: views, permutations, repetitions, joins."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from shardwise.plan.layout import Activation, Partial, Shard, view_shard
from shardwise.plan.repair import KeepWhole, ShardToo, SplitView
from shardwise.plan.rules import WHOLE, Call, Mismatch, Result, rule
from shardwise.plan.rules.elementwise import (
    ONE_SHARD,
    agree,
    always,
    dims_argument,
    follows,
    operand,
    operand_rule,
    refuse_partial,
    shape_of,
    unequal,
)

VIEWS = ("view", "reshape", "flatten", "unflatten", "ravel")
PERMUTATIONS = (
    "permute",
    "transpose",
    "swapaxes",
    "swapdims",
    "movedim",
    "moveaxis",
    "t",
    "T",
    "mT",
    "transpose_",
)
EXPANSIONS = ("expand", "broadcast_to")
REPETITIONS = ("repeat", "tile")

# ---------------------------------------------------------------- views


def keeps_values(call: Call) -> bool:
    """Say that a view is linear, unless it reads the same bytes as another dtype."""
    return not isinstance(call.argument(1, "dtype"), torch.dtype)


@operand_rule(*VIEWS, linear=keeps_values)
def view(call: Call, x: Tensor, shard: Shard) -> Result:
    """Ask the view rule; a view as another dtype keeps the dims, but may resize the last."""
    if not keeps_values(call):
        resized = x.element_size() != call.output.element_size() and shard.dim == x.ndim - 1
        if resized:
            raise viewed_apart(call, x, shard)
        return shard
    return viewed(call, x, shard)


def viewed(call: Call, x: Tensor, shard: Shard) -> Shard:
    """Return where a shard of `x` lies in the output."""
    result = view_shard(shape_of(x), shape_of(call.output), shard, call.degree)
    if result is None:
        raise viewed_apart(call, x, shard)
    return spread(call, x, shard, result)


def spread(call: Call, x: Tensor, shard: Shard, merged: Shard) -> Shard:
    """Return the layout of heads, each held by several ranks, that a view joins with their repetitions.

    On a rank the head is repeated only as often as its own queries read it, so that there are no copies any more;
    the second pass sees whether the code does so.
    """
    behind = shard.dim + 1
    times = x.shape[behind] if behind < x.ndim else 1
    joined = merged.blocks == tuple(block * times for block in shard.blocks)
    if joined and call.repeated(x)[behind:][:1] == (times,):
        return repeated(call, shard, merged, times)
    return merged


def repeated(call: Call, shard: Shard, result: Shard, times: int) -> Shard:
    """Return `result`, or its form without copies where each index of `shard` is one rank's, repeated `times`."""
    divided = times % shard.copies == 0 and shard.pieces_are_single(call.degree)
    return replace(result, copies=1) if divided else result


def viewed_apart(call: Call, x: Tensor, shard: Shard) -> Mismatch:
    """Return the fault of a view in which no dim is cut as the ranks' pieces are."""
    before, after = shape_of(x), shape_of(call.output)
    return Mismatch(
        f"{call.name} of {before} as {after} breaks {shard} from {call.source(x)} at degree {call.degree}",
        f"use a degree that divides the number of heads, or give {call.source(x)} blocks that the view keeps apart",
        SplitView(call.made_by(x), before, after, shard),
    )


@rule("view_as", "reshape_as")
def view_as(call: Call) -> Result:
    """Ask the view rule; the second tensor, which lends its shape, must be cut as the result is."""
    x, other = operand(call), call.argument(1, "other")
    layout, shape = call.layout(x), call.layout(other)
    result = viewed(call, x, layout) if isinstance(layout, Shard) else layout
    if (shape if isinstance(shape, Shard) else WHOLE) != (result if isinstance(result, Shard) else WHOLE):
        raise Mismatch(
            f"{call.name} gives {layout} from {call.source(x)} the shape of {shape} from {call.source(other)}",
            ONE_SHARD,
            KeepWhole(call.made_by(x), call.name),
        )
    return result


@operand_rule("squeeze", linear=always)
def squeeze(call: Call, x: Tensor, shard: Shard) -> Result:
    """Drop dims of size 1, unless a rank's piece has size 1 and would be dropped as well."""
    dims = dims_argument(call, x, 1, "dim")
    if shard.dim in dims and shard.size == shard.pieces(call.degree):
        raise viewed_apart(call, x, shard)
    dropped = [dim for dim in dims if x.shape[dim] == 1 and dim < shard.dim]
    return shard.at(shard.dim - len(dropped))


@operand_rule("unsqueeze", linear=always)
def unsqueeze(call: Call, x: Tensor, shard: Shard) -> Result:
    """Make room for the new dim."""
    dim = call.argument(1, "dim") % call.output.ndim
    return shard.at(shard.dim + (dim <= shard.dim))


# ---------------------------------------------------------------- permutations


@operand_rule(*PERMUTATIONS, linear=always)
def permute(call: Call, x: Tensor, shard: Shard) -> Result:
    """Follow the dim."""
    return shard.at(permutation(call, x.ndim).index(shard.dim))


def permutation(call: Call, ndim: int) -> tuple[int, ...]:
    """Return which dim each dim of the result was: torch is asked, on a tensor without data and of distinct sizes."""
    probe = torch.empty(tuple(range(2, ndim + 2)), device="meta")
    moved: Any = getattr(probe, call.name)
    if callable(moved) and not isinstance(moved, Tensor):
        moved = moved(
            *call.args[1:], **{name: value for name, value in call.kwargs.items() if name != "input"}
        )
    return tuple(size - 2 for size in moved.shape)


# ---------------------------------------------------------------- repetitions


@operand_rule(*EXPANSIONS, linear=always)
def expand(call: Call, x: Tensor, shard: Shard) -> Result:
    """Count the new dims in front; the only head of the keys may be expanded to those of a rank's queries."""
    dim = shard.dim + call.output.ndim - x.ndim
    if call.output.shape[dim] == shard.size:
        return shard.at(dim)
    times = call.output.shape[dim]
    return repeated(call, shard, shard.at(dim).of(times), times)


@operand_rule(*REPETITIONS, linear=always)
def repeat(call: Call, x: Tensor, shard: Shard) -> Result:
    """Count the new dims in front; a sharded dim that is repeated has its blocks repeated."""
    dim = shard.dim + call.output.ndim - x.ndim
    return shard.at(dim).of(*shard.blocks * (call.output.shape[dim] // shard.size))


@operand_rule("repeat_interleave", linear=always)
def repeat_interleave(call: Call, x: Tensor, shard: Shard) -> Result:
    """Multiply the blocks of a sharded dim whose indices are repeated equally often."""
    dim, times = call.argument(2, "dim"), call.argument(1, "repeats")
    if dim is not None and dim % x.ndim != shard.dim:
        return shard
    if dim is None or not isinstance(times, int):
        how = "flattens" if dim is None else "repeats unequally"
        raise Mismatch(
            f"{call.name} {how} {shard} from {call.source(x)}",
            f"leave {call.source(x)} out of the plan",
            KeepWhole(call.made_by(x), call.name),
        )
    return repeated(call, shard, shard.of(*(block * times for block in shard.blocks)), times)


# ---------------------------------------------------------------- joins


@rule("cat", "concat", "concatenate")
def cat(call: Call) -> Result:
    """Join the blocks along the sharded dim; along another, all shards must be equal."""
    tensors = [t for t in call.argument(0, "tensors") if t.ndim == call.output.ndim]
    layouts = [call.layout(t) for t in tensors]
    dim = call.argument(1, "dim", call.kwargs.get("axis", 0)) % call.output.ndim
    if not any(isinstance(layout, Shard) for layout in layouts):
        return partial_join(call, tensors)
    first, shard = next((t, s) for t, s in zip(tensors, layouts, strict=True) if isinstance(s, Shard))
    for other, layout in zip(tensors, layouts, strict=True):
        joins(call, (first, shard), (other, layout), dim)
    if dim != shard.dim:
        return shard
    return shard.of(*chain.from_iterable(s.blocks for s in layouts if isinstance(s, Shard)))


def joins(call: Call, first: tuple[Tensor, Shard], second: tuple[Tensor, Activation], dim: int) -> None:
    """Refuse a tensor that cannot be joined to a shard along `dim`."""
    (x, shard), (other, layout) = first, second
    along = dim == shard.dim
    if isinstance(layout, Shard):
        if layout != shard and not (along and (layout.dim, layout.division) == (dim, shard.division)):
            raise unequal(call, x, shard, other, layout)
    elif isinstance(layout, Partial):
        raise refuse_partial(call, other)
    elif along or not follows(call, other, shard.dim) or other.shape[shard.dim] != shard.size:
        raise Mismatch(
            f"{call.name} puts {shard} from {call.source(x)} beside a whole tensor of {shape_of(other)} "
            f"from {call.source(other)}",
            ONE_SHARD,
            ShardToo(call.made_by(other), shard.dim, other.ndim, shard),
        )


def partial_join(call: Call, tensors: list[Tensor]) -> Activation:
    """Return the layout of tensors that are joined and of which none is a shard: all are partial sums, or none."""
    partial = [t for t in tensors if isinstance(call.layout(t), Partial)]
    rest = [t for t in tensors if call.layout(t) == WHOLE and not call.is_nothing(t)]
    if partial and rest:
        raise refuse_partial(call, partial[0])
    return Partial() if partial else WHOLE


@rule("vstack")
def vstack(call: Call) -> Result:
    """Join along the first dim; vectors, which become rows, are refused."""
    for t in call.argument(0, "tensors"):
        if t.ndim < 2:
            raise Mismatch(
                f"{call.name} makes rows of {call.layout(t)} from {call.source(t)}",
                f"leave {call.source(t)} out of the plan",
                KeepWhole(call.made_by(t), call.name),
            )
    return cat(call)


@rule("stack")
def stack(call: Call) -> Result:
    """Make room for the new dim; all shards must be equal."""
    tensors = list(call.argument(0, "tensors"))
    dim = call.argument(1, "dim", 0) % call.output.ndim
    partial = (
        partial_join(call, tensors) if any(isinstance(call.layout(t), Partial) for t in tensors) else None
    )
    if partial is not None:
        return partial
    layout = agree(call, [(t, call.layout(t)) for t in tensors], tensors[0].ndim)
    return layout.at(layout.dim + (dim <= layout.dim)) if isinstance(layout, Shard) else layout
