"""The store of a process group, as agreements use it: every call ends in time, and every word is from a rank.

torch's stores bound a wait for a key by a time-out, and then wait without one for the store to say so. One that is on a
host that is cut off, or in a process that is stopped, never does. So each call is made in a thread of its own
connection, and given up by this process's clock.

Where the launcher has given the ranks a secret, each word is sealed with it: on a machine, any user may connect to the
port of the store.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar

from torch._C._distributed_c10d import Store as TorchStore

from shardwise.errors import RankFailure
from shardwise.runtime.seal import SECRET, opened, sealed

SLACK = timedelta(seconds=3)
"""How much longer than its own time-out a call of the store may take before it is given up."""

_T = TypeVar("_T")


class StoreLost(RankFailure):
    """The store does not answer any more: its host is cut off, or the process that keeps it is stopped."""


class Store:
    """A store of torch by which ranks exchange plain data, and of which no call outlasts its time.

    Args:
        store: It is cloned, so that nobody else's calls wait for ours.
        prefix: In front of every key.
        secret: What words are sealed with; by default that of the launcher, if there is one.
    """

    def __init__(self, store: TorchStore, prefix: str = "shardwise", secret: bytes | None = None) -> None:
        self._prefix = prefix
        own = os.environ.get(SECRET, "").encode()
        self._secret = own if secret is None else secret
        self._caller = _Caller(_place(store))
        whole: Any = store  # torch's stubs do not know that it can be cloned
        self._store: TorchStore = self._caller.call(whole.clone, SLACK)

    def post(self, key: str, value: Any) -> None:
        """Set a key to a value that JSON can write.

        Raises:
            StoreLost: the store does not answer.
        """
        key = self._key(key)
        text = json.dumps(value)
        self._caller.call(lambda: self._store.set(key, sealed(key, text, self._secret)), SLACK)

    def read(self, key: str, patience: timedelta) -> Any:
        """Return the value of a key, once there is one.

        Raises:
            TimeoutError: there is none within `patience`.
            StoreLost: the store does not answer.
            RankFailure: the value is of nobody who knows the secret.
        """
        key = self._key(key)
        left = max(patience, timedelta(milliseconds=1))  # of 0, stores wait for ever
        return self._opened(key, self._caller.call(lambda: self._waited(key, left), left + SLACK))

    def glance(self, key: str) -> Any:
        """Return the value of a key, None if there is none.

        Raises:
            StoreLost, RankFailure: as `read`.
        """
        key = self._key(key)
        found = self._caller.call(lambda: self._store.get(key) if self._store.check([key]) else None, SLACK)
        return None if found is None else self._opened(key, found)

    def count(self, key: str) -> int:
        """Add one to a number that starts at zero, and return it."""
        key = self._key(key)
        return self._caller.call(lambda: self._store.add(key, 1), SLACK)

    def delete(self, key: str) -> None:
        """Forget a key."""
        key = self._key(key)
        self._caller.call(lambda: self._store.delete_key(key), SLACK)

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _waited(self, key: str, left: timedelta) -> bytes:
        try:
            self._store.wait([key], left)
        except RuntimeError as error:  # each kind of store has its own
            raise TimeoutError(str(error)) from error
        word: bytes = self._store.get(key)
        return word

    def _opened(self, key: str, word: bytes) -> Any:
        text = opened(key, word.decode("utf-8", "replace"), self._secret)
        if text is None:
            raise RankFailure(
                f"the word {key} in the store of the process group is of nobody who belongs to this job: another "
                "process on this machine or network writes to it"
            )
        return json.loads(text)


def _place(store: Any) -> str:
    """Return where a store is, if it is on some host."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return f" at {store.host}:{store.port}" if hasattr(store, "host") else ""


class _Caller:
    """A thread that makes calls one after another; whoever asks for one does not wait longer than it says."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._asked: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        self._lost: str | None = None
        threading.Thread(target=_make, args=(self._asked,), name="shardwise-store", daemon=True).start()

    def __del__(self) -> None:
        """Let the thread end when nobody can ask any more."""
        self._asked.put(None)

    def call(self, function: Callable[[], _T], patience: timedelta) -> _T:
        """Return what `function` returns, or raise what it raises.

        Raises:
            StoreLost: it does not end within `patience`, or an earlier call did not.
        """
        if self._lost is not None:
            raise StoreLost(self._lost)
        call = _Call(function)
        self._asked.put(call)
        if not call.done.wait(patience.total_seconds()):
            self._lost = (
                f"the store of the process group{self._place} did not answer within {patience.total_seconds():.3g} s: "
                "its host cannot be reached, or the process that keeps it is stopped"
            )
            raise StoreLost(self._lost)
        return call.result()


def _make(asked: queue.SimpleQueue[_Call[Any] | None]) -> None:
    """Make the calls that are asked for, until None comes."""
    while (call := asked.get()) is not None:
        call.make()
        del call  # it holds the store, for which this thread is to end


class _Call(Generic[_T]):
    """A call that one thread asks for and another makes."""

    def __init__(self, function: Callable[[], _T]) -> None:
        self._function = function
        self._outcome: tuple[_T | None, BaseException | None] = (None, None)
        self.done = threading.Event()

    def make(self) -> None:
        try:
            self._outcome = self._function(), None
        except BaseException as error:
            self._outcome = None, error
        self.done.set()

    def result(self) -> _T:
        value, error = self._outcome
        if error is not None:
            raise error
        return value  # type: ignore[return-value]
