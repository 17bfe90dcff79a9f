"""Joins a rank to the process group, and lets it leave when all are done."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d

from shardwise.errors import ConfigError

PATIENCE = timedelta(minutes=30)
"""How long a collective may take unless it is said, and how long a rank that is done waits for the others."""


def in_group(
    function: Callable[..., Any], args: tuple[Any, ...], on_cuda: bool, timeout: timedelta | None = None
) -> Any:
    """Join the process group that the environment describes, run a function, leave it, and return the result."""
    if on_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _store() if "SHARDWISE_LAUNCHER" in os.environ else None  # torchrun has one of its own
    if store is not None:
        _come(store, "here", rank, ranks)  # ranks may start later than each other by more than `timeout`
    dist.init_process_group(
        "nccl" if on_cuda else "gloo", store=store, rank=rank, world_size=ranks, timeout=timeout or PATIENCE
    )
    result = function(*args)
    dist.destroy_process_group()
    if store is not None:
        # The first rank keeps the store, and is the last to go.
        _come(store, "done", rank, ranks if rank == 0 else 0)
    return result


def _store() -> TCPStore:
    """Return where the ranks meet: rank 0 keeps it, on the socket that the launcher has opened."""
    socket = os.environ.get("SHARDWISE_MEETING_FD")
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=socket is not None,
        wait_for_workers=False,
        master_listen_fd=int(socket) if socket is not None else None,
    )


def _come(store: TCPStore, where: str, rank: int, others: int) -> None:
    """Say that this rank has come to some point, and wait for the first `others` ranks to say so."""
    store.set(f"shardwise/{where}/{rank}", "")
    if others:  # a rank that waits for none must not ask the store: rank 0 may be gone with it already
        store.wait([f"shardwise/{where}/{other}" for other in range(others)], PATIENCE)


def limit_collectives(timeout: timedelta) -> None:
    """Have the collectives of all process groups there are end after `timeout`.

    Groups that are made later than the first, as those of a mesh are, wait for 10 or 30 minutes, whatever it waits.
    """
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timeout, group)


def uses_cuda(ranks: int, device: str | None) -> bool:
    """Return whether `ranks` ranks of this machine use CUDA devices.

    Raises:
        ConfigError: CUDA was asked for, and there are fewer devices than ranks.
    """
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"device must be 'cpu' or 'cuda', got {device!r}")
    if device == "cuda" and not enough:
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise ConfigError(f"{ranks} ranks need a CUDA device each, this machine has {found}")
    return enough and device != "cpu"
