"""Ranks that stay alive between tests, forked off one process that has imported torch and diffusers once for all."""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests import devices
from tests.hosts import Host

START_SECONDS = 120
CALL_SECONDS = 240
COLLECTIVE_SECONDS = 60
IMPORTED_ONCE = [
    "diffusers.loaders.peft",
    "shardwise.models.parallelism",
    "tests.helpers",
    "transformers.modeling_utils",
]
"""What every rank needs, and would take seconds to import in each."""


class RankError(AssertionError):
    """A function failed on some ranks."""


class Pool:
    """N ranks, each a process of its own, that run the same function and return its results.

    Args:
        size: How many.
        device: What they compute on.
        hosts: Where each of them is, if not all are here.
    """

    def __init__(self, size: int, device: str = devices.CHOSEN, hosts: Sequence[Host] = ()) -> None:
        self.size, self.device, self._hosts = size, device, hosts
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run a module-level function on every rank and return the results in rank order.

        Raises:
            RankError: with the tracebacks of the ranks that raised, or that did not answer in time.
        """
        if not self._ranks:
            self._start()
        for _, connection in self._ranks:
            connection.send((function, args, kwargs))
        deadline = time.monotonic() + CALL_SECONDS
        answers = [self._receive(connection, deadline) for _, connection in self._ranks]
        errors = [f"--- rank {rank}\n{text}" for rank, (kind, text) in enumerate(answers) if kind != "value"]
        if any(kind == "silent" for kind, _ in answers):
            self.stop()
        if errors:
            raise RankError("\n".join(errors))
        return [value for _, value in answers]

    def stop(self) -> None:
        """End all ranks; the next call starts new ones."""
        for process, connection in self._ranks:
            connection.close()
            process.kill()
            process.join()
        self._ranks = []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED_ONCE)
        meeting = f"file://{tempfile.mkdtemp(prefix='shardwise-tests-')}/store"
        if self._hosts:
            meeting = f"tcp://{self._hosts[0].address}:29500"
        for rank in range(self.size):
            here, there = context.Pipe()
            host = self._hosts[rank] if self._hosts else None
            process = context.Process(
                target=_serve, args=(rank, self.size, self.device, meeting, there, host), daemon=True
            )
            process.start()
            there.close()
            self._ranks.append((process, here))
        deadline = time.monotonic() + START_SECONDS
        for rank, (_, connection) in enumerate(self._ranks):
            kind, text = self._receive(connection, deadline)
            if kind != "value":
                self.stop()
                raise RankError(f"rank {rank} of {self.size} did not start: {text}")

    def _receive(self, connection: Connection, deadline: float) -> tuple[str, Any]:
        try:
            if connection.poll(max(0.0, deadline - time.monotonic())):
                return connection.recv()
        except EOFError:
            return "silent", "the process died"
        return "silent", f"no answer in {CALL_SECONDS} s"


def collect_garbage_seldom() -> None:
    """Have garbage collected seldom, and not looked for in what has been imported: that is most of what there is."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _serve(
    rank: int, size: int, device: str, meeting: str, connection: Connection, host: Host | None
) -> None:
    if host is not None:
        host.enter()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    collect_garbage_seldom()
    dist.init_process_group(
        devices.take(device, rank, size),
        init_method=meeting,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )
    warnings.simplefilter("error")
    # diffusers 0.42.1 passes an argument that huggingface_hub 2 no longer takes.
    warnings.filterwarnings("ignore", message=".*local_dir_use_symlinks")
    warnings.filterwarnings("ignore", message=".*FluxPosEmbed")
    warnings.filterwarnings("ignore", message=".*In CPU autocast, but the target dtype is not supported")
    # Some of its models import an output class from where it used to be.
    warnings.filterwarnings("ignore", message=".*Importing `Transformer2DModelOutput` from")
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    # Its Kandinsky 5 norms queries and keys in fp32 also by weights of bf16, which torch says is slow.
    warnings.filterwarnings("ignore", message=".*Mismatch dtype between input and weight")
    # Its context parallelism gathers by a name that torch has since changed.
    warnings.filterwarnings("ignore", message=".*all_gather_tensor` is deprecated")
    # PEFT says so of every second adapter, which diffusers loads on purpose.
    warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
    connection.send(("value", None))
    while True:
        try:
            function, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("value", function(*args, **kwargs)))
        except BaseException:
            connection.send(("error", traceback.format_exc()))


def at_two_ranks_and_once_at_four(names: Sequence[str], four: str) -> pytest.MarkDecorator:
    """Parametrize a test by `ranks` and `name`: all on two ranks, one on four too.

    For what costs much and is bounded at four ranks by other tests (those of docs/combine.md) for every class.
    """
    cases = [*((2, name) for name in names), (4, four)]
    return pytest.mark.parametrize(("ranks", "name"), cases, indirect=["ranks"])
