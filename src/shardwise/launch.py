"""Starts ranks on this machine and brings their results back, through torch's elastic launcher."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardwise.errors import ConfigError


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any, device: str | None = None) -> list[Any]:
    """Run `function(*args)` in `ranks` new processes that share a process group; return their results by rank.

    The backend is NCCL where each rank can have a CUDA device of its own, gloo on CPU otherwise.

    Args:
        function: A function of an importable module; its result must be picklable.
        ranks: Number of processes on this machine.
        args: Picklable arguments.
        device: `"cpu"` or `"cuda"`, where the choice is not to be made here.

    Raises:
        ConfigError: CUDA was asked for, and there are fewer devices than ranks.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank failed; all are stopped.
    """
    on_cuda = _on_cuda(ranks, device)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        start_method="spawn",
        monitor_interval=0.1,
    )
    results: dict[int, Any] = elastic_launch(config, _rank)(function, ranks, args, on_cuda)
    return [results[rank] for rank in range(ranks)]


def _on_cuda(ranks: int, device: str | None) -> bool:
    """Return whether the ranks use CUDA devices."""
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"device must be 'cpu' or 'cuda', got {device!r}")
    if device == "cuda" and not enough:
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise ConfigError(f"{ranks} ranks need a CUDA device each, this machine has {found}")
    return enough and device != "cpu"


def _rank(function: Callable[..., Any], ranks: int, args: tuple[Any, ...], on_cuda: bool) -> Any:
    """Be one rank: join the process group, run, leave it."""
    if on_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        # The ranks share the cores of this machine; more threads than cores make all of them slow.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group("nccl" if on_cuda else "gloo")
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()
