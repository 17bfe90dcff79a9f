"""Faults of a rank, a host or a link in a chosen phase of `shardwise generate`."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

PHASES = (
    "starting",
    "loading",
    "reading",
    "encoding",
    "denoising",
    "decoding",
    "writing",
    "written",
    "leaving",
)
"""In order; "reading" is when the first bytes of weights have come, "leaving" when all have agreed on the picture."""


@contextmanager
def fault(phase: str, act: Callable[[], None]) -> Iterator[None]:
    """Have this rank act when it comes to a phase, once."""
    from shardwise.generate import progress, worker

    done: list[bool] = []

    def once() -> None:
        if not done:
            done.append(True)
            act()

    target, name, when = {
        "starting": (worker, "_checked_call", lambda args: True),
        "reading": (progress.Progress, "load", lambda args: True),
        "written": (worker, "_tell_the_end", lambda args: True),
    }.get(phase, (progress.Progress, "phase", lambda args: args[1] == phase))
    original: Any = getattr(target, name)

    def watched(*args: Any) -> Any:
        if when(args):
            once()
        return original(*args)

    with mock.patch.object(target, name, watched):
        yield
    if phase == "leaving":
        once()


def stop(seconds: float) -> None:
    """Stop this process as SIGSTOP does; another one lets it go on later."""
    pid = os.getpid()
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {pid}"], start_new_session=True)
    os.kill(pid, signal.SIGSTOP)


def cut_the_link() -> None:
    """Cut the host off that this process is on."""
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)


def outcome(call: Callable[[], Any]) -> tuple[str, float]:
    """Return what came of a call, and how many seconds it took."""
    start = time.monotonic()
    try:
        said = str(call())
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - start
