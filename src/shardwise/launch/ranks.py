"""The call that runs a function on ranks of this machine, and what torchrun starts in its place."""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from shardwise.launch.failure import Failure, describe
from shardwise.launch.rank import end_now, resolved
from shardwise.launch.supervise import supervise


def run_ranks(
    function: Callable[..., Any] | str,
    ranks: int,
    *args: Any,
    device: str | None = None,
    timeout: timedelta | None = None,
) -> list[Any]:
    """Run `function(*args)` in `ranks` new processes that share a process group; return their results by rank.

    The backend is NCCL where each rank can have a CUDA device of its own, gloo on CPU otherwise. If a rank fails or is
    killed, or this process is, all ranks end.

    Args:
        function: A function of an importable module, or its name as `"package.module:name"`, which is then imported
            by the ranks only; its result must be picklable.
        ranks: Number of processes on this machine.
        args: Picklable arguments.
        device: `"cpu"` or `"cuda"`, where the choice is not to be made here.
        timeout: How long a rank waits for the others in a collective; by default half an hour.

    Raises:
        ConfigError: CUDA was asked for, and there are fewer devices than ranks.
        RankFailure: a rank failed or was killed; the message says which and why.
        KeyboardInterrupt: Ctrl-C; all ranks have ended.
        SystemExit: SIGTERM, likewise.
    """
    on_cuda = _uses_cuda(ranks, device)
    with tempfile.TemporaryDirectory(prefix="shardwise-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "main").write_bytes(pickle.dumps(_main_module()))
        (folder / "call").write_bytes(pickle.dumps((function, args, on_cuda, timeout)))
        supervise([sys.executable, "-c", _STARTER, str(_ROOT), name], ranks, folder)
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(ranks)]


def is_rank() -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, has started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_as_rank(
    function: Callable[..., Any] | str,
    *args: Any,
    device: str | None = None,
    timeout: timedelta | None = None,
) -> Any:
    """Run `function(*args)` as the rank that this process was started as, and return its result.

    The arguments are those of `run_ranks`. If the function raises, the error is printed with the rank, and the process
    ends with exit code 1: its launcher ends the others.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        from shardwise.launch.group import in_group  # imports torch, which takes a second

        on_cuda = _uses_cuda(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), device)
        return in_group(resolved(function), args, on_cuda, timeout)
    except BaseException as error:
        print(f"Error: {describe([Failure.of(rank, error)], {}, ranks)}", file=sys.stderr)
        end_now(1)


_ROOT = Path(__file__).parents[2]
_STARTER = "import sys; sys.path.insert(0, sys.argv.pop(1)); from shardwise.launch.rank import main; main()"


def _uses_cuda(ranks: int, device: str | None) -> bool:
    if device == "cpu":
        return False
    from shardwise.launch.group import uses_cuda

    return uses_cuda(ranks, device)


def _main_module() -> dict[str, Any]:
    """Return how a rank finds what this process finds: its import path, and the module it was started with."""
    found = multiprocessing.spawn.get_preparation_data("rank")
    found.pop("authkey", None)  # not for files, and for nothing that a rank does
    return found
