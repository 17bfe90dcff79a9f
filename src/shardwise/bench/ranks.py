"""Fresh processes for every measurement: forked from one that has imported everything, so that no import is measured.

Their memory and their files are their own from the start. While one says that it is measured, its memory is looked
at from here, every few milliseconds: that costs the process itself nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from shardwise.bench.gauges import memory
from shardwise.errors import RankFailure
from shardwise.runtime.devices import take_device

PATIENCE = 900.0
"""Seconds after which a measurement has failed."""

_EVERY = 0.004
_HOST = "127.0.0.1"
_PRELOAD = ["shardwise.bench.loads", "shardwise.bench.steps"]


class Watch:
    """How a rank says that it is being measured."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def begin(self) -> None:
        """Have this process's memory looked at from now on, when all ranks have come here."""
        self._connection.send(("begin", os.getpid()))
        dist.barrier()

    def end(self) -> None:
        """Wait for all ranks, and have it looked at no longer."""
        dist.barrier()
        self._connection.send(("end", os.getpid()))


def run_fresh(function: Callable[..., Any], ranks: int, *args: Any, device: str = "cpu") -> list[Any]:
    """Return `function(watch, *args)` of each of `ranks` new processes that share a group, by rank.

    They are on devices of the type `device`, and meet by gloo, or by the backend of an accelerator.

    A result that is a dict gets `peak_anonymous` and `peak_files`: the most memory that was seen, in bytes.

    Raises:
        RankFailure: a rank failed or took too long; all are stopped.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)  # as torchrun's: others poll
    processes, connections = [], []
    try:
        for rank in range(ranks):
            here, there = context.Pipe()
            about = (there, store.port, rank, ranks, device, function, args)
            process = context.Process(target=_serve, args=about)
            process.start()
            there.close()
            processes.append(process)
            connections.append(here)
        return _answers(connections)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answers(connections: list[Connection]) -> list[Any]:
    deadline = time.monotonic() + PATIENCE
    values: dict[int, Any] = {}
    peaks: dict[int, dict[str, int]] = {rank: {} for rank in range(len(connections))}
    watched: dict[int, int] = {}
    while len(values) < len(connections):
        if time.monotonic() > deadline:
            raise RankFailure(f"no result in {PATIENCE:g} s")
        open_ones = [c for rank, c in enumerate(connections) if rank not in values]
        for connection in wait(open_ones, timeout=_EVERY if watched else 1.0):
            rank = connections.index(connection)  # type: ignore[arg-type]
            kind, value = _received(connections[rank], rank)
            if kind == "begin":
                watched[rank] = value
            elif kind == "end":
                watched.pop(rank)
            else:
                values[rank] = value
        for rank, pid in watched.items():
            _look(pid, peaks[rank])
    return [_with_peaks(values[rank], peaks[rank]) for rank in range(len(connections))]


def _received(connection: Connection, rank: int) -> tuple[str, Any]:
    try:
        kind, value = connection.recv()
    except EOFError as error:
        raise RankFailure(f"rank {rank} has died") from error
    if kind == "error":
        raise RankFailure(f"rank {rank} failed:\n{value}")
    return kind, value


def _look(pid: int, peaks: dict[str, int]) -> None:
    now = memory(pid)
    for name, field in (("peak_anonymous", "RssAnon"), ("peak_files", "RssFile")):
        peaks[name] = max(peaks.get(name, 0), now.get(field, 0))


def _with_peaks(value: Any, peaks: dict[str, int]) -> Any:
    return {**value, **peaks} if isinstance(value, dict) else value


def _serve(
    connection: Connection,
    port: int,
    rank: int,
    ranks: int,
    device: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Be one rank: join the group, run, send the result."""
    try:
        # The ranks share the cores of this machine; more threads than cores make all of them slow.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
        store = TCPStore(_HOST, port, is_master=False)
        dist.init_process_group(take_device(device, rank, ranks), store=store, rank=rank, world_size=ranks)
        value = function(Watch(connection), *args)
        dist.barrier()
        connection.send(("value", value))
    except BaseException:
        connection.send(("error", traceback.format_exc()))
