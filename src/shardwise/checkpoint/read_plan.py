"""What a rank reads of a checkpoint, as plain data: which bytes of which file go where, and how many there are.

Made of checked headers and the layout table, and of nothing else: no file is opened here. `Shard.spans` alone
says which slice is whose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path

import torch

from shardwise.checkpoint.index import TensorEntry
from shardwise.checkpoint.layouts import PiecedEntry
from shardwise.errors import CheckpointError
from shardwise.plan.layout import Layout, Shard, Span, overlaps

CHUNK = 16 * 2**20
"""Bytes of one read at most: the unit of threads, progress and staging. 1 to 64 MiB were equally fast."""

SMALL = 64 * 2**10
COALESCED = 2**20
"""Tensors up to `SMALL` that are neighbours in their file are read together, up to this many bytes."""

Segment = tuple[int, int]
"""Where bytes are: offset and length."""


@dataclass(frozen=True)
class Wanted:
    """One tensor of a checkpoint that a rank needs: where it is, how it is cut, and as what it is to arrive."""

    entry: TensorEntry
    layout: Layout
    dtype: torch.dtype

    def local_shape(self, rank: int, degree: int) -> tuple[int, ...]:
        """Return the shape of one rank's slice."""
        return self.layout.local_shape(self.entry.shape, rank, degree)


@dataclass(frozen=True)
class Place:
    """A part of the slice of one tensor, in bytes of the file's dtype.

    Rows are packed, or begin `pitch` bytes apart: where a slice is put together from the pieces of several files.
    """

    key: str
    start: int
    nbytes: int
    pitch: int = 0


