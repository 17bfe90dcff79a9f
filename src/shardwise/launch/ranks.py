"""The call that runs a function on ranks: those that it starts, or that a cluster's launcher has started."""

from __future__ import annotations

import atexit
import itertools
import multiprocessing.spawn
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from shardwise.errors import ConfigError, GroupError, RankFailure
from shardwise.launch.failure import Failure, describe, result_of
from shardwise.launch.found import TETHER, TORCHRUN, Found, found
from shardwise.launch.machine import require_room, shows_one_device
from shardwise.launch.rank import PATIENCE, Terms, end_now, follow_parent, resolved, see_the_launcher_end
from shardwise.launch.reach import listen
from shardwise.launch.supervise import supervise


def run_ranks(
    function: Callable[..., Any] | str,
    ranks: int,
    *args: Any,
    device: str | None = None,
    timeout: timedelta = PATIENCE,
    patience: timedelta = PATIENCE,
    oversubscribe: bool = False,
) -> list[Any]:
    """Run `function(*args)` in `ranks` new processes that share a process group; return their results by rank.

    The backend is NCCL where each rank can have a CUDA device of its own, gloo on CPU otherwise. If a rank fails or is
    killed, or this process is, all ranks end.

    Where torchrun, srun, a LeaderWorkerSet or a JobSet has started this process as one of several (`launch.found`), all
    of them make this call, and are the ranks; or, where each has a machine or a pod to itself and there are more ranks
    than processes, each starts its share of them. The results of ranks of other processes are None then.

    Args:
        function: A function of an importable module, or its name as `"package.module:name"`, which is then imported
            by the ranks only; its result must be picklable.
        ranks: Number of ranks.
        args: Picklable arguments.
        device: `"cpu"` or `"cuda"`, where the choice is not to be made here.
        timeout: How long a rank waits for the others in a collective, and to be done; by default half an hour. One that
            is stopped for longer fails.
        patience: How long it waits for them to start; likewise.
        oversubscribe: Whether there may be more than four ranks for each core.

    Raises:
        ConfigError: CUDA was asked for, and there are fewer devices than ranks; or they are many times the cores; or
            a launcher has started another number, or does not say what is needed to know.
        RankFailure: a rank failed or was killed; the message says which and why.
        KeyboardInterrupt: Ctrl-C; all ranks have ended.
        SystemExit: SIGTERM, likewise.
    """
    place = _next_place()
    if place is not None and place.each(ranks) == 1:
        own = _as_rank(place, function, args, device, timeout, patience)
        return [own if rank == place.index else None for rank in range(ranks)]
    local = own_share(ranks)
    first = place.index * local if place is not None else 0
    require_room(local, device, oversubscribe)
    on_cuda = _uses_cuda(local, device)
    with tempfile.TemporaryDirectory(prefix="shardwise-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "main").write_bytes(pickle.dumps(_main_module()))
        (folder / "call").write_bytes(pickle.dumps((function, args, Terms(on_cuda, timeout, patience))))
        # -P: else the working directory, which may be a model's folder, would stand in front of the standard library.
        supervise([sys.executable, "-P", "-c", _STARTER, str(_ROOT), name], local, folder, timeout, place)
        left = [result_of(folder, rank) for rank in range(ranks)]
        return [
            pickle.loads(file.read_bytes()) if first <= rank < first + local else None
            for rank, file in enumerate(left)
        ]


def own_share(ranks: int) -> int:
    """Return how many of a job's ranks this process starts, or 1 if it is one.

    Raises:
        ConfigError: a launcher has started another number, or does not say what is needed to know.
    """
    place = found()
    return place.each(ranks) if place is not None else ranks


def is_rank() -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, has started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """Return whether this process is the first of those that a launcher has started, or the only one."""
    place = found()
    return place is None or place.index == 0


def run_as_rank(
    function: Callable[..., Any] | str,
    *args: Any,
    device: str | None = None,
    timeout: timedelta = PATIENCE,
    patience: timedelta = PATIENCE,
) -> Any:
    """Run `function(*args)` as the rank that this process was started as, and return its result.

    The arguments are those of `run_ranks`. If the function raises, the error is printed with the rank, and the process
    ends with exit code 1: its launcher ends the others, or they hear of it. It ends soon after its launcher.
    """
    place = _next_place()
    if place is None:
        raise ConfigError("this process was started by itself: run_ranks starts ranks")
    return _as_rank(place, function, args, device, timeout, patience)


def init_ranks(
    device: str | None = None, *, timeout: timedelta = PATIENCE, patience: timedelta = PATIENCE
) -> tuple[int, int]:
    """Join the process group of the ranks that torchrun, srun, a LeaderWorkerSet or a JobSet has started.

    For scripts of one's own, in place of `torch.distributed.init_process_group`, which knows torchrun's variables only.
    Each process is a rank; a CUDA rank has its device set. The process ends soon after its launcher; that another rank
    has ended is said, and ends it too. The group is left when the process ends.

    Args:
        device, timeout, patience: As of `run_ranks`, in `shardwise.launch`.

    Returns:
        This process's rank, and how many there are.

    Raises:
        GroupError: no launcher has started this process as one of several.
        ConfigError: its variables cannot be meant; or CUDA was asked for, and there are fewer devices than ranks.
        RankFailure: another rank did not start in time.
    """
    place = _next_place()
    if place is None:
        raise GroupError(
            "no launcher has started this process as one of several ranks: start the script with `torchrun "
            "--nproc-per-node N script.py`, with srun, or in the pods of a LeaderWorkerSet or JobSet"
        )
    follow_parent()
    membership = ExitStack()
    with _standing_in(place):
        membership.enter_context(_joined(place, device, timeout, patience))
    os.environ.update({name: value for name, value in place.variables().items() if name != TETHER})
    atexit.register(_leave, membership)
    return place.index, place.count


def _leave(membership: ExitStack) -> None:
    """Leave the group at the end of a script; after an error that it did not handle, tell the others and go at once."""
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is None:
        membership.close()
        return
    with suppress(BaseException):
        membership.__exit__(type(error), error, error.__traceback__)
    end_now(1)


def _as_rank(
    place: Found,
    function: Callable[..., Any] | str,
    args: tuple[Any, ...],
    device: str | None,
    timeout: timedelta,
    patience: timedelta,
) -> Any:
    follow_parent()
    try:
        with _standing_in(place), _joined(place, device, timeout, patience):
            return resolved(function)(*args)
    except BaseException as error:
        _fail(place, error)


def _joined(
    place: Found, device: str | None, timeout: timedelta, patience: timedelta
) -> AbstractContextManager[None]:
    from shardwise.launch.group import joined  # imports torch, which takes a second

    devices = 1 if shows_one_device() else place.local_count
    terms = Terms(_uses_cuda(devices, device), timeout, patience)
    return joined(terms, lambda word: _fail(place, RankFailure(word)))


def _fail(place: Found, error: BaseException) -> NoReturn:
    """Print an error with the rank, and end this process at once."""
    print(f"Error: {describe([Failure.of(place.index, error)], {}, place.count)}", file=sys.stderr)
    if type(error).__name__ == "StoreLost" and "TORCHELASTIC_RUN_ID" in os.environ:
        see_the_launcher_end()
    end_now(1)


_calls = itertools.count()


def _next_place() -> Found | None:
    """Return which process this is, with a port of this call's own: the last one's may not be free again yet."""
    place = found()
    return place if place is None or place.by == TORCHRUN else replace(place, port=place.port + next(_calls))


@contextmanager
def _standing_in(place: Found) -> Iterator[None]:
    """Set what our own launcher would have set for this rank, where its launcher is not torchrun."""
    if place.by == TORCHRUN:
        yield
        return
    own = place.variables() | {"SHARDWISE_LAUNCHER": str(os.getppid())}
    if place.index == 0:
        own["SHARDWISE_MEETING_FD"] = str(listen(place.port).detach())  # the store closes it
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_ROOT = Path(__file__).parents[2]
_STARTER = "import sys; sys.path.insert(0, sys.argv.pop(1)); from shardwise.launch.rank import main; main()"


def _uses_cuda(ranks: int, device: str | None) -> bool:
    if device == "cpu":
        return False
    from shardwise.launch.group import uses_cuda

    return uses_cuda(ranks, device)


def _main_module() -> dict[str, Any]:
    """Return how a rank finds what this process finds: its import path, and the module it was started with."""
    module = multiprocessing.spawn.get_preparation_data("rank")
    module.pop("authkey", None)  # not for files, and for nothing that a rank does
    return module
