"""Agreements of ranks: what they exchange words by, how long they wait, and what each raises when one has failed.

They go through the store of a process group, with a time-out of their own: a rank that reads its checkpoint slowly is
not killed by the watchdog of the backend, and no device is involved in reporting that one has failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store as TorchStore

from shardwise.errors import CheckpointError, RankFailure, UnsupportedOption
from shardwise.runtime.store import Store

PATIENCE = timedelta(minutes=10)
"""How long a rank waits for the others to take the same step; `TensorParallelConfig.load_timeout` is for files."""

_limit: ContextVar[timedelta] = ContextVar("limit", default=timedelta.max)


@contextmanager
def waiting_at_most(limit: timedelta) -> Iterator[None]:
    """Have no agreement inside wait longer than `limit`, whatever patience it asks for: the caller's word counts."""
    before = _limit.set(min(limit, _limit.get()))
    try:
        yield
    finally:
        _limit.reset(before)


def at_most(patience: timedelta) -> timedelta:
    """Return how long an agreement may take that asks for some patience."""
    return min(patience, _limit.get())


_TOLD: dict[str, type[Exception]] = {error.__name__: error for error in (CheckpointError, UnsupportedOption)}
"""Errors that are nothing but their message: if one rank has one, all ranks raise it."""


class Step:
    """A step that the ranks take together; see `TensorParallelGroup.agreement`."""

    def __init__(self) -> None:
        self.claims: dict[str, object] = {}
        self.said: Any = None
        self.heard: list[Any] = []
        """What each rank said, in rank order, once the step has ended."""

    def say(self, value: Any) -> None:
        """Tell the other ranks something when the step ends; it must be plain data that JSON can write."""
        self.said = value

    def must_equal(self, **claims: object) -> None:
        """State values that have to be the same on all ranks; they are compared when the step ends."""
        self.claims |= claims


class Words:
    """The store of one process group, and the number of exchanges by it; all its members count alike.

    A store may outlive a process group, as torchrun's does, and the next one have its name. What is left of the first
    must not be heard in the second, so each rank counts the groups that it has been in.
    """

    def __init__(self, store: TorchStore, rank: int) -> None:
        epoch = Store(store).count(f"groups/{rank}")
        self.store = Store(store, f"shardwise/{epoch}")
        self.hosts: dict[int, str] = {}
        """The names of the ranks' hosts, as far as they have been heard of."""
        self._turn = 0

    def next_turn(self) -> int:
        """Return the number of the next exchange."""
        self._turn += 1
        return self._turn


def raise_failure(name: str, failures: list[list[str] | None], error: BaseException | None) -> None:
    """Raise what this rank has to raise if a rank has failed; `failures` are kind and message of each rank's error."""
    failed = [rank for rank, failure in enumerate(failures) if failure is not None]
    if not failed:
        return
    kind, message = failures[failed[0]] or ("", "")
    mine = type(error).__name__ if error is not None else None
    alike = all(failure == failures[0] for failure in failures)
    if error is not None and (alike or mine not in _TOLD or kind not in _TOLD):
        raise error
    if kind in _TOLD:
        ranks = f"rank{'s' if len(failed) > 1 else ''} {', '.join(map(str, failed))} of {len(failures)}"
        raise _TOLD[kind](f"{message}\n  on {ranks}") from error
    raise RankFailure(f"{name} failed on rank {failed[0]} of {len(failures)}: {kind}: {message}")


def compare_claims(name: str, claims: list[dict[str, str]]) -> None:
    """Raise if the ranks have stated other values of the same thing."""
    for key in dict.fromkeys(key for theirs in claims for key in theirs):
        values = [theirs.get(key, "nothing") for theirs in claims]
        if len(set(values)) > 1:
            listing = "\n".join(f"  rank {rank}: {value}" for rank, value in enumerate(values))
            raise RankFailure(f"{name}: the ranks differ in {key}\n{listing}")
