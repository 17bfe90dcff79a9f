"""Ranks and their launcher: whichever of them dies, stops or is interrupted, all end, and one message says why.

Most ranks here are plain processes that follow the launcher and import nothing, so they start at once. Those that meet
in a collective are real ones.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwise.errors import ConfigError, RankFailure
from shardwise.launch import run_ranks
from shardwise.launch.failure import Failure, cause, describe
from shardwise.launch.group import _Meeting
from shardwise.launch.supervise import supervise

LIMIT = 30
"""Seconds within which everything has to have ended."""
PATIENCE = timedelta(minutes=30)


# --- ranks that import nothing ----------------------------------------------------------------------------------------

PLAIN = """
import os, signal, sys, time
from pathlib import Path
from shardwise.launch.failure import Failure
from shardwise.launch.rank import follow_launcher
follow_launcher()
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
(folder / f"pid-{rank}").write_text(str(os.getpid()))
def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)
def fail(error):
    Failure.of(rank, error).write(folder)
    os._exit(1)
"""
LAUNCHER = """
import sys
from datetime import timedelta
from pathlib import Path
from shardwise.errors import RankFailure
from shardwise.launch.supervise import supervise
try:
    supervise(sys.argv[2:], 2, Path(sys.argv[1]), timedelta(minutes=30))
except RankFailure as error:
    sys.exit(str(error))
"""


def plain(code: str, folder: Path) -> list[str]:
    return [sys.executable, "-c", PLAIN + code, str(folder)]


def pids(folder: Path, ranks: int = 2) -> list[int]:
    """Wait for the ranks, and return their process ids."""
    files = [folder / f"pid-{rank}" for rank in range(ranks)]
    until(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def until(true: Callable[[], bool], seconds: float = LIMIT) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "too late"
        time.sleep(0.02)


def is_there(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a launcher of two plain ranks, as a shell starts a job in the background: with SIGINT ignored."""
    started = []

    def start(code: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LAUNCHER, str(tmp_path), *plain(code, tmp_path)]
        started.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
            )
        )
        return started[0]

    yield start
    for process in started:
        process.kill()
        process.communicate()


WAIT = "time.sleep(60)"
DONE = "(folder / f'result-{rank}').touch()"
DEAF_TO_THE_SYSTEM = "import ctypes; ctypes.CDLL(None).prctl(1, 0)\n"
"""What a rank does that is not told of its launcher's end, as where there is no such signal."""


