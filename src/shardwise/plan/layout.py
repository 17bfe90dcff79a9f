"""How a tensor lies on the ranks, as integers: the one place that says which part rank r owns.

Loading, in-memory sharding, the memory forecast and everything else that cuts a tensor ask `Shard`; nobody
computes an offset anywhere else. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from math import isqrt, prod


@dataclass(frozen=True)
class Span:
    """A run of indices along one dim: `start`, `start + 1`, ..., `start + length - 1`."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        """The first index after the run."""
        return self.start + self.length


@dataclass(frozen=True)
class Replicated:
    """Every rank holds the whole tensor."""

    def local_shape(self, shape: tuple[int, ...], rank: int, degree: int) -> tuple[int, ...]:
        """Return `shape`: a replicated tensor has its full size on each rank."""
        return shape

    def __str__(self) -> str:
        """Return the word used in reports."""
        return "replicated"


@dataclass(frozen=True)
class Shard:
    """Each rank holds one piece of every block along `dim`, in block order.

    `blocks` are the sizes of the tensors that are fused along `dim`; they sum to its size. A plain weight
    has one block. Fused q, k and v have three: cutting their sum in equal parts would give rank 0 all of q
    and half of k.

    `copies` neighbouring ranks hold the same piece, so that there are `degree / copies` pieces: the key and value
    heads of an attention that has fewer of them than there are ranks.

    `units`, if not 0, is the number of pieces of each block that must stay whole, such as heads that the degree does
    not divide. A rank then holds several neighbouring ones, the first ranks one more than the last.
    """

    dim: int
    blocks: tuple[int, ...]
    copies: int = 1
    units: int = 0

    def __post_init__(self) -> None:
        """Hold dims to be counted from the front: the shapes below are cut there."""
        assert self.dim >= 0, self.dim
        assert self.copies >= 1, self.copies
        assert not (self.units and self.copies > 1), self

    @property
    def size(self) -> int:
        """The full size of the sharded dim."""
        return sum(self.blocks)

    def at(self, dim: int) -> Shard:
        """Return the same cut along another dim."""
        return replace(self, dim=dim)

    def of(self, *blocks: int) -> Shard:
        """Return a cut of the same dim with other blocks."""
        return replace(self, blocks=blocks)

    def pieces(self, degree: int) -> int:
        """Return how many different pieces there are on `degree` ranks, each of them whole on some rank."""
        return self.units or degree // self.copies

    @property
    def division(self) -> tuple[int, int]:
        """What two cuts have in common, whatever their blocks, if a rank has the same part of each."""
        return self.copies, self.units

    def share(self, rank: int, degree: int) -> Span:
        """Return which pieces of each block `rank` of `degree` holds."""
        if not self.units:
            return Span(rank // self.copies, 1)
        each, more = divmod(self.units, degree)
        return Span(rank * each + min(rank, more), each + (rank < more))

    def holders(self, degree: int, preferred: int = 0) -> list[int]:
        """Return a rank for each piece that holds it: the `preferred` one, if it does, or else the first."""
        mine = self.share(preferred, degree)
        return [
            preferred if self.share(rank, degree) == mine else rank
            for rank in range(degree)
            if rank == 0 or self.share(rank, degree) != self.share(rank - 1, degree)
        ]

    def scaled(self, size: int, rank: int, degree: int) -> int:
        """Return what a size, or the border of a block, along the sharded dim is on a rank."""
        return size * self.share(rank, degree).length // self.pieces(degree)

    def pieces_are_single(self, degree: int) -> bool:
        """Return whether each rank holds one index of each block: one head of the keys, say."""
        return not self.units and all(block == self.pieces(degree) for block in self.blocks)

    def indivisible(self, degree: int) -> tuple[int, ...]:
        """Return the positions of the blocks that cannot be cut for `degree` ranks."""
        pieces = self.pieces(degree)
        return tuple(
            i for i, block in enumerate(self.blocks) if block % pieces or (self.units and pieces < degree)
        )

    def spans(self, rank: int, degree: int) -> tuple[Span, ...]:
        """Return what `rank` of `degree` owns along `dim`: one span per block, in ascending order."""
        spans, offset, share = [], 0, self.share(rank, degree)
        for block in self.blocks:
            piece = block // self.pieces(degree)
            spans.append(Span(offset + share.start * piece, share.length * piece))
            offset += block
        return tuple(spans)

    def local_size(self, rank: int, degree: int) -> int:
        """Return how much of the sharded dim `rank` of `degree` holds."""
        return self.scaled(self.size, rank, degree)

    def local_shape(self, shape: tuple[int, ...], rank: int, degree: int) -> tuple[int, ...]:
        """Return the shape of one rank's piece of a tensor of `shape`."""
        return (*shape[: self.dim], self.local_size(rank, degree), *shape[self.dim + 1 :])

    def __str__(self) -> str:
        """Return e.g. `shard(dim 0)`, `shard(dim 0, blocks 64+64+64)`, with ", 2 copies" or ", 30 units"."""
        blocks = f", blocks {'+'.join(map(str, self.blocks))}" if len(self.blocks) > 1 else ""
        copies = f", {self.copies} copies" if self.copies > 1 else ""
        uneven = f", {self.units} units" if self.units else ""
        return f"shard(dim {self.dim}{blocks}{copies}{uneven})"


