"""What would make a plan right, as data: the checker's findings carry one, inference applies it.

`producers` are the paths of the modules that made a tensor: the Linears behind it or, where no Linear is, the
module that returned it (a rotary table).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.plan.layout import Shard


@dataclass(frozen=True)
class ShardToo:
    """A whole tensor meets a shard: cut what `producers` made, along `dim` of its `ndim`, like `shard`."""

    producers: tuple[str, ...]
    dim: int
    ndim: int
    shard: Shard


@dataclass(frozen=True)
class PlanRowwise:
    """An unplanned Linear is fed a shard: make it rowwise with these blocks."""

    linear: str
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class SplitInput:
    """A rowwise Linear is fed a whole tensor: make it `rowwise_split_input`."""

    linear: str


@dataclass(frozen=True)
class RefineBlocks:
    """A split or slice cuts through the blocks of a shard: its producer has smaller blocks.

    `piece` are the blocks of the tensor that was cut, which may be a part of what the producer made; `sizes`
    what they must become.
    """

    producers: tuple[str, ...]
    piece: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class EqualBlocks:
    """A shard is taken apart in `count` equal parts: its producer has that many equal blocks."""

    producers: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class SplitView:
    """A view takes a sharded dim apart in a way that its blocks do not allow."""

    producers: tuple[str, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    shard: Shard


@dataclass(frozen=True)
class Align:
    """Two shards with different blocks meet."""

    producers: tuple[str, ...]
    shard: Shard
    other_producers: tuple[str, ...]
    other: Shard


@dataclass(frozen=True)
class KeepWhole:
    """The function `name` needs all of the sharded dim: its producers cannot be sharded, unless a style does it."""

    producers: tuple[str, ...]
    function: str


@dataclass(frozen=True)
class Divide:
    """A size in the code of `module` is not local: divide one of its integer attributes."""

    module: str
    whole: tuple[int, ...] | None
    local: tuple[int, ...] | None


Repair = (
    ShardToo | PlanRowwise | SplitInput | RefineBlocks | EqualBlocks | SplitView | Align | KeepWhole | Divide
)
