"""Names and hosts of other machines, asked for with a clock of our own: a resolver may take minutes to say no."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from shardwise.errors import RankFailure

LOOPBACK = "127.0.0.1"
_EVERY = 0.5
_QUIET = 10.0
"""Seconds after which one that waits says so."""
_T = TypeVar("_T")


def addresses_of(name: str, seconds: float) -> list[str]:
    """Return the addresses that a name resolves to, the preferred one first.

    Raises:
        OSError: it does not resolve.
        TimeoutError: the resolver does not answer in time.
    """
    answers = _bounded(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM), seconds)
    return list(dict.fromkeys(str(place[0]) for *_, place in answers))


def reach(address: str, port: int, patience: timedelta) -> None:
    """Wait until the first process of a job listens at its address, as pods start at different times.

    What it waits for is said on standard error after some seconds.

    Raises:
        RankFailure: it does not within `patience`; the message says what was met last.
    """
    start, said = time.monotonic(), False
    deadline = start + patience.total_seconds()
    while True:
        left = max(deadline - time.monotonic(), 0.1)
        try:
            found = addresses_of(address, left)
            socket.create_connection((found[0], port), timeout=min(left, 5)).close()
            return
        except OSError as error:
            who = (
                f"{socket.gethostname()} cannot reach the first process of the job at {address}, port {port}"
            )
            if time.monotonic() + _EVERY > deadline:
                raise RankFailure(f"{who}, within {patience}: {_why(error)}") from error
            if not said and time.monotonic() > start + _QUIET:
                print(f"{who}, yet: {_why(error)}", file=sys.stderr, flush=True)
                said = True
        time.sleep(_EVERY)


def listen(port: int) -> socket.socket:
    """Return a socket at which the processes of other machines can reach this one.

    Raises:
        RankFailure: the port is taken.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, backlog=4096, dualstack_ipv6=both)
    except OSError as error:
        raise RankFailure(
            f"port {port} of {socket.gethostname()}, where the ranks are to meet, cannot be had: {error.strerror}; "
            "set MASTER_PORT to another one, to the same on all machines"
        ) from error


def _why(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "the name does not resolve there; set MASTER_ADDR to a name or address that does"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there; has the first process been started, and is MASTER_PORT the same everywhere?"
    return f"{error or type(error).__name__}; does a firewall stand between the machines?"


def _bounded(function: Callable[[], _T], seconds: float) -> _T:
    """Return what a function returns, in a thread that is left behind if it takes longer."""
    outcome: list[tuple[_T | None, OSError | None]] = []

    def work() -> None:
        try:
            outcome.append((function(), None))
        except OSError as error:
            outcome.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer in {seconds:.1f} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
