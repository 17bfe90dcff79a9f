"""Cold files: the ranks of a node bring in stripes of what they will all read, a bounded way ahead of the readers.

Slices along a later dim are many small reads, and storage is slow at those. So each rank asks the system for every
n-th stripe of the bytes that the node needs, in large requests. It is advice: nothing waits for it, what fails is
ignored, and it ends with the readers. No byte is read twice for it.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from threading import Condition, Thread
from types import TracebackType

from shardwise.checkpoint.read_plan import Read

logger = logging.getLogger(__name__)

STRIPE = 8 * 2**20
STEP = 2**20
"""Bytes of one piece of advice: Linux may cut longer ones short, without a word."""

WINDOW = 2 * 2**30
"""The most bytes ahead of the readers; never more than a tenth of the memory that the node can spare."""

PROBES = 16

Range = tuple[Path, int, int]
"""A file, and the first and last but one byte of a part of it."""


@dataclass(frozen=True)
class Stripe:
    """Bytes of a file that one rank asks for, and how many bytes of the node's ranges lie in front of them."""

    file: Path
    start: int
    end: int
    before: int


def stripes(ranges: Iterable[Range], place: int, ranks: int) -> Iterator[Stripe]:
    """Yield the stripes of the rank at `place` among the `ranks` of its node, in file order."""
    before = index = 0
    for file, first, last in ranges:
        for start in range(first, last, STRIPE):
            end = min(start + STRIPE, last)
            if index % ranks == place:
                yield Stripe(file, start, end, before)
            before, index = before + end - start, index + 1


def is_cold(reads: Sequence[Read], descriptor: Callable[[Path], int]) -> bool:
    """Return whether some of what is to be read is not in memory, or whether that cannot be known.

    A few single bytes are asked for, on condition that nobody has to wait for them.
    """
    flag = getattr(os, "RWF_NOWAIT", None)
    if flag is None:
        return True
    byte = bytearray(1)
    for read in reads[:: max(1, len(reads) // PROBES)]:
        try:
            os.preadv(descriptor(read.file), [byte], (read.offset + read.end) // 2, flag)
        except OSError:  # EAGAIN: on storage only; EOPNOTSUPP: this file system cannot tell
            return True
    return False


def window_for(ranks: int) -> int:
    """Return how far ahead each of the `ranks` of a node may ask."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return WINDOW // 8
    return min(WINDOW, kib * 1024 // 10 // ranks)


def advise(descriptor: int, start: int, length: int) -> None:
    """Ask the system to read bytes into its cache, without waiting for them.

    Raises:
        OSError: it cannot.
    """
    os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_WILLNEED)


class ReadAhead:
    """Asks for a rank's stripes in the background, while the context is open."""

    def __init__(
        self,
        ranges: Sequence[Range],
        place: int,
        ranks: int,
        window: int,
        advise: Callable[[int, int, int], None] = advise,
    ) -> None:
        self._stripes = list(stripes(ranges, place, ranks))
        self._starts = [(str(file), start) for file, start, _ in ranges]
        self._before = list(accumulate((end - start for _, start, end in ranges), initial=0))
        self._window, self._advise = window, advise
        self._reached = 0
        self._stopped = False
        self._changed = Condition()
        self._thread = Thread(target=self._run, name="shardwise-read-ahead", daemon=True)

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def reached(self, read: Read) -> None:
        """Say that a read has begun; it moves the window."""
        at = bisect_right(self._starts, (str(read.file), read.offset)) - 1
        with self._changed:
            self._reached = max(self._reached, self._before[at] + read.offset - self._starts[at][1])
            self._changed.notify()

    def _run(self) -> None:
        try:
            for stripe in self._stripes:
                if self._may_go_on(stripe):
                    self._ask_for(stripe)
        except (OSError, AttributeError) as error:  # no such call on this system
            logger.debug("no read-ahead: %s", error)

    def _may_go_on(self, stripe: Stripe) -> bool:
        """Wait until a stripe is in the window; return False if it is too late for it, or for all."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or stripe.before < self._reached + self._window)
            return not self._stopped and stripe.before + STRIPE > self._reached

    def _ask_for(self, stripe: Stripe) -> None:
        descriptor = os.open(stripe.file, os.O_RDONLY)
        try:
            for start in range(stripe.start, stripe.end, STEP):
                if self._stopped:
                    return
                self._advise(descriptor, start, min(STEP, stripe.end - start))
        finally:
            os.close(descriptor)