def test_ranks_that_end_well_are_no_error_and_find_what_torchrun_would_set(tmp_path: Path) -> None:
    names = "LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS MASTER_PORT".split()
    code = f"(folder / f'env-{{rank}}').write_text(' '.join(os.environ[name] for name in {names})); {DONE}"
    supervise(plain(code, tmp_path), 2, tmp_path, PATIENCE)
    first, second = ((tmp_path / f"env-{rank}").read_text().split() for rank in range(2))
    assert first[:4] == ["0", "2", "2", "127.0.0.1"]
    assert second == ["1", *first[1:]]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("fail(ValueError('boom')) if rank == 1 else time.sleep(60)", "rank 1 of 2 failed: ValueError: boom"),
        (
            # What the other rank meets is noticed first, and follows from it.
            "if rank == 0: wait_for('failure-1'); fail(RuntimeError('Connection closed by peer'))\n"
            "time.sleep(.05); fail(ValueError('boom'))",
            "rank 1 of 2 failed: ValueError: boom",
        ),
        ("os.kill(os.getpid(), 9) if rank == 1 else time.sleep(60)", "rank 1 of 2 was killed by SIGKILL"),
        (
            "print('the last words', flush=True); sys.exit(7) if rank == 1 else time.sleep(60)",
            "rank 1 of 2 exited with code 7",
        ),
        (
            # It is the cause of what the other meets, which is noticed first.
            "wait_for('pid-0'); wait_for('pid-1')\n"
            "sys.exit(0) if rank == 1 else fail(RuntimeError('Connection closed by peer'))",
            "rank 1 of 2 left with exit code 0 before its work was done",
        ),
        ("fail(ValueError('all')) ", "ranks 0, 1 of 2 failed: ValueError: all"),
        (
            "os.kill(os.getpid(), signal.SIGSTOP) if rank == 1 else wait_for('pid-1')\n"
            "time.sleep(.3); fail(RuntimeError('Timed out waiting 300ms for recv'))",
            "rank 1 of 2 did not answer (it is stopped)",
        ),
    ],
    ids=["raises", "raises first", "is killed", "exits", "leaves", "all raise", "is stopped"],
)
def test_failure_of_a_rank_ends_all_and_is_said_once(tmp_path: Path, code: str, says: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        supervise(plain(code, tmp_path), 2, tmp_path, PATIENCE)
    assert time.monotonic() - start < 10
    assert str(caught.value).startswith(says)
    assert str(caught.value).count(says) == 1
    assert "Connection closed" not in str(caught.value)
    assert not [pid for pid in pids(tmp_path) if is_there(pid)]


def test_rank_that_is_stopped_while_another_waits_without_a_time_out_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.launch.supervise.SLACK", timedelta(seconds=0.5))
    code = "os.kill(os.getpid(), signal.SIGSTOP) if rank == 1 else time.sleep(60)"
    with pytest.raises(
        RankFailure, match=r"^rank 1 of 2 was stopped \(SIGSTOP\), and did not go on within 1 s"
    ):
        supervise(plain(code, tmp_path), 2, tmp_path, timedelta(seconds=0.5))
    assert not [pid for pid in pids(tmp_path) if is_there(pid)]


def test_signal_while_ranks_are_being_started_starts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def start(*args: Any, **kwargs: Any) -> Any:
        started.append(popen(*args, **kwargs))
        os.kill(os.getpid(), signal.SIGTERM)
        return started[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(SystemExit) as caught:
        supervise(plain(WAIT, tmp_path), 100, tmp_path, PATIENCE)
    assert caught.value.code == 128 + signal.SIGTERM
    assert len(started) == 1
    assert not is_there(started[0].pid)


def test_last_output_of_a_failed_rank_is_shown_and_that_of_others_is_not(tmp_path: Path) -> None:
    code = "print(f'words of {rank}', flush=True); wait_for('rank-2.log'); sys.exit(7) if rank == 1 else time.sleep(60)"
    with pytest.raises(RankFailure, match="words of 1") as caught:
        supervise(plain(code, tmp_path), 3, tmp_path, PATIENCE)
    assert "words of 2" not in str(caught.value)


def test_rank_that_is_deaf_to_the_end_is_killed(tmp_path: Path) -> None:
    code = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); (folder / f'deaf-{rank}').touch(); "
        "wait_for('deaf-0'); sys.exit(3) if rank == 1 else time.sleep(60)"
    )
    with pytest.raises(RankFailure, match="rank 1 of 2 exited with code 3"):
        supervise(plain(code, tmp_path), 2, tmp_path, PATIENCE)
    assert not [pid for pid in pids(tmp_path) if is_there(pid)]


LOOK_AFTER = DEAF_TO_THE_SYSTEM + (
    "from shardwise.launch import rank; rank._look_after(int(os.environ['SHARDWISE_LAUNCHER']))"
)


@pytest.mark.parametrize(
    ("number", "code", "does"),
    [
        (signal.SIGINT, 130, WAIT),
        (signal.SIGTERM, 143, WAIT),
        (signal.SIGKILL, -9, WAIT),
        (signal.SIGKILL, -9, LOOK_AFTER),
    ],
    ids=["SIGINT", "SIGTERM", "SIGKILL", "SIGKILL, not on Linux"],
)
def test_ranks_do_not_outlive_a_launcher_that_is_ended(
    launcher: Any, tmp_path: Path, number: int, code: int, does: str
) -> None:
    process = launcher(does)
    ranks = pids(tmp_path)
    process.send_signal(number)
    _, said = process.communicate(timeout=LIMIT)
    assert process.returncode in (code, -number)
    assert "Traceback" not in said or number == signal.SIGINT  # KeyboardInterrupt is for the command to show
    until(lambda: not [pid for pid in ranks if is_there(pid)], 5)


def test_rank_that_does_not_follow_outlives_its_launcher(launcher: Any, tmp_path: Path) -> None:
    # The negative control: without the signal of the parent's death the test above would fail.
    process = launcher(DEAF_TO_THE_SYSTEM + WAIT)
    ranks = pids(tmp_path)
    time.sleep(0.2)
    process.kill()
    process.wait(LIMIT)
    time.sleep(0.2)
    assert all(is_there(pid) for pid in ranks)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)


def test_second_interrupt_does_not_wait(launcher: Any, tmp_path: Path) -> None:
    process = launcher(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); (folder / f'deaf-{rank}').touch(); time.sleep(60)"
    )
    until(lambda: all((tmp_path / f"deaf-{rank}").exists() for rank in range(2)))
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=LIMIT)
    assert time.monotonic() - start < 4
    assert not [pid for pid in pids(tmp_path) if is_there(pid)]


