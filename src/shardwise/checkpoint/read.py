"""Reads what a plan says: positional reads, straight into the tensors where nothing is converted.

Never maps a file (a mapped file that shrinks kills the process; a short read is an exception) and never
holds more of a tensor than this rank's slice. Where the dtype or the device differ, the bytes pass through
a small stage. Calls no collective: ranks read at their own speed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from shardwise.checkpoint.ahead import ReadAhead, is_cold, window_for
from shardwise.checkpoint.read_plan import Read, ReadPlan, Wanted, needed_ranges, plan_reads
from shardwise.checkpoint.report import LoadReport
from shardwise.checkpoint.staging import Copy, Stage, stage_for
from shardwise.errors import CheckpointError
from shardwise.runtime.modes import in_modes_of_this_thread

_T = TypeVar("_T")

MAX_THREADS = 4

Stamp = tuple[int, int, int]
"""What changes when a file is written to or replaced: its size, the time of its last change, its number."""

Progress = Callable[[int, int], object]
"""Called with the number of bytes that have just arrived and of all that will, by one thread at a time."""


def stamp(status: os.stat_result) -> Stamp:
    """Return the stamp of a file."""
    return status.st_size, status.st_mtime_ns, status.st_ino


@dataclass
class SliceReader:
    """Reads one rank's slices of a checkpoint's tensors onto its device.

    Args:
        rank: The rank's coordinate, of `degree`.
        degree: Number of ranks.
        device: Where the slices go.
        neighbours: The coordinates of the ranks on this rank's node, this rank's among them. They share the cores,
            and the work of bringing cold files in.
        stamps: What the files were when their headers were read; by default what they are when they are opened.
        progress: Told of bytes as they arrive.
        threads: Number of reading threads; by default this rank's share of the cores, from 1 to 4.
    """

    rank: int
    degree: int
    device: torch.device
    neighbours: Sequence[int] = ()
    stamps: Mapping[Path, Stamp] = field(default_factory=dict)
    progress: Progress | None = None
    threads: int | None = None

    empty: ClassVar[Callable[..., Tensor] | None] = None
    """Makes the tensors that are read into; a measurement may put memory here that is mapped already."""

    def read(self, wanted: Mapping[str, Wanted]) -> tuple[dict[str, Tensor], LoadReport]:
        """Return this rank's slice of each of the `wanted` tensors, by key, and what it took.

        Raises:
            CheckpointError: a file cannot be read, ends early, or has changed since its header was read.
        """
        start = time.perf_counter()
        plan = plan_reads(wanted, self.rank, self.degree)
        tensors = {
            key: (self.empty or torch.empty)(
                want.local_shape(self.rank, self.degree), dtype=want.dtype, device=self.device
            )
            for key, want in wanted.items()
        }
        threads = max(1, min(self.threads or self._share_of_the_cores(), len(plan.reads)))
        with ExitStack() as stack:
            ahead = self._read_ahead(plan, wanted)
            queue = _Queue(plan, self.progress, stack.enter_context(ahead).reached if ahead else None)
            lanes = [_Lane(tensors, wanted, self.device, self.stamps) for _ in range(threads)]
            _run(lanes, queue)
        return tensors, LoadReport(
            bytes_read=plan.nbytes,
            file_bytes=sum(want.entry.nbytes for want in wanted.values()),
            seconds=time.perf_counter() - start,
            read_seconds=sum(lane.read_seconds for lane in lanes),
            convert_seconds=sum(lane.convert_seconds for lane in lanes),
            threads=threads,
            staging_bytes=sum(lane.staging_bytes for lane in lanes),
            cold=ahead is not None,
        )

    def _share_of_the_cores(self) -> int:
        affinity = getattr(os, "sched_getaffinity", None)
        cores = len(affinity(0)) if affinity else os.cpu_count() or 1
        return min(MAX_THREADS, cores // max(1, len(self.neighbours)))

    def _read_ahead(self, plan: ReadPlan, wanted: Mapping[str, Wanted]) -> ReadAhead | None:
        """Return what brings the node's files in, or None if this rank's part of them is in memory."""
        with OpenFiles(self.stamps) as files:
            if not is_cold(plan.reads, files.open):
                return None
        ranks = sorted({*self.neighbours, self.rank})
        everyone = (plan if rank == self.rank else plan_reads(wanted, rank, self.degree) for rank in ranks)
        return ReadAhead(needed_ranges(everyone), ranks.index(self.rank), len(ranks), window_for(len(ranks)))


class _Queue:
    """Reads to be done, taken one by one in file order by several threads; the first failure ends all."""

    def __init__(
        self, plan: ReadPlan, progress: Progress | None, begun: Callable[[Read], None] | None
    ) -> None:
        self._reads, self._progress, self._begun = iter(plan.reads), progress, begun
        self._total = plan.nbytes
        self._lock = Lock()
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[Read]:
        while (read := self._take()) is not None:
            yield read
            self._done(read)

    def fail(self, error: BaseException) -> None:
        """Let no thread take another read."""
        with self._lock:
            self.error = self.error or error

    def _take(self) -> Read | None:
        with self._lock:
            read = next(self._reads, None) if self.error is None else None
        if read is not None and self._begun is not None:
            self._begun(read)
        return read

    def _done(self, read: Read) -> None:
        if self._progress is not None:
            with self._lock:
                self._progress(read.nbytes, self._total)


class OpenFiles:
    """The files that one thread has open: the system reads ahead by descriptor, and for one stream on each.

    Raises:
        CheckpointError: at the end, if a file was written to in the meantime.
    """

    def __init__(self, stamps: Mapping[Path, Stamp]) -> None:
        self._stamps = dict(stamps)
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                for file, descriptor in self._descriptors.items():
                    self._check(file, descriptor)
        finally:
            for descriptor in self._descriptors.values():
                os.close(descriptor)

    def open(self, file: Path) -> int:
        """Return a descriptor of a file, the same at each call."""
        if file not in self._descriptors:
            try:
                descriptor = os.open(file, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(f"{file} cannot be opened: {error}") from error
            self._descriptors[file] = descriptor
            self._check(file, descriptor)
        return self._descriptors[file]

    def fill(self, read: Read, target: memoryview) -> None:
        """Read the runs one after another into `target`.

        Raises:
            CheckpointError: a file cannot be read, or ends early.
        """
        descriptor, preadv, position, base = self.open(read.file), os.preadv, 0, read.offset
        try:
            # The system call of a short row takes less than a microsecond: a generator of runs would add a third to
            # it. A call that a signal interrupts is repeated by Python.
            for base in read.bases:
                for start, length in read.segments:
                    end = position + length
                    got = preadv(descriptor, (target[position:end],), base + start)
                    if got != length:
                        self._go_on(descriptor, read, target[position:end], base + start, got)
                    position = end
        except OSError as error:
            name = read.places[0].key
            raise CheckpointError(
                f"{read.file}: reading {name} at byte {base} or behind it failed: {error}"
            ) from error

    def _go_on(self, descriptor: int, read: Read, target: memoryview, offset: int, got: int) -> None:
        """Complete a run of which only the first `got` bytes have come."""
        done = got
        while done < len(target):
            if got == 0:
                raise CheckpointError(
                    f"{read.file} ends at byte {offset + done}, in the middle of {read.places[0].key} "
                    f"({len(target) - done} bytes missing): the file has changed or is truncated"
                )
            got = os.preadv(descriptor, (target[done:],), offset + done)
            done += got

    def _check(self, file: Path, descriptor: int) -> None:
        now = stamp(os.fstat(descriptor))
        if self._stamps.setdefault(file, now) != now:
            raise CheckpointError(f"{file} was changed while it was read")


class _Lane:
    """One thread's way through the queue: its open files, its stage, and its times."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        wanted: Mapping[str, Wanted],
        device: torch.device,
        stamps: Mapping[Path, Stamp],
    ) -> None:
        self._tensors, self._wanted, self._device = tensors, wanted, device
        self._files = OpenFiles(stamps)
        self._stage: Stage | None = None
        self.read_seconds = self.convert_seconds = 0.0

    @property
    def staging_bytes(self) -> int:
        return self._stage.nbytes if self._stage is not None else 0

    @torch.no_grad()
    def run(self, queue: _Queue) -> None:
        """Do reads until the queue is empty or has failed."""
        try:
            with self._files, self._arrived():
                for read in queue:
                    self._do(read)
        except BaseException as error:
            queue.fail(error)

    @contextmanager
    def _arrived(self) -> Iterator[None]:
        """Leave no copy on its way, also when a read fails: its target is freed, and soon used for something else."""
        try:
            yield
        finally:
            if self._stage is not None:
                self._convert(self._stage.finish)

    def _do(self, read: Read) -> None:
        key = read.places[0].key
        tensor, dtype = self._tensors[key], self._wanted[key].entry.dtype
        packed = len(read.places) == 1 and not read.places[0].pitch
        if packed and self._device.type == "cpu" and tensor.dtype == dtype:
            self._fill(read, _bytes(tensor)[read.places[0].start :])
            return
        if self._stage is None:
            self._stage = stage_for(self._device)
        for part in read.parts(self._stage.limit):
            room = self._convert(self._stage.room, part.nbytes)
            self._fill(part, _bytes(room))
            self._convert(self._stage.deliver, self._copies(part, room))

    def _copies(self, read: Read, room: Tensor) -> list[Copy]:
        """Return what goes where of the bytes of a read, which are packed in `room`."""
        copies, done = [], 0
        for place in read.places:
            dtype = self._wanted[place.key].entry.dtype
            source = room[done : done + place.nbytes].view(dtype)
            target = self._tensors[place.key].view(-1)[place.start // dtype.itemsize :]
            if place.pitch:
                source = source.view(read.rows, -1)
                target = target.as_strided(source.shape, (place.pitch // dtype.itemsize, 1))
            else:
                target = target[: len(source)]
            copies.append((target, source))
            done += place.nbytes
        return copies

    def _fill(self, read: Read, target: memoryview) -> None:
        begun = time.perf_counter()
        self._files.fill(read, target)
        self.read_seconds += time.perf_counter() - begun

    def _convert(self, function: Callable[..., _T], *args: Any) -> _T:
        begun = time.perf_counter()
        result = function(*args)
        self.convert_seconds += time.perf_counter() - begun
        return result


def _run(lanes: Sequence[_Lane], queue: _Queue) -> None:
    """Run the lanes, the first in this thread, and raise the first error of all."""
    if len(lanes) == 1:
        lanes[0].run(queue)
    else:
        with ThreadPoolExecutor(len(lanes) - 1, "shardwise-read") as pool:
            for lane in lanes[1:]:
                pool.submit(in_modes_of_this_thread(lane.run), queue)
            lanes[0].run(queue)
    if queue.error is not None:
        raise queue.error


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data
