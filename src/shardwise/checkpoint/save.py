"""Writes a sharded model as the whole checkpoint it came from: the ranks' slices, brought to one of them in pieces.

A write is a read turned round, so the plan of the reads says who has which bytes of a file. They are brought in the
order of the file, at most 16 MiB at a time: no rank holds a whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from shardwise.checkpoint.read import Progress
from shardwise.checkpoint.read_plan import CHUNK, Read, Wanted, plan_reads
from shardwise.checkpoint.write import NewCheckpoint, NewFile, created, write_all, write_runs
from shardwise.plan.layout import Layout, Replicated, Shard
from shardwise.runtime.group import TensorParallelGroup

Write = tuple[int, Read]
"""A rank, and what it has: the bytes that it would read from there."""


def plan_writes(wanted: Mapping[str, Wanted], degree: int) -> list[Write]:
    """Return who writes what of the `wanted` tensors, in file order: each byte once, of the first rank that has it."""
    writes: list[Write] = []
    for rank in range(degree):
        mine = {key: want for key, want in wanted.items() if rank in _writers(want.layout, degree)}
        writes += [(rank, read) for read in plan_reads(mine, rank, degree).reads]
    return sorted(writes, key=lambda write: (write[1].offset, write[0]))


def _writers(layout: Layout, degree: int) -> list[int]:
    return layout.holders(degree) if isinstance(layout, Shard) else [0]


def write_gathered(
    checkpoint: NewCheckpoint,
    folder: Path | None,
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    group: TensorParallelGroup,
    patience: timedelta,
    progress: Progress | None = None,
) -> None:
    """Write the weight files of a checkpoint, all ranks together.

    Args:
        checkpoint: What is to be written.
        folder: Where; only rank 0, which writes, needs to know.
        tensors: This rank's slices, by name.
        layouts: How they are cut; what is not listed is whole.
        group: The ranks.
        patience: How long to wait for the slowest rank, after each file.
        progress: Told of bytes as they are written.

    Raises:
        CheckpointError: rank 0 cannot write; on every rank.
        RankFailure: another rank failed.
    """
    courier = _Courier(tensors, group)
    for file in checkpoint.files:
        writes = plan_writes(_wanted(file, layouts), group.degree)
        subject = f"writing {file.name}"
        with ExitStack() as stack:
            with group.agreement(subject, patience):
                descriptor = (
                    None if folder is None else stack.enter_context(created(folder / file.name, file))
                )
            with group.agreement(subject, patience), stack:
                courier.bring(writes, _sink(descriptor, checkpoint.nbytes, progress))


def write_own(folder: Path, file: NewFile, tensors: Mapping[str, Tensor], progress: Progress | None) -> None:
    """Write a file with slices of this rank, each as it is.

    Raises:
        CheckpointError: it cannot be written.
    """
    with created(folder / file.name, file) as descriptor:
        for name, entry in file.entries.items():
            data = _flat(tensors[name])
            for start in range(0, entry.nbytes, CHUNK):
                piece = data[start : start + CHUNK].cpu().numpy().data
                write_all(descriptor, piece, entry.offset + start)
                if progress is not None:
                    progress(len(piece), file.size - len(file.start))


def _wanted(file: NewFile, layouts: Mapping[str, Layout]) -> dict[str, Wanted]:
    return {
        name: Wanted(entry, layouts.get(name, Replicated()), entry.dtype)
        for name, entry in file.entries.items()
    }


def _sink(descriptor: int | None, total: int, progress: Progress | None) -> Callable[[Read, Tensor], None]:
    """Return what is done with each piece on rank 0."""

    def write(read: Read, piece: Tensor) -> None:
        assert descriptor is not None
        write_runs(descriptor, read, piece.cpu().numpy().data)
        if progress is not None:
            progress(read.nbytes, total)

    return write


class _Courier:
    """Brings pieces of the ranks' slices to rank 0.

    A rank that fails goes on sending, or receiving, to the end of the file: the others would wait for it.
    """

    def __init__(self, tensors: Mapping[str, Tensor], group: TensorParallelGroup) -> None:
        self._tensors, self._group = tensors, group
        self._transit = torch.empty(0, dtype=torch.uint8, device=group.device)
        self._error: BaseException | None = None

    @torch.no_grad()
    def bring(self, writes: Iterable[Write], write: Callable[[Read, Tensor], None]) -> None:
        """Call `write` on rank 0 with each piece.

        Raises:
            Exception: what this rank failed with.
        """
        for owner, read in writes:
            if self._group.rank not in (0, owner):
                continue
            piece = self._room(read.nbytes)
            with self._remembered():
                piece = self._piece(read) if self._group.rank == owner else piece
            self._group.bring(piece, owner)
            with self._remembered():
                if self._group.rank == 0 and self._error is None:
                    write(read, piece)
        if self._error is not None:
            raise self._error

    @contextmanager
    def _remembered(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._error = self._error or error

    def _room(self, nbytes: int) -> Tensor:
        """Return bytes to receive into; one piece at a time is under way."""
        if nbytes > len(self._transit):
            self._transit = torch.empty(min(CHUNK, 2 * nbytes), dtype=torch.uint8, device=self._group.device)
        return self._transit[:nbytes]

    def _piece(self, read: Read) -> Tensor:
        """Return the bytes of this rank's slices that `read` is about, on the group's device."""
        parts = [
            _flat(self._tensors[place.key])[place.start : place.start + place.nbytes] for place in read.places
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(self._group.device)


def _flat(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor; it is copied only if it lies otherwise in memory than it is written."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
