"""What a process does that was started as a rank: `python -m shardwise.launch.rank FOLDER`."""

from __future__ import annotations

import ctypes
import multiprocessing.spawn
import os
import pickle
import pkgutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from shardwise.launch.failure import Failure

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Be a rank: do what is in the folder, and leave the result or the failure there."""
    follow_launcher()
    folder = Path(sys.argv[1])
    try:
        multiprocessing.spawn.prepare(pickle.loads((folder / "main").read_bytes()))
        from shardwise.launch.group import in_group  # imports torch, which takes a second

        function, args, on_cuda, timeout = pickle.loads((folder / "call").read_bytes())
        result = in_group(resolved(function), args, on_cuda, timeout)
        (folder / f"result-{os.environ['RANK']}").write_bytes(pickle.dumps(result))
    except BaseException as error:
        _fail(error, folder)


def follow_launcher() -> None:
    """End this process when its launcher ends, however that is killed. To be called first of all."""
    launcher = int(os.environ["SHARDWISE_LAUNCHER"])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_look_after, args=(launcher,), daemon=True).start()
    if os.getppid() != launcher:  # it ended before it could be followed
        os._exit(1)


def _look_after(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1)
    os._exit(1)


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