@dataclass(frozen=True)
class Read:
    """Bytes of one file that are read one after another, and where they go.

    They are `rows` rows, `pitch` bytes apart, of which each gives the same segments. A contiguous run is one row
    of one segment, and the only kind that may go to several places.
    """

    file: Path
    offset: int
    segments: tuple[Segment, ...]
    places: tuple[Place, ...]
    rows: int = 1
    pitch: int = 0

    @cached_property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return self.rows * sum(length for _, length in self.segments)

    @property
    def end(self) -> int:
        """The first byte of the file behind the read."""
        start, length = self.segments[-1]
        return self.offset + (self.rows - 1) * self.pitch + start + length

    @property
    def bases(self) -> range:
        """Where the rows begin in the file."""
        pitch = self.pitch or 1
        return range(self.offset, self.offset + self.rows * pitch, pitch)

    def runs(self) -> Iterator[Segment]:
        """Yield the contiguous runs in the file, row after row: in the order in which they are packed."""
        return ((base + start, length) for base in self.bases for start, length in self.segments)

    def parts(self, limit: int) -> Iterator[Read]:
        """Yield reads of at most `limit` bytes that together are this one; `limit` is a multiple of 8.

        Whole rows stay together where one fits.
        """
        if self.nbytes <= limit:
            yield self
        elif len(self.places) > 1:
            for offset, place in self._each_place():
                run = replace(self, offset=offset, segments=((0, place.nbytes),), places=(place,))
                yield from run.parts(limit)
        elif self.rows > 1 and self.nbytes // self.rows <= limit:
            yield from self._groups_of_rows(limit // (self.nbytes // self.rows))
        else:
            yield from self._cut_runs(limit)

    def _each_place(self) -> Iterator[tuple[int, Place]]:
        offset = self.offset
        for place in self.places:
            yield offset, place
            offset += place.nbytes

    def _groups_of_rows(self, size: int) -> Iterator[Read]:
        (place,), width = self.places, self.nbytes // self.rows
        for first in range(0, self.rows, size):
            rows = min(size, self.rows - first)
            start = place.start + first * (place.pitch or width)
            part = replace(place, start=start, nbytes=rows * width)
            yield replace(self, offset=self.offset + first * self.pitch, rows=rows, places=(part,))

    def _cut_runs(self, limit: int) -> Iterator[Read]:
        (place,), width = self.places, self.nbytes // self.rows
        for row, base in enumerate(self.bases):
            start = place.start + row * (place.pitch or width)
            for offset, length in self.segments:
                for cut in range(0, length, limit):
                    size = min(limit, length - cut)
                    part = Place(place.key, start + cut, size)
                    yield Read(self.file, base + offset + cut, ((0, size),), (part,))
                start += length


@dataclass(frozen=True)
class ReadPlan:
    """All that one rank reads, in file order, so that ranks find each other's pages in the cache."""

    rank: int
    degree: int
    wanted: Mapping[str, Wanted]
    reads: tuple[Read, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of tensor data that the rank reads."""
        return sum(read.nbytes for read in self.reads)

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """The files that it reads from."""
        return tuple(dict.fromkeys(read.file for read in self.reads))


def plan_reads(wanted: Mapping[str, Wanted], rank: int, degree: int) -> ReadPlan:
    """Return what `rank` of `degree` reads to hold its slices of the `wanted` tensors, by their key."""
    reads = [read for key, want in wanted.items() for read in _reads_of(key, want, rank, degree)]
    reads.sort(key=lambda read: (str(read.file), read.offset))
    chunks = (part for read in _coalesced(reads, wanted) for part in read.parts(CHUNK))
    return ReadPlan(rank, degree, wanted, tuple(chunks))


def _reads_of(key: str, want: Wanted, rank: int, degree: int) -> list[Read]:
    """Return the reads of one tensor's slice: rows where it is cut along a later dim, else a run for each block."""
    entry, layout = want.entry, want.layout
    if isinstance(entry, PiecedEntry):
        return _reads_of_pieces(key, entry, layout, rank, degree)
    segments, rows, pitch = [(0, entry.nbytes)], 1, entry.nbytes
    if isinstance(layout, Shard):
        inner = prod(entry.shape[layout.dim + 1 :]) * entry.dtype.itemsize
        segments = [(span.start * inner, span.length * inner) for span in layout.spans(rank, degree)]
        rows, pitch = prod(entry.shape[: layout.dim]), entry.shape[layout.dim] * inner
    segments = _merged(segments)
    if segments == [(0, pitch)]:
        segments, rows = [(0, rows * pitch)], min(rows, 1)
    width = sum(length for _, length in segments)
    if not rows * width:
        return []
    if rows > 1:
        return [Read(entry.file, entry.offset, tuple(segments), (Place(key, 0, rows * width),), rows, pitch)]
    reads, done = [], 0
    for start, length in segments:
        reads.append(Read(entry.file, entry.offset + start, ((0, length),), (Place(key, done, length),)))
        done += length
    return reads


def _reads_of_pieces(key: str, entry: PiecedEntry, layout: Layout, rank: int, degree: int) -> list[Read]:
    """Return the reads of a slice of a tensor that is cut in its files: what the slice shares with each piece.

    Raises:
        CheckpointError: it is cut along another dim there.
    """
    cut, parts = entry.layout, len(entry.pieces)
    if not isinstance(cut, Shard):
        own = Wanted(entry.pieces[rank * parts // degree], layout, entry.dtype)
        return _reads_of(key, own, rank, degree)
    dim = cut.dim
    if isinstance(layout, Shard) and layout.dim != dim:
        raise CheckpointError(
            f"{key} is cut along dim {dim} in {entry.file.parent}, and along dim {layout.dim} by this plan: "
            "the checkpoint was sharded with another plan; put it together with `shardwise unshard` first"
        )
    spans = layout.spans(rank, degree) if isinstance(layout, Shard) else (Span(0, entry.shape[dim]),)
    width = sum(span.length for span in spans)
    reads = []
    for holder in cut.holders(parts, rank if parts == degree else 0):
        piece = entry.pieces[holder]
        for start, to, length in overlaps(cut.spans(holder, parts), spans):
            reads.append(_read_of_piece(key, piece, dim, (start, to, length), width))
    return [read for read in reads if read.nbytes]


def _read_of_piece(key: str, piece: TensorEntry, dim: int, overlap: tuple[int, int, int], width: int) -> Read:
    """Return the read of a run of indices of a piece, which goes into a slice that is `width` indices wide."""
    start, to, length = overlap
    rows, inner = prod(piece.shape[:dim]), prod(piece.shape[dim + 1 :]) * piece.dtype.itemsize
    size, pitch = length * inner, piece.shape[dim] * inner
    if rows == 1 or size == pitch == width * inner:
        place = Place(key, to * inner, rows * size)
        return Read(piece.file, piece.offset + start * inner, ((0, rows * size),), (place,))
    place = Place(key, to * inner, rows * size, width * inner)
    return Read(piece.file, piece.offset, ((start * inner, size),), (place,), rows, pitch)


def _merged(segments: Iterable[Segment]) -> list[Segment]:
    """Return ascending segments without empty ones, those that touch made one."""
    merged: list[Segment] = []
    for start, length in segments:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        elif length:
            merged.append((start, length))
    return merged


def _coalesced(reads: Iterable[Read], wanted: Mapping[str, Wanted]) -> Iterator[Read]:
    """Yield the reads, in file order, small neighbours in a file made one."""
    last: Read | None = None
    for read in reads:
        if last is not None and _may_join(last, read, wanted):
            size = last.nbytes + read.nbytes
            last = replace(last, segments=((0, size),), places=(*last.places, *read.places))
            continue
        if last is not None:
            yield last
        last = read
    if last is not None:
        yield last


def _may_join(last: Read, read: Read, wanted: Mapping[str, Wanted]) -> bool:
    """Return whether two reads may be one; of one dtype, so that each tensor starts at a multiple of its size."""
    dtypes = {wanted[item.places[0].key].entry.dtype for item in (last, read)}
    return (
        (read.file, read.offset) == (last.file, last.end)
        and last.rows == read.rows == len(dtypes) == 1
        and max(last.places[-1].nbytes, read.nbytes) <= SMALL
        and last.nbytes + read.nbytes <= COALESCED
    )


def needed_ranges(plans: Iterable[ReadPlan]) -> list[tuple[Path, int, int]]:
    """Return (file, start, end) of the bytes that several ranks need together, in file order, those that touch merged.

    A read of rows counts from its first byte to its last: the ranks share the pages of each row.
    """
    ranges: list[tuple[Path, int, int]] = []
    spans = {(str(read.file), read.offset, read.end) for plan in plans for read in plan.reads}
    for file, start, end in sorted(spans):
        if ranges and ranges[-1][0] == Path(file) and start <= ranges[-1][2]:
            ranges[-1] = (ranges[-1][0], ranges[-1][1], max(ranges[-1][2], end))
        else:
            ranges.append((Path(file), start, end))
    return ranges
