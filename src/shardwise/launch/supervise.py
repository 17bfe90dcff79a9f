"""Starts processes, watches them, and ends all of them when one fails or the launcher is told to end.

Needs nothing but the standard library: nothing is imported that would keep the ranks from starting.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from secrets import token_hex
from typing import Any

from shardwise.errors import RankFailure
from shardwise.launch.failure import Failure, cause, describe, result_of
from shardwise.launch.found import Found
from shardwise.launch.reach import LOOPBACK, listen
from shardwise.runtime.seal import SECRET

POLL = 0.05
SETTLE = 0.2
"""Seconds in which other ranks may fail too, so that the cause can be told from what followed."""
SETTLE_LATE = 1.0
"""The same where a rank has waited in vain: those that waited with it do not give up in the same moment."""
GRACE = 5.0
"""Seconds from SIGTERM to SIGKILL."""
SLACK = timedelta(seconds=5)
"""How much longer than the others wait for it a rank may be stopped: they know better what for."""
LOG_LINES = 15


def supervise(
    command: Sequence[str], ranks: int, folder: Path, patience: timedelta, place: Found | None = None
) -> None:
    """Run a command in `ranks` processes, and return when all of them have ended well.

    Each finds the variables that torchrun would set. The output of rank 0 goes through, that of others to files in
    `folder`, of which the last lines are shown if that rank fails. SIGINT and SIGTERM end all ranks; a second one
    does so at once.

    Args:
        command: What to run; its first lines should be `rank.follow_launcher()`.
        ranks: How many processes.
        folder: An empty folder, for what the ranks leave.
        patience: How long a rank may be stopped. The others should give up sooner, but where they are in code that
            has no time-out, nobody else would end them.
        place: Which this launcher is of several, each with as many ranks; by default it is the only one.

    Raises:
        RankFailure: a rank failed or was killed. It says which and why, once.
        KeyboardInterrupt: SIGINT came.
        SystemExit: SIGTERM came; the code is 128 and its number.
    """
    processes: list[subprocess.Popen[Any]] = []
    first, total = (place.index * ranks, place.count * ranks) if place is not None else (0, ranks)
    with _signals() as came:
        try:
            _start(processes, command, ranks, folder, came, place)
            failures = _watch(processes, folder, came, patience + SLACK, first)
            silent = _silent(processes, failures, first)
        finally:
            _end(processes, came)
    if came and came[0] == signal.SIGINT:
        raise KeyboardInterrupt
    if came:
        raise SystemExit(128 + came[0])
    if failures:
        raise RankFailure(describe(failures, silent, total) + _last_lines(folder, cause(failures).rank))


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Note the signals that ask for an end, also where a shell had them ignored, as it does for background jobs."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came  # only the main thread can have handlers; it goes on as it would
        return
    asking = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in asking}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _start(
    processes: list[subprocess.Popen[Any]],
    command: Sequence[str],
    ranks: int,
    folder: Path,
    came: list[int],
    place: Found | None,
) -> None:
    """Start the ranks, unless a signal comes before the last."""
    sys.stdout.flush()
    secret = token_hex(32)
    with _meeting(place) as meeting:
        for local in range(ranks):
            if came:
                return
            if place is None:
                environment = _environment(local, ranks, meeting.getsockname()[1]) | {SECRET: secret}
            else:  # the secret is what all launchers were given, if anything
                environment = _environment(local, ranks, place.port) | place.of_local(local, ranks)
            rank = int(environment["RANK"])
            if rank == 0:
                # It is handed the open socket, so that no other program can take the port in between.
                environment["SHARDWISE_MEETING_FD"] = str(meeting.fileno())
            with _output(folder, rank) as output:
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(meeting.fileno(),) if rank == 0 else (),
                    process_group=0,  # Ctrl-C in a terminal is for the launcher, which ends them in order
                )
            processes.append(process)


def _meeting(place: Found | None) -> socket.socket | AbstractContextManager[Any]:
    """Return the socket where ranks meet; nothing on machines other than that of the first rank."""
    if place is None:
        return socket.create_server((LOOPBACK, 0), backlog=4096)
    return listen(place.port) if place.index == 0 else nullcontext()


def _output(folder: Path, rank: int) -> AbstractContextManager[Any]:
    return nullcontext() if rank == 0 else _log(folder, rank).open("wb")


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    # The ranks share the cores of this machine; more threads than cores make all of them slow.
    threads = max(1, (os.cpu_count() or 1) // ranks)
    outer = {key: value for key, value in os.environ.items() if key != "SHARDWISE_MEETING_FD"}
    return {
        "OMP_NUM_THREADS": str(threads),
        **outer,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "SHARDWISE_LAUNCHER": str(os.getpid()),
    }


def _watch(
    processes: list[subprocess.Popen[Any]], folder: Path, came: list[int], patience: timedelta, first: int
) -> list[Failure]:
    """Return what went wrong as soon as something does; nothing once all have ended well, or a signal has come."""
    running = [time.monotonic()] * len(processes)
    while not came:
        codes = [process.poll() for process in processes]
        done = [result_of(folder, rank).exists() for rank, _ in enumerate(processes, first)]
        if any(code or (code == 0 and not left) for code, left in zip(codes, done, strict=True)):
            return _settled(processes, folder, first)
        if all(code == 0 for code in codes):
            return []
        for local, process in enumerate(processes):
            if not _is_stopped(process.pid):
                running[local] = time.monotonic()
            elif time.monotonic() - running[local] > patience.total_seconds():
                return [Failure.by_stop(first + local, patience)]
        time.sleep(POLL)
    return []


def _settled(processes: list[subprocess.Popen[Any]], folder: Path, first: int) -> list[Failure]:
    """Return the failures of all ranks that fail within a moment."""
    start = time.monotonic()
    while True:
        found = [_failure(process, rank, folder) for rank, process in enumerate(processes, first)]
        failures = [failure for failure in found if failure is not None]
        patience = SETTLE_LATE if failures and cause(failures).waited else SETTLE
        if time.monotonic() - start > patience or all(process.poll() is not None for process in processes):
            return failures
        time.sleep(POLL)


def _failure(process: subprocess.Popen[Any], rank: int, folder: Path) -> Failure | None:
    code = process.poll()
    if code is not None and code < 0:
        return Failure.by_exit(rank, code)
    if code is None or result_of(folder, rank).exists():
        return Failure.read(folder, rank)
    return Failure.read(folder, rank) or Failure.by_exit(rank, code)


def _silent(processes: list[subprocess.Popen[Any]], failures: list[Failure], first: int) -> dict[int, str]:
    """Return the ranks that are there and have not failed, with their state."""
    failed = {failure.rank for failure in failures}
    return {
        rank: "it is stopped" if _is_stopped(process.pid) else "it is running"
        for rank, process in enumerate(processes, first)
        if process.poll() is None and rank not in failed
    }


def _is_stopped(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        )  # not "t", for a debugger
    except OSError:  # not Linux, or just gone
        return False


def _end(processes: list[subprocess.Popen[Any]], came: list[int]) -> None:
    """End what is still running: politely, and after a while, or a second signal, for good."""
    before = len(came)
    _send(processes, signal.SIGTERM, signal.SIGCONT)  # one that is stopped would not hear of it
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and len(came) <= before and any(p.poll() is None for p in processes):
        time.sleep(POLL)
    _send(processes, signal.SIGKILL)
    if before or any(process.returncode != 0 for process in processes):
        _show_cursor()
    for process in processes:
        process.wait()


def _show_cursor() -> None:
    """Show the cursor of the terminal, which the progress bar of a rank hides and cannot show again if it is killed."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")


def _send(processes: list[subprocess.Popen[Any]], *numbers: int) -> None:
    """Send signals to the processes that are still there, and to what they have started."""
    for process in processes:
        for number in numbers:
            if process.poll() is None:
                os.killpg(process.pid, number)


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _last_lines(folder: Path, rank: int) -> str:
    """Return the end of what a rank printed, unless it was seen when it was printed."""
    file = _log(folder, rank)
    lines = file.read_text("utf-8", "replace").splitlines()[-LOG_LINES:] if file.exists() else []
    return "".join(f"\n  | {line}" for line in [f"last output of rank {rank}:", *lines]) if lines else ""