@dataclass(frozen=True)
class Partial:
    """Each rank holds one term of a sum; only activations are ever so, between a product and its reduction."""

    def __str__(self) -> str:
        """Return the word used in reports."""
        return "partial sum"


Layout = Replicated | Shard
"""How a parameter lies on the ranks."""

Activation = Replicated | Shard | Partial
"""How a value of the forward pass lies on the ranks."""


def divisors(number: int) -> list[int]:
    """Return the positive divisors of `number` in ascending order."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def followers(size: int, parts: int, shares: Iterable[Fraction] = ()) -> tuple[int, ...]:
    """Return what a size that may follow a divided one is on a rank: itself or a part of it.

    Args:
        size: On the whole model.
        parts: What is divided is divided by this number or by a divisor of it ...
        shares: ... or is this part of the whole on the rank.
    """
    parted = (Fraction(1, d) for d in divisors(parts))
    return tuple(
        dict.fromkeys(int(size * part) for part in (*parted, *shares) if (size * part).denominator == 1)
    )


def overlaps(source: Iterable[Span], target: Iterable[Span]) -> list[tuple[int, int, int]]:
    """Return what two pieces of one dim share, each of some spans: (index in one, index in the other, length)."""
    runs: list[tuple[int, int, int]] = []
    spans, at = list(target), 0
    for theirs in source:
        to = 0
        for mine in spans:
            start, stop = max(theirs.start, mine.start), min(theirs.stop, mine.stop)
            if start < stop:
                run = (at + start - theirs.start, to + start - mine.start, stop - start)
                before = runs[-1] if runs else (0, 0, 0)
                if (before[0] + before[2], before[1] + before[2]) == run[:2] and runs:
                    runs[-1] = (before[0], before[1], before[2] + run[2])
                else:
                    runs.append(run)
            to += mine.length
        at += theirs.length
    return runs


MAX_BLOCKS = 65536
"""A merge that gives more blocks than this is refused: each leading index adds the blocks once more."""


def view_shard(source: tuple[int, ...], target: tuple[int, ...], shard: Shard, degree: int) -> Shard | None:
    """Return where the shard of a tensor of shape `source` lies when it is viewed as `target`.

    The blocks, each times the elements behind the sharded dim, are a pattern on the flat tensor that repeats
    once per index in front of it. A target dim carries the shard if the part of the flat tensor that it spans is
    a multiple of that pattern (a merge) or a whole fraction of it (a split), and if each rank's piece of each block is
    a whole number of its indices. None if there is no such dim: then a rank's piece is not a piece of the result.
    """
    tail = prod(source[shard.dim + 1 :])
    pattern = tuple(block * tail for block in shard.blocks)
    pieces, found = shard.pieces(degree), []
    for dim, size in enumerate(target):
        step = prod(target[dim + 1 :])
        spanned = _pattern_of(pattern, size * step) if size >= pieces else None
        if spanned and all(part % (step * pieces) == 0 for part in spanned):
            found.append((step, shard.at(dim).of(*(part // step for part in spanned))))
    # A single piece, which all ranks hold, fits many dims: it is the outermost that it makes up alone.
    return min(found, key=lambda fit: (len(fit[1].blocks), -fit[0], -fit[1].dim))[1] if found else None


def _pattern_of(pattern: tuple[int, ...], length: int) -> tuple[int, ...] | None:
    """Return what a repeating `pattern` is over runs of `length`, if it is the same in each run."""
    period = sum(pattern)
    if not period or not length:
        return None
    if length % period == 0:
        times = length // period
        return pattern * times if times * len(pattern) <= MAX_BLOCKS else None
    parts, rest = divmod(period, length)
    if rest:
        return None
    part = pattern[: len(pattern) // parts]
    return part if part * parts == pattern else None


def slice_blocks(shard: Shard, start: int, stop: int, step: int, degree: int) -> tuple[int, ...] | None:
    """Return the blocks of `x[start:stop:step]` along a sharded dim; None if the slice cuts through a block.

    With a step, only a slice over the whole dim passes, and only if each rank's piece of each block is a
    multiple of the step.
    """
    blocks = shard.blocks
    if step != 1:
        whole = start < step and stop == sum(blocks)
        even = all(block % (step * shard.pieces(degree)) == 0 for block in blocks)
        return tuple(block // step for block in blocks) if whole and even else None
    kept, offset = [], 0
    for block in blocks:
        if start <= offset and offset + block <= stop:
            kept.append(block)
        elif start < offset + block and offset < stop:
            return None
        offset += block
    return tuple(kept)
