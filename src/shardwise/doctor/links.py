"""How fast the ranks sum up: all-reduces of a few sizes, as a forward does them."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from shardwise.runtime.group import TensorParallelGroup

MIB = 2**20
SIZES = (1, 16, 64)
"""In MiB."""
REPEATS = 3
BUDGET = 6.0
"""Seconds that one size may be expected to take; on a slow network the larger ones are left out."""


def measured(group: TensorParallelGroup) -> list[dict[str, Any]]:
    """Return for each size what an all-reduce takes the slowest rank; all ranks call this.

    Returns:
        Entries with `mib`, and `seconds` and `mib_per_second`, which are None where a size was left out.
    """
    _seconds(group, 1)  # the first connects
    found: list[dict[str, Any]] = []
    before: tuple[int, float] | None = None
    for mib in SIZES:
        expected = before[1] * mib / before[0] * (REPEATS + 1) if before is not None else 0.0
        if expected > BUDGET:
            found.append({"mib": mib, "seconds": None, "mib_per_second": None})
            continue
        own = median(_seconds(group, mib) for _ in range(REPEATS))
        slowest = max(group.exchange(own))  # the same on all ranks, who thus leave out the same
        before = (mib, slowest)
        found.append({"mib": mib, "seconds": round(slowest, 6), "mib_per_second": round(mib / slowest, 1)})
    return found


def _seconds(group: TensorParallelGroup, mib: int) -> float:
    tensor = torch.ones(mib * MIB // 4, device=group.device)
    _finish(group.device)
    start = time.perf_counter()
    group.all_reduce(tensor)
    _finish(group.device)
    return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