HANGS = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = "import sys; from shardwise.launch.rank import see_the_launcher_end; see_the_launcher_end(float(sys.argv[1]))"
subprocess.run([sys.executable, "-c", rank, sys.argv[1]], check=True)
time.sleep(float(sys.argv[2]))
"""


def test_launcher_that_hangs_after_a_rank_was_cut_off_is_ended() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS, "0.1", "60"], timeout=LIMIT, check=False)
    assert done.returncode == -signal.SIGKILL
    # One that ends by itself is left alone.
    assert (
        subprocess.run([sys.executable, "-c", HANGS, "60", "0"], timeout=LIMIT, check=False).returncode == 0
    )


# --- which failure is the cause ---------------------------------------------------------------------------------------


def failure(rank: int, kind: str, message: str = "", time: float = 0.0, killed: bool = False) -> Failure:
    return Failure(rank, kind, message, time, killed=killed)


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([failure(0, "ValueError", time=2), failure(1, "OSError", time=1)], 1),
        ([failure(0, "RankFailure", "rank 1 failed", 1), failure(1, "OSError", time=2)], 1),
        ([failure(0, "RuntimeError", "Connection reset by peer", 1), failure(1, "OSError", time=2)], 1),
        (
            [failure(0, "DistNetworkError", "Connection was likely closed. Did", 1), failure(1, "E", time=2)],
            1,
        ),
        ([failure(0, "OSError", time=1), failure(1, "SIGKILL", time=2, killed=True)], 1),
        (
            [
                failure(0, "RankFailure", "the ranks differ", 1),
                failure(1, "RankFailure", "the ranks differ", 2),
            ],
            0,
        ),
    ],
)
def test_cause_is_the_first_failure_that_follows_from_no_other(failures: list[Failure], rank: int) -> None:
    assert cause(failures).rank == rank
    assert cause(failures[::-1]).rank == rank


def test_running_rank_that_nobody_hears_of_is_named() -> None:
    text = describe([failure(0, "RuntimeError", "Timed out waiting 5ms")], {1: "it is running"}, 2)
    assert text.startswith("rank 1 of 2 did not answer (it is running)")
    assert "Timed out waiting 5ms" in text


def test_rank_that_waits_for_none_asks_nothing_of_a_store_that_may_be_gone() -> None:
    store = mock.Mock(spec=["clone"])  # no store within a store within ...
    store.clone.return_value.wait.side_effect = ConnectionError("rank 0 has left")
    meeting = _Meeting(store, 1, 2)
    meeting.come("be done", 0, timedelta(seconds=5))
    store.clone.return_value.set.assert_called_once_with("shardwise/be done/1", "null")
    with pytest.raises(ConnectionError):
        meeting.come("start", 2, timedelta(seconds=5))


# --- ranks that meet --------------------------------------------------------------------------------------------------


@dataclass
class Thing:
    """Something to be sent to ranks and back."""

    value: int


def _sum(thing: Thing) -> tuple[Thing, int, str]:
    total = torch.tensor([float(thing.value + dist.get_rank())])
    dist.all_reduce(total)
    return Thing(int(total)), os.getpid(), os.environ["OMP_NUM_THREADS"]


def test_function_runs_on_all_ranks_and_results_come_by_rank() -> None:
    results = run_ranks(_sum, 2, Thing(20), device="cpu")
    assert [result[0] for result in results] == [Thing(41)] * 2
    assert results[0][1] != results[1][1] != os.getpid()


def _meet_one_that(kind: str, folder: Path) -> None:
    """Go through one all-reduce; then rank 1 fails in its way while rank 0 is in the next."""
    total = torch.ones(1)
    dist.all_reduce(total)
    (folder / f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    if dist.get_rank() == 1:
        time.sleep(0.3)  # until rank 0 waits
        if kind == "raises":
            raise ValueError("boom")
        os.kill(os.getpid(), getattr(signal, kind))
    dist.all_reduce(total)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("raises", "rank 1 of 2 failed: ValueError: boom"),
        ("SIGKILL", "rank 1 of 2 was killed by SIGKILL (often the system does that when memory runs out)"),
        ("SIGSTOP", "rank 1 of 2 did not answer (it is stopped)"),
    ],
)
def test_peer_of_a_waiting_rank_that_fails_ends_the_job(tmp_path: Path, kind: str, says: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(_meet_one_that, 2, kind, tmp_path, device="cpu", timeout=timedelta(seconds=5))
    assert time.monotonic() - start < LIMIT
    assert str(caught.value).startswith(says)
    assert not [pid for pid in pids(tmp_path) if is_there(pid)]


def test_device_that_is_none_is_refused_before_any_rank_starts() -> None:
    with pytest.raises(ConfigError, match="device must be"):
        run_ranks(_sum, 2, Thing(1), device="tpu")


def test_launcher_imports_no_torch() -> None:
    code = "import sys, shardwise.launch, shardwise.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
