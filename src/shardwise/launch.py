"""Starts ranks on this machine and brings their results back, through torch's elastic launcher."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Run `function(*args)` in `ranks` new processes that share a process group; return their results by rank.

    The backend is NCCL where each rank can have a CUDA device of its own, gloo on CPU otherwise.

    Args:
        function: A function of an importable module; its result must be picklable.
        ranks: Number of processes on this machine.
        args: Picklable arguments.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank failed; all are stopped.
    """
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
    results: dict[int, Any] = elastic_launch(config, _rank)(function, ranks, args)
    return [results[rank] for rank in range(ranks)]


def _rank(function: Callable[..., Any], ranks: int, args: tuple[Any, ...]) -> Any:
    """Be one rank: join the process group, run, leave it."""
    on_cuda = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
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
