"""What a process does that was started as a rank: `python -m shardwise.launch.rank FOLDER`."""

from __future__ import annotations

import ctypes
import multiprocessing.spawn
import os
import pickle
import pkgutil
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from shardwise.errors import RankFailure
from shardwise.launch.failure import Failure, result_of

PATIENCE = timedelta(minutes=30)
"""How long a collective may take, and a rank waits for the others to start and to end, unless it is said."""


@dataclass(frozen=True)
class Terms:
    """On what terms a rank joins its process group.

    Attributes:
        on_cuda: Whether each rank has a CUDA device; else they compute on CPUs.
        timeout: How long a collective may take, and a rank that is done waits for the others.
        patience: How long a rank waits for the others to start.
    """

    on_cuda: bool
    timeout: timedelta = PATIENCE
    patience: timedelta = PATIENCE


_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Be a rank: do what is in the folder, and leave the result or the failure there."""
    follow_launcher()
    folder = Path(sys.argv[1])
    try:
        multiprocessing.spawn.prepare(pickle.loads((folder / "main").read_bytes()))
        from shardwise.launch.group import in_group  # imports torch, which takes a second

        function, args, terms = pickle.loads((folder / "call").read_bytes())
        result = in_group(resolved(function), args, terms, lambda word: _fail(RankFailure(word), folder))
        leave_result(folder, int(os.environ["RANK"]), result)
    except BaseException as error:
        _fail(error, folder)


def leave_result(folder: Path, rank: int, result: Any) -> None:
    """Leave the result of a rank for the launcher, all of it or nothing."""
    file = result_of(folder, rank)
    file.with_suffix(".new").write_bytes(pickle.dumps(result))
    os.replace(file.with_suffix(".new"), file)


def follow_launcher() -> None:
    """End this process when its launcher ends, however that is killed. To be called first of all."""
    launcher = int(os.environ["SHARDWISE_LAUNCHER"])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_look_after, args=(launcher,), daemon=True).start()
    if os.getppid() != launcher:  # it ended before it could be followed
        os._exit(1)


@cache
def follow_parent() -> None:
    """End this process soon after the one that has started it, be that torchrun or srun."""
    threading.Thread(target=_look_after, args=(os.getppid(),), name="shardwise-parent", daemon=True).start()


def _look_after(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1)
    os._exit(1)


def see_the_launcher_end(patience: float = 10.0) -> None:
    """Leave a process behind that ends the launcher of this rank, if that does not end by itself.

    For a rank whose host is cut off: torchrun's agent learns from it that the job has failed, and then waits for ever
    for a store that cannot be reached (seen with torch 2.13.0). It cannot be told by SIGTERM, as it waits in C++.

    Args:
        patience: How long the launcher has, in seconds.
    """
    if not hasattr(os, "pidfd_open"):  # not Linux
        return
    launcher = os.pidfd_open(os.getppid())
    if os.fork():
        return
    os.setsid()
    os.closerange(0, launcher)  # what it prints to is its launcher's
    os.closerange(launcher + 1, 1024)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if select.select([launcher], [], [], patience)[0]:
            break
        signal.pidfd_send_signal(launcher, number)
        patience = 2.0
    os._exit(0)


def resolved(function: Callable[..., Any] | str) -> Callable[..., Any]:
    """Return a function that may be given as `"package.module:name"`."""
    return pkgutil.resolve_name(function) if isinstance(function, str) else function


def _fail(error: BaseException, folder: Path) -> NoReturn:
    """Leave the failure for the launcher and end at once: the other ranks notice by their connections."""
    try:
        Failure.of(int(os.environ["RANK"]), error).write(folder)
    except OSError:  # no room, of all things
        traceback.print_exception(error)
    end_now(1)


def end_now(code: int) -> NoReturn:
    """End this process without waiting for threads or destructors, which may wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
