"""What this machine has for ranks, as far as it can be known before torch is imported."""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.errors import ConfigError

RANKS_PER_CORE = 4
"""More ranks than that on CPUs are taken for a typing mistake: each is a process with a torch of its own."""

_NVIDIA = Path("/proc/driver/nvidia/gpus")


def cores() -> int:
    """Return how many cores this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def cuda_devices() -> int | None:
    """Return how many CUDA devices are visible; None where only their driver can tell."""
    try:
        there = len(list(_NVIDIA.iterdir()))
    except OSError:
        return None
    visible = _visible()
    return there if visible is None else len(visible)


def shows_one_device() -> bool:
    """Return whether a launcher shows this process one device alone, as `srun --gpus-per-task=1` does."""
    visible = _visible()
    return visible is not None and len(visible) == 1


def _visible() -> list[str] | None:
    """Return the CUDA devices that this process is to see; None for all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    named = [name.strip() for name in visible.split(",")]
    known = named[: named.index("-1")] if "-1" in named else named  # what follows an unknown one is not seen
    return [name for name in known if name]


def require_room(ranks: int, device: str | None, oversubscribe: bool = False) -> None:
    """Check that this machine can be meant to run `ranks` ranks, before any is started.

    Raises:
        ConfigError: CUDA was asked for and has fewer devices, or they are many times the cores.
    """
    devices = cuda_devices()
    if device == "cuda" and devices is not None and devices < ranks:
        raise ConfigError(f"{ranks} ranks need a CUDA device each, this machine has {devices}")
    if device != "cpu" and devices is not None and devices >= ranks:
        return
    most = RANKS_PER_CORE * cores()
    if ranks > most and not oversubscribe:
        raise ConfigError(
            f"{ranks} ranks on the {cores()} cores of this machine: more than {most} need --oversubscribe, "
            "or oversubscribe=True; lower the degrees"
        )
