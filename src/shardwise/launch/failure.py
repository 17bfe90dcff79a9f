"""Why a rank ended too early, and which of several failures is the cause of the others."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from shardwise.errors import RankFailure, ShardwiseError

_GONE = re.compile(r"connection (was likely )?(closed|reset|refused|aborted)|broken pipe|socket closed", re.I)
"""What a rank says that was connected to one that has died."""
_WAITED = re.compile(r"timed? ?out|did not answer", re.I)

_HINTS = {
    "SIGKILL": "often the system does that when memory runs out",
    "SIGBUS": "often shared memory or a mapped file is cut short",
    "SIGSEGV": "a fault in compiled code",
    "SIGABRT": "a fault in compiled code, or the watchdog of NCCL after a time-out",
}


@dataclass(frozen=True)
class Failure:
    """Why a rank ended before its work was done.

    Attributes:
        rank: Which.
        kind: The exception's class, or the signal's name.
        message: The exception's message, or what is known in its place.
        time: When, in seconds since the epoch.
        details: The traceback, where the message does not say enough.
        killed: Whether a signal ended it.
    """

    rank: int
    kind: str
    message: str
    time: float
    details: str = ""
    killed: bool = False

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Return the failure that an exception is, now."""
        details = "" if isinstance(error, ShardwiseError) else "".join(traceback.format_exception(error))
        return cls(rank, type(error).__name__, str(error), time.time(), details)

    @classmethod
    def by_exit(cls, rank: int, code: int) -> Failure:
        """Return the failure of a rank that left nothing but its exit code; below 0 it is a signal's."""
        if code == 0:
            return cls(rank, "", "left with exit code 0 before its work was done", time.time())
        if code > 0:
            return cls(rank, "", f"exited with code {code}", time.time())
        name = signal.Signals(-code).name
        hint = f" ({_HINTS[name]})" if name in _HINTS else ""
        return cls(rank, name, f"was killed by {name}{hint}", time.time(), killed=True)

    @classmethod
    def by_stop(cls, rank: int, patience: timedelta) -> Failure:
        """Return the failure of a rank that has been stopped for too long."""
        seconds = f"{patience.total_seconds():g} s"
        return cls(rank, "", f"was stopped (SIGSTOP), and did not go on within {seconds}", time.time())

    @property
    def follows(self) -> bool:
        """Whether this only says that another rank has failed."""
        return self.kind == RankFailure.__name__ or bool(_GONE.search(self.message))

    @property
    def waited(self) -> bool:
        """Whether this says that another rank did not come in time."""
        return bool(_WAITED.search(self.message))

    def write(self, folder: Path) -> None:
        """Leave this for the launcher, all of it or nothing."""
        file = folder / f"failure-{self.rank}"
        file.with_suffix(".new").write_text(json.dumps(asdict(self)), "utf-8")
        os.replace(file.with_suffix(".new"), file)

    @classmethod
    def read(cls, folder: Path, rank: int) -> Failure | None:
        """Return what a rank has left, if anything."""
        file = folder / f"failure-{rank}"
        return cls(**json.loads(file.read_text("utf-8"))) if file.exists() else None


def blames_nobody_by_name(message: str) -> bool:
    """Return whether an error says that another rank is gone or late, as torch's do, and not which."""
    return "did not answer" not in message and bool(_GONE.search(message) or _WAITED.search(message))


def result_of(folder: Path, rank: int) -> Path:
    """Return the file in which a rank leaves its result once its work is done."""
    return folder / f"result-{rank}"


def cause(failures: Iterable[Failure]) -> Failure:
    """Return the failure that the others follow from: a signal's, or the first that blames no other rank."""
    return min(failures, key=lambda failure: (not failure.killed, failure.follows, failure.time))


def describe(failures: Sequence[Failure], silent: dict[int, str], ranks: int) -> str:
    """Return the one message about a job that failed.

    Args:
        failures: What the ranks have left, at least one.
        silent: Ranks that have left nothing and were still there -> their state, such as `"stopped"`.
        ranks: Number of all ranks.
    """
    first = cause(failures)
    if first.waited and silent:
        states = ", ".join(
            f"rank {rank} of {ranks} did not answer ({state})" for rank, state in silent.items()
        )
        return f"{states}; rank {first.rank} waited for it: {first.kind}: {first.message}"
    alike = [f.rank for f in failures if (f.kind, f.message) == (first.kind, first.message)] or [first.rank]
    who = f"rank{'s' if len(alike) > 1 else ''} {', '.join(map(str, sorted(alike)))} of {ranks}"
    if first.killed or not first.kind:
        return f"{who} {first.message}"
    return f"{who} failed: {first.kind}: {first.message}" + (f"\n{first.details}" if first.details else "")
