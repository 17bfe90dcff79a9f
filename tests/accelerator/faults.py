"""What a real device would punish, by waiting or by wrong numbers; and how often the host has waited for one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

faults: list[str] = []
"""Each fault so far, in words."""


@dataclass
class Waits:
    """How often the host has waited for a device so far."""

    copies: int = 0
    """In copies that were not asked to be asynchronous."""
    values: int = 0
    """For a number, as `item()` does."""
    synchronized: int = 0
    """For a stream, an event or all of the device, on purpose."""


waits = Waits()


@contextmanager
def no_faults() -> Iterator[None]:
    """Have a test fail that makes a fault inside."""
    faults.clear()
    yield
    assert not faults, "\n".join(faults)
