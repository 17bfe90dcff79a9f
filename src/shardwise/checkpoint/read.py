"""Reads this rank's bytes of a tensor: positional reads, straight into the tensor where nothing is converted.

Never maps a file (a mapped file that shrinks kills the process; a short read is an exception) and never
holds more of a tensor than this rank's slice. Where the dtype or the device differ, the bytes pass through
one small scratch buffer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.checkpoint.index import TensorEntry
from shardwise.errors import CheckpointError
from shardwise.plan.layout import Layout, Shard

_CAST_SCRATCH = 2**20  # fits a core's cache: a cast through 64 MiB takes 2.3 times as long
_DEVICE_SCRATCH = 16 * 2**20

Run = tuple[int, int]
"""A run of bytes in a file: offset and length."""


def runs(entry: TensorEntry, layout: Layout, rank: int, degree: int) -> Iterator[Run]:
    """Yield where the bytes of a rank's slice are, in the order in which they stand in the slice.

    A slice along dim 0 is one run for each block; along a later dim it is one for each row and block.
    """
    if not isinstance(layout, Shard):
        yield entry.offset, entry.nbytes
        return
    inner = prod(entry.shape[layout.dim + 1 :]) * entry.dtype.itemsize
    pitch = entry.shape[layout.dim] * inner
    spans = [(span.start * inner, span.length * inner) for span in layout.spans(rank, degree)]
    for row in range(prod(entry.shape[: layout.dim])):
        for start, length in spans:
            yield entry.offset + row * pitch + start, length


class _OpenFile(NamedTuple):
    descriptor: int
    stamp: tuple[int, int]


def _stamp(descriptor: int) -> tuple[int, int]:
    """Return what changes when a file is written to: its size, and the time of the last change."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


class SliceReader:
    """Reads slices of safetensors files. Use it as a context manager: it keeps the files open.

    Attributes:
        bytes_read: Bytes of tensor data read so far.

    Raises:
        CheckpointError: at the end, if a file was written to in the meantime.
    """

    def __init__(self, rank: int, degree: int, device: torch.device) -> None:
        self.rank, self.degree, self.device = rank, degree, device
        self.bytes_read = 0
        self._files: dict[Path, _OpenFile] = {}

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        changed = [file for file, opened in self._files.items() if _stamp(opened.descriptor) != opened.stamp]
        for opened in self._files.values():
            os.close(opened.descriptor)
        self._files.clear()
        if changed and error is None:
            raise CheckpointError(f"{changed[0]} was changed while it was read")

    def read(self, name: str, entry: TensorEntry, layout: Layout, dtype: torch.dtype) -> Tensor:
        """Return this rank's slice of one tensor on the reader's device, as `dtype`.

        Raises:
            CheckpointError: the file ends early or cannot be read.
        """
        shape = layout.local_shape(entry.shape, self.rank, self.degree)
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        pieces = runs(entry, layout, self.rank, self.degree)
        if self.device.type == "cpu" and dtype == entry.dtype:
            self._fill(name, entry.file, pieces, _bytes(tensor))
        else:
            self._fill_converted(name, entry, pieces, tensor)
        return tensor

    def _fill_converted(self, name: str, entry: TensorEntry, pieces: Iterator[Run], tensor: Tensor) -> None:
        """Read into `tensor` through a scratch buffer of the file's dtype."""
        limit = _CAST_SCRATCH if self.device.type == "cpu" else _DEVICE_SCRATCH
        scratch = torch.empty(min(limit, tensor.numel() * entry.dtype.itemsize), dtype=torch.uint8)
        flat, done = tensor.view(-1), 0
        for batch, size in _batches(pieces, scratch.numel()):
            self._fill(name, entry.file, iter(batch), _bytes(scratch[:size]))
            count = size // entry.dtype.itemsize
            flat[done : done + count].copy_(scratch[:size].view(entry.dtype))
            done += count

    def _fill(self, name: str, file: Path, pieces: Iterator[Run], target: memoryview) -> None:
        """Read the pieces one after another into `target`."""
        descriptor, position = self._open(file), 0
        for offset, length in pieces:
            end = position + length
            while position < end:
                got = self._read_once(name, file, descriptor, target[position:end], offset)
                position, offset = position + got, offset + got
            self.bytes_read += length

    def _read_once(self, name: str, file: Path, descriptor: int, target: memoryview, offset: int) -> int:
        try:
            got = os.preadv(descriptor, [target], offset)
        except OSError as error:
            raise CheckpointError(f"{file}: reading {name} at byte {offset} failed: {error}") from error
        if got == 0:
            raise CheckpointError(
                f"{file} ends at byte {offset}, in the middle of {name} ({len(target)} bytes missing): "
                "the file has changed or is truncated"
            )
        return got

    def _open(self, file: Path) -> int:
        if file not in self._files:
            try:
                descriptor = os.open(file, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(f"{file} cannot be opened: {error}") from error
            self._files[file] = _OpenFile(descriptor, _stamp(descriptor))
        return self._files[file].descriptor


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _batches(pieces: Iterator[Run], limit: int) -> Iterator[tuple[list[Run], int]]:
    """Yield groups of runs of at most `limit` bytes together, cutting those that are longer, with their size."""
    batch: list[Run] = []
    size = 0
    for offset, length in pieces:
        while length:
            part = min(length, limit - size)
            batch.append((offset, part))
            offset, length, size = offset + part, length - part, size + part
            if size == limit:
                yield batch, size
                batch, size = [], 0
    if batch:
        yield batch, size
