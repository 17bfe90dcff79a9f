"""Rules of functions that take a tensor apart: splits, slices, indices, and writes into a slice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.plan.layout import Partial, Shard, slice_blocks
from shardwise.plan.repair import Align, EqualBlocks, KeepWhole, RefineBlocks, ShardToo
from shardwise.plan.rules import WHOLE, Call, Mismatch, Result, rule, tensors_in
from shardwise.plan.rules.elementwise import (
    agree,
    always,
    follows,
    keep_whole,
    operand,
    operand_rule,
    refuse_partial,
    shape_of,
    whole_rest,
    writes_into_whole,
)

# ---------------------------------------------------------------- along the sharded dim


def cut_blocks(call: Call, x: Tensor, shard: Shard, bounds: slice, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the blocks of a slice of the sharded dim; `sizes` are the blocks that would allow it."""
    start, stop, step = bounds.indices(shard.size)
    blocks = slice_blocks(shard, start, max(start, stop), step, call.degree)
    if blocks is None:
        stride = f":{step}" if step != 1 else ""
        what = (
            f"slice [{start}:{stop}{stride}]"
            if call.name.startswith("__")
            else f"{call.name} into {list(sizes)}"
        )
        fix = f"declare blocks={list(sizes)} on {call.source(x)}" if step == 1 else (
            f"use blocks of {call.source(x)} that {step} x the degree divides"
        )  # fmt: skip
        repair = (
            RefineBlocks(call.made_by(x), shard.blocks, sizes)
            if step == 1
            else KeepWhole(call.made_by(x), call.name)
        )
        raise Mismatch(f"{what} cuts through {shard} from {call.source(x)}", fix, repair)
    return blocks


@operand_rule("split", "chunk", "split_with_sizes", "tensor_split", linear=always)
def split(call: Call, x: Tensor, shard: Shard) -> Result:
    """Give each part the blocks in it; no part may end inside a block."""
    dim = call.argument(2, "dim", 0) % x.ndim
    if dim != shard.dim:
        return shard
    sizes, start, parts = tuple(part.shape[dim] for part in call.output), 0, []
    for size in sizes:
        parts.append(shard.of(*cut_blocks(call, x, shard, slice(start, start + size), sizes)))
        start += size
    return parts


@operand_rule("glu")
def glu(call: Call, x: Tensor, shard: Shard) -> Result:
    """Multiply two halves, which must have equal blocks."""
    dim = call.argument(1, "dim", -1) % x.ndim
    if dim != shard.dim:
        return shard
    half = shard.size // 2
    first, second = (
        cut_blocks(call, x, shard, slice(start, start + half), (half, half)) for start in (0, half)
    )
    if first != second:
        raise Mismatch(
            f"{call.name} multiplies halves with blocks {list(first)} and {list(second)} from {call.source(x)}",
            f"declare blocks={[half, half]} on {call.source(x)}",
            RefineBlocks(call.made_by(x), shard.blocks, (half, half)),
        )
    return shard.of(*first)


@operand_rule("narrow", linear=always)
def narrow(call: Call, x: Tensor, shard: Shard) -> Result:
    """Slice with a start and a length."""
    dim, start, length = (call.argument(i, name) for i, name in enumerate(("dim", "start", "length"), 1))
    if dim % x.ndim != shard.dim:
        return shard
    start %= shard.size
    bounds = slice(start, start + length)
    return shard.of(*cut_blocks(call, x, shard, bounds, around(bounds, shard.size)))


def around(bounds: slice, size: int) -> tuple[int, ...]:
    """Return the sizes of what lies before, in and behind a slice, without the empty ones."""
    start, stop, _ = bounds.indices(size)
    return tuple(part for part in (start, stop - start, size - stop) if part > 0)


# ---------------------------------------------------------------- one index


def one_index(call: Call, x: Tensor, shard: Shard, dim: int) -> Shard:
    """Drop `dim`, which must not be the sharded one: one rank alone would hold that index."""
    if dim == shard.dim:
        raise Mismatch(
            f"{call.name} takes single indices of the sharded dim of {shape_of(x)}, {shard} from {call.source(x)}",
            f"declare {shard.size} equal blocks on {call.source(x)}, if it fuses as many tensors",
            EqualBlocks(call.made_by(x), shard.size),
        )
    return shard.at(shard.dim - (dim < shard.dim))


@operand_rule("unbind", linear=always)
def unbind(call: Call, x: Tensor, shard: Shard) -> Result:
    """Drop the dim."""
    return one_index(call, x, shard, call.argument(1, "dim", 0) % x.ndim)


@operand_rule("select", linear=always)
def select(call: Call, x: Tensor, shard: Shard) -> Result:
    """Drop the dim."""
    return one_index(call, x, shard, call.argument(1, "dim") % x.ndim)


@operand_rule("index_select", linear=always)
def index_select(call: Call, x: Tensor, shard: Shard) -> Result:
    """Keep the layout, unless indices of the sharded dim are picked."""
    return keep_whole(call, x, shard, [call.argument(1, "dim") % x.ndim], "picks indices of")


@rule("gather")
def gather(call: Call) -> Result:
    """Keep the layout where the indices are cut alike, unless those of the sharded dim are picked."""
    x, index = operand(call), call.argument(2, "index")
    dim = call.argument(1, "dim") % x.ndim
    layouts = [(x, call.layout(x)), (index, call.layout(index))]
    for t, layout in layouts:
        if isinstance(layout, Partial):
            raise refuse_partial(call, t)
        if isinstance(layout, Shard):
            keep_whole(call, t, layout, [dim], "picks indices of")
    result = agree(call, layouts, x.ndim)
    assert isinstance(result, Shard)
    if x.shape[result.dim] != index.shape[result.dim]:
        keep_whole(call, x, result, [result.dim], "picks a part of")
    return result


