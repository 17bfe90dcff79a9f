"""Progress bars of bytes: one for all ranks, and off by the switch of diffusers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import diffusers

from shardwise.checkpoint.read import Progress
from shardwise.runtime.group import TensorParallelGroup

Watcher = Callable[[str, int, int], None]
"""Told what is being done, bytes that have arrived since it was told last, and all there will be."""

_watchers: list[Watcher] = []


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Have bytes told to `watcher` on the ranks that call this, in place of bars; for a display of one's own."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


@contextmanager
def progress_bar(subject: str, group: TensorParallelGroup) -> Iterator[Progress | None]:
    """Show one bar, on rank 0, of the bytes of its own plan."""
    if _watchers:
        yield partial(_watchers[-1], subject)
        return
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
