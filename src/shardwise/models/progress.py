"""Progress bars of bytes: one for all ranks, and off by the switch of diffusers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import diffusers

from shardwise.checkpoint.read import Progress
from shardwise.runtime.group import TensorParallelGroup


@contextmanager
def progress_bar(subject: str, group: TensorParallelGroup) -> Iterator[Progress | None]:
    """Show one bar, on rank 0, of the bytes of its own plan."""
    if group.rank != 0:
        yield None
        return
    with bar_of_bytes(subject) as update:
        yield update


@contextmanager
def bar_of_bytes(subject: str) -> Iterator[Progress]:
    """Show a bar of bytes."""
    with diffusers.utils.logging.tqdm(desc=subject, unit="B", unit_scale=True) as bar:

        def update(arrived: int, total: int) -> None:
            bar.total = total
            bar.update(arrived)

        yield update