@rule("embedding")
def embedding(call: Call) -> Result:
    """Cut what is looked up as the columns of the table are, or as the indices into a whole table are."""
    index, table = call.argument(0, "input"), call.argument(1, "weight")
    where, cut = call.layout(index), call.layout(table)
    for t, layout in ((index, where), (table, cut)):
        if isinstance(layout, Partial):
            raise refuse_partial(call, t)
    if not isinstance(cut, Shard):
        return where
    if isinstance(where, Shard):
        raise Mismatch(
            f"{call.name} is given indices and a table that are both cut, from {call.source(index)} "
            f"and {call.source(table)}",
            f"leave {call.source(index)} whole",
            KeepWhole(call.made_by(index), call.name),
        )
    keep_whole(call, table, cut, [0], "picks rows along")
    return cut.at(index.ndim)


# ---------------------------------------------------------------- x[...]


@dataclass(frozen=True)
class Indexed:
    """Where the sharded dim lies in `x[...]`; `ndim` counts the dims of the result."""

    shard: Shard
    ndim: int


def spelled_out(x: Tensor, index: Any) -> list[Any]:
    """Return an index with one entry per dim of `x`, plus those that consume none (None) or several (masks)."""
    entries = list(index) if isinstance(index, tuple) else [index]
    used = sum(consumed(entry) for entry in entries)
    place = next((i for i, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    entries[place : place + 1] = [slice(None)] * (x.ndim - used)
    return entries


def consumed(entry: Any) -> int:
    """Return how many dims an entry of an index consumes."""
    if isinstance(entry, Tensor) and entry.dtype == torch.bool:
        return entry.ndim
    return 0 if entry is None or entry is Ellipsis else 1


def produced(entry: Any) -> int:
    """Return how many dims an entry of an index leaves in the result."""
    if isinstance(entry, Tensor) and entry.dtype != torch.bool:
        return entry.ndim
    if isinstance(entry, list):
        return torch.as_tensor(entry).ndim
    return 0 if isinstance(entry, int) and not isinstance(entry, bool) else 1


def dims_of(call: Call, x: Tensor, entries: list[Any]) -> list[tuple[int, int]]:
    """Return the dims that each entry consumes and leaves; several tensors side by side leave one group of dims."""
    dims = [(consumed(entry), produced(entry)) for entry in entries]
    tensors = [i for i, entry in enumerate(entries) if isinstance(entry, (Tensor, list))]
    apart = tensors != list(range(tensors[0], tensors[0] + len(tensors))) if tensors else False
    if apart or any(isinstance(e, bool) or (isinstance(e, Tensor) and not consumed(e)) for e in entries):
        raise Mismatch(
            f"{call.name} indexes {call.layout(x)} from {call.source(x)} "
            "with several tensors that are not side by side",
            "index one dim after the other",
            KeepWhole(call.made_by(x), call.name),
        )
    for place, i in enumerate(tensors):
        dims[i] = (dims[i][0], 0 if place else max(dims[j][1] for j in tensors))
    return dims


def indexed(call: Call, x: Tensor, index: Any, shard: Shard) -> Indexed:
    """Follow the sharded dim of `x` through an index."""
    entries = spelled_out(x, index)
    dims = dims_of(call, x, entries)
    place, before = 0, 0
    while before + dims[place][0] <= shard.dim:
        before, place = before + dims[place][0], place + 1
    blocks = sliced(call, x, shard, entries[place])
    return Indexed(shard.at(sum(left for _, left in dims[:place])).of(*blocks), sum(left for _, left in dims))


def sliced(call: Call, x: Tensor, shard: Shard, entry: Any) -> tuple[int, ...]:
    """Return the blocks that one entry of an index leaves of the sharded dim."""
    if not isinstance(entry, slice):
        one_index(call, x, shard, shard.dim)
    _, _, step = entry.indices(shard.size)
    return cut_blocks(call, x, shard, entry, around(entry, shard.size) if step == 1 else ())


@operand_rule("__getitem__", linear=always)
def getitem(call: Call, x: Tensor, shard: Shard) -> Result:
    """Follow the sharded dim through slices; single and listed indices may be of other dims only."""
    return indexed(call, x, call.args[1], shard).shard


@rule("__setitem__")
def setitem(call: Call) -> Result:
    """Write a number, or what is cut as the slice is; the layout is the target's."""
    x, index, value = call.args
    layout = call.layout(x)
    if not isinstance(layout, Shard):
        others = [t for t in call.tensors if t is not x and call.layout(t) != WHOLE]
        raise writes_into_whole(call, x, others[0] if others else x)
    whole_rest(call, x, tensors_in(index))
    slot = indexed(call, x, index, layout)
    if not isinstance(value, Tensor):
        return layout
    dim = slot.shard.dim - (slot.ndim - value.ndim)
    written = call.layout(value)
    if isinstance(written, Partial):
        raise refuse_partial(call, value)
    if isinstance(written, Shard) and (dim < 0 or written != slot.shard.at(dim)):
        raise Mismatch(
            f"{call.name} writes {written} from {call.source(value)} into {slot.shard} from {call.source(x)}",
            "give both the same blocks",
            Align(call.made_by(value), written, call.made_by(x), slot.shard),
        )
    if written == WHOLE and dim >= 0 and not follows(call, value, dim):
        raise Mismatch(
            f"{call.name} writes a whole tensor of {shape_of(value)} from {call.source(value)} into {slot.shard} "
            f"from {call.source(x)}",
            f"shard {call.source(value)} the same way, or leave {call.source(x)} out of the plan",
            ShardToo(call.made_by(value), dim, value.ndim, slot.shard.at(dim)),
        )
    return layout
