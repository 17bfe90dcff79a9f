"""Joins a rank to the process group, and lets it leave when all are done."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d

from shardwise.config import TensorParallelConfig
from shardwise.errors import ConfigError, RankFailure
from shardwise.launch.failure import blames_nobody_by_name
from shardwise.launch.found import TETHER
from shardwise.launch.machine import shows_one_device
from shardwise.launch.rank import Terms
from shardwise.launch.reach import LOOPBACK, reach
from shardwise.launch.tether import Tether
from shardwise.runtime.devices import accelerator
from shardwise.runtime.group import TensorParallelGroup
from shardwise.runtime.store import Store

ROLL_CALL = timedelta(seconds=5)
"""How long a rank whose collective has failed waits for the others to say that theirs has, too."""


def in_group(
    function: Callable[..., Any], args: tuple[Any, ...], terms: Terms, lost: Callable[[str], object]
) -> Any:
    """Join the process group that the environment describes, run a function, leave it, and return the result.

    Args:
        function, args: What to run.
        terms, lost: As of `joined`.

    Raises:
        RankFailure: another rank did not start, or was not done, within `terms.patience`.
    """
    with joined(terms, lost):
        return function(*args)


@contextmanager
def joined(terms: Terms, lost: Callable[[str], object]) -> Iterator[None]:
    """Be in the process group that the environment describes; it is left in peace only if nothing fails.

    Args:
        terms: On what terms.
        lost: Called, in another thread, if a rank ends that no launcher of ours looks after.

    Raises:
        RankFailure: another rank did not start within `terms.patience`, or was not done `terms.timeout` after this one.
    """
    device = accelerator() if terms.on_cuda else None
    if device is not None:
        torch.accelerator.set_device_index(0 if shows_one_device() else int(os.environ["LOCAL_RANK"]))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own = "SHARDWISE_LAUNCHER" in os.environ  # torchrun has a store of its own
    store = _store(terms.patience) if own else None
    meeting = _Meeting(store, rank, ranks) if store is not None else None
    if meeting is not None:
        # Ranks may start later than each other by more than `timeout`.
        meeting.come("start", ranks, terms.patience)
    with tethered(meeting, rank, ranks, terms.patience, lost):
        dist.init_process_group(
            dist.get_default_backend_for_device(device or "cpu"),
            store=store,
            rank=rank,
            world_size=ranks,
            timeout=terms.timeout,
        )
        seen = (
            meeting is not None and TETHER not in os.environ
        )  # by the launcher, which has started all ranks
        with nullcontext() if seen else naming_who_is_missing():
            yield
        if dist.is_initialized():
            dist.destroy_process_group()
        if meeting is not None:
            # The first rank keeps the store, and is the last to go.
            meeting.come("be done", ranks if rank == 0 else 0, terms.timeout)


@contextmanager
def tethered(
    meeting: _Meeting | None, rank: int, ranks: int, patience: timedelta, lost: Callable[[str], object]
) -> Iterator[None]:
    """Hear of the end of ranks that other launchers have started, and let them hear of this one's."""
    if meeting is None or TETHER not in os.environ:
        yield
        return
    tether = Tether(rank, ranks, lost)
    if rank == 0:
        meeting.store.post(TETHER, tether.hold())
    else:
        tether.tie(os.environ["MASTER_ADDR"], meeting.store.read(TETHER, patience))
    meeting.come("hold on to rank 0", ranks, patience)
    try:
        yield
    except BaseException as error:
        tether.say(f"{type(error).__name__}: {error}")
        raise
    tether.let_go()


@contextmanager
def naming_who_is_missing() -> Iterator[None]:
    """Turn an error of a collective into one that names the ranks, and their hosts, that did not come to it.

    Where our own launcher has started all ranks there is no need: it sees which of the processes it was.

    Raises:
        RankFailure: in place of an error that says that another rank is gone or late, and not which.
    """
    try:
        yield
    except Exception as error:
        if not blames_nobody_by_name(str(error)):
            raise
        missing = TensorParallelGroup.of(TensorParallelConfig()).unheard(ROLL_CALL)
        if not missing:
            raise
        raise RankFailure(
            f"no word came from {' and '.join(missing)} for {ROLL_CALL.total_seconds():g} s after "
            f"{type(error).__name__}: {error}"
        ) from error


def _store(patience: timedelta) -> TCPStore:
    """Return where the ranks meet: rank 0 keeps it, on the socket that the launcher has opened."""
    socket = os.environ.get("SHARDWISE_MEETING_FD")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if socket is None and address != LOOPBACK:
        reach(address, port, patience)
    return TCPStore(
        address,
        port,
        is_master=socket is not None,
        wait_for_workers=False,
        master_listen_fd=int(socket) if socket is not None else None,
    )


class _Meeting:
    """Where the ranks of our own launcher wait for each other when they start and when they end."""

    def __init__(self, store: TCPStore, rank: int, ranks: int) -> None:
        self.store, self._rank, self._ranks = Store(store), rank, ranks

    def come(self, where: str, others: int, patience: timedelta) -> None:
        """Say that this rank has come to some point, and wait for the first `others` ranks to say so.

        One that waits for none asks the store nothing: rank 0 may be gone with it already.
        """
        deadline = time.monotonic() + patience.total_seconds()
        self.store.post(f"{where}/{self._rank}", None)
        for other in range(others):
            left = timedelta(seconds=max(deadline - time.monotonic(), 0))
            try:
                self.store.read(f"{where}/{other}", left)
            except TimeoutError as error:
                raise RankFailure(
                    f"rank {other} of {self._ranks} did not {where} within {patience}: it did not answer"
                ) from error


def limit_collectives(timeout: timedelta) -> None:
    """Have the collectives of all process groups there are end after `timeout`.

    Groups that are made later than the first, as those of a mesh are, wait for 10 or 30 minutes, whatever it waits.
    """
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timeout, group)


def uses_cuda(ranks: int, device: str | None) -> bool:
    """Return whether `ranks` ranks of this machine use CUDA devices, or those of another accelerator that torch has.

    Raises:
        ConfigError: CUDA was asked for, and there are fewer devices than ranks.
    """
    kind = (accelerator() or torch.device("cuda")).type
    if device not in (None, "cpu", "cuda", kind):
        raise ConfigError(f"device must be 'cpu' or '{kind}', got {device!r}")
    found = torch.accelerator.device_count() if device in (None, kind) and accelerator() is not None else 0
    if device not in (None, "cpu") and found < ranks:
        raise ConfigError(f"{ranks} ranks need a {device.upper()} device each, this machine has {found}")
    return found >= ranks
