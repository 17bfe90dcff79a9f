"""Where bytes wait between a file and a tensor that they cannot be read into: another dtype, or another device.

On the CPU one scratch buffer that fits a core's cache. For an accelerator a few pinned slots: while one is being
copied to the device, the next is filled from the file.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

SCRATCH = 2**20
"""Bytes of the buffer for casts: one of 64 MiB takes 2.3 times as long."""

SLOT = 4 * 2**20
SLOTS = 2
"""Size and number of pinned slots of one reader: 32 MiB at most for the 4 that a rank may have."""

Copy = tuple[Tensor, Tensor]
"""A part of a tensor, flat, and what is to be copied into it, in the file's dtype."""


class Stage(Protocol):
    """What a reader needs of a buffer in between."""

    limit: int
    """The most bytes that can be asked for at once."""
    nbytes: int
    """Bytes that the stage holds."""

    def room(self, nbytes: int) -> Tensor:
        """Return bytes on the CPU that may be overwritten now."""

    def deliver(self, copies: Sequence[Copy]) -> None:
        """Copy from the room that was given last; it stays reserved as long as that takes."""

    def finish(self) -> None:
        """Return when all copies have arrived."""


class Scratch:
    """A stage on the CPU, which copies at once."""

    def __init__(self, limit: int = SCRATCH) -> None:
        self.limit, self.nbytes = limit, 0
        self._buffer = _on_the_cpu(0)

    def room(self, nbytes: int) -> Tensor:
        """Return the first bytes of the scratch buffer, which grows to what was asked for at most."""
        if nbytes > self.nbytes:
            self._buffer, self.nbytes = _on_the_cpu(nbytes), nbytes
        return self._buffer[:nbytes]

    def deliver(self, copies: Sequence[Copy]) -> None:
        """Copy, with a cast where the dtypes differ."""
        for target, source in copies:
            target.copy_(source)

    def finish(self) -> None:
        """Return: nothing is under way."""


def _on_the_cpu(nbytes: int, pin_memory: bool = False) -> Tensor:
    """Return bytes on the CPU, also where the caller has made another device torch's default."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pin_memory)


class Arrival(Protocol):
    """A point in the work of a device, which can be waited for."""

    def synchronize(self) -> None:
        """Return when the device has come to this point."""


class Accelerator(Protocol):
    """What `PinnedSlots` asks of a device."""

    def pinned(self, nbytes: int) -> Tensor:
        """Return memory of the CPU that the device can read by itself."""

    def copy(self, copies: Sequence[Copy]) -> Arrival:
        """Start the copies, and return their arrival."""


class PinnedSlots:
    """A stage for an accelerator: a ring of pinned slots, each of which is free again when its copies have arrived."""

    def __init__(self, accelerator: Accelerator, slots: int = SLOTS, limit: int = SLOT) -> None:
        self.limit, self.nbytes = limit, slots * limit
        self._accelerator = accelerator
        self._slots = [accelerator.pinned(limit) for _ in range(slots)]
        self._arrivals: list[Arrival | None] = [None] * slots
        self._current = -1

    def room(self, nbytes: int) -> Tensor:
        """Return the slot that was filled longest ago, once its bytes are on the device."""
        self._current = (self._current + 1) % len(self._slots)
        self._wait(self._current)
        return self._slots[self._current][:nbytes]

    def deliver(self, copies: Sequence[Copy]) -> None:
        """Start the copies out of the slot that was given last."""
        self._arrivals[self._current] = self._accelerator.copy(copies)

    def finish(self) -> None:
        """Return when every slot has arrived."""
        for slot in range(len(self._slots)):
            self._wait(slot)

    def _wait(self, slot: int) -> None:
        arrival, self._arrivals[slot] = self._arrivals[slot], None
        if arrival is not None:
            arrival.synchronize()


class TorchAccelerator:
    """A device of torch, with a stream of this reader's own. Make it in the thread that uses it."""

    def __init__(self, device: torch.device) -> None:
        # The current device belongs to the thread: a new one would open a context on the first device.
        torch.accelerator.set_device_index(device)
        # The tensors may lie in memory that work on another stream has yet to leave.
        torch.accelerator.synchronize(device)
        self._stream = torch.Stream(device)

    def pinned(self, nbytes: int) -> Tensor:
        """Return pinned memory; where the system refuses it, ordinary memory, from which copies are slower."""
        try:
            return _on_the_cpu(nbytes, pin_memory=True)
        except RuntimeError as error:
            logger.warning("no pinned memory (%s): weights are copied through pageable memory", error)
            return _on_the_cpu(nbytes)

    def copy(self, copies: Sequence[Copy]) -> Arrival:
        """Start the copies on the stream; a cast is done on the device, behind the copy."""
        with self._stream:
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()


def stage_for(device: torch.device) -> Stage:
    """Return the stage through which bytes reach a device; the thread that asks is the one to use it."""
    return Scratch() if device.type == "cpu" else PinnedSlots(TorchAccelerator(device))
