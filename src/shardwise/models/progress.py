"""One progress bar, on the first rank, which the switch of diffusers turns off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import diffusers

from shardwise.checkpoint.read import Progress
from shardwise.runtime.group import TensorParallelGroup


@contextmanager
def progress_bar(subject: str, group: TensorParallelGroup) -> Iterator[Progress | None]:
    """Show one bar of bytes, on rank 0, of the bytes of its own plan; diffusers' switch for bars turns it off."""
    if group.rank != 0:
        yield None
        return
    with diffusers.utils.logging.tqdm(desc=subject, unit="B", unit_scale=True) as bar:

        def update(arrived: int, total: int) -> None:
            bar.total = total
            bar.update(arrived)

        yield update
