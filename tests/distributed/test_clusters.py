"""Ranks that a cluster's launcher has started: processes with its variables, two of them, both on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from shardwise import init_ranks
from shardwise.errors import GroupError
from tests import cluster

LIMIT = 100


def free_port() -> str:
    """Return a port that was free just now, with the next one."""
    while True:
        with socket.create_server(("", 0)) as first:
            port: int = first.getsockname()[1]
            try:
                socket.create_server(("", port + 1)).close()
            except OSError:
                continue
            return str(port)


def task(index: int, port: str) -> dict[str, str]:
    """Return what srun tells one of two tasks, on a node each."""
    return {
        "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "localhost,other", "SLURM_PROCID": str(index),
        "SLURM_NODEID": str(index), "SLURM_LOCALID": "0", "MASTER_PORT": port,
    }  # fmt: skip


def pod(index: int, port: str) -> dict[str, str]:
    """Return what a LeaderWorkerSet tells one of two pods."""
    return {
        "LWS_LEADER_ADDRESS": "localhost",
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": str(index),
        "MASTER_PORT": port,
    }


def job(index: int, port: str) -> dict[str, str]:
    """Return what a JobSet's manifest tells one of two pods."""
    return {
        "JOB_COMPLETION_INDEX": str(index),
        "JOBSET_NAME": "draw",
        "MASTER_ADDR": "localhost",
        "NNODES": "2",
        "MASTER_PORT": port,
    }


def start(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]


def finish(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Return the exit codes of processes and what they said, once all have ended."""
    try:
        said = [process.communicate(timeout=LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


def here(*arguments: str) -> list[str]:
    """Return the command that runs a function of `tests.cluster` on ranks, some times."""
    return [sys.executable, cluster.__file__, *arguments]


def test_tasks_of_srun_are_the_ranks_and_can_be_again() -> None:
    port = free_port()
    first, second = finish(start(here("summed", "2", "2"), [task(0, port), task(1, port)]))
    assert first == (0, "[[0, 2, '0', True], None]\n" * 2, first[2])
    assert second == (0, "[None, [1, 2, '0', True]]\n" * 2, second[2])


@pytest.mark.parametrize("does", ["ends", "fails"])
def test_script_of_ones_own_finds_its_ranks_and_hears_of_their_errors(does: str) -> None:
    port = free_port()
    first, second = finish(start(here("script", does), [task(0, port), task(1, port)]))
    assert (first[1], second[1]) == ("0 2 2\n", "1 2 2\n"), first[2] + second[2]
    assert {first[0], second[0]} == ({0} if does == "ends" else {1})
    told = f"rank 1 of 2 on {socket.gethostname()} failed: ValueError: boom"
    assert (told in first[2]) == (does == "fails")


def test_script_that_was_started_by_itself_is_told_how() -> None:
    with pytest.raises(
        GroupError, match="no launcher has started this process as one of several ranks: start"
    ):
        init_ranks("cpu")


def test_pods_start_their_share_of_the_ranks() -> None:
    port = free_port()
    first, second = finish(start(here("summed", "4", "1"), [pod(0, port), pod(1, port)]))
    assert first[:2] == (0, "[[0, 4, '0', False], [1, 4, '1', False], None, None]\n"), first[2]
    assert second[:2] == (0, "[None, None, [2, 4, '0', False], [3, 4, '1', False]]\n"), second[2]


def test_rank_that_is_killed_ends_the_processes_of_all_launchers() -> None:
    port = free_port()
    first, second = finish(start(here("killed", "4", "1"), [job(0, port), job(1, port)]))
    assert (first[0], second[0]) == (1, 1)
    assert f"rank 3 of 4 on {socket.gethostname()} has ended without a word" in first[2]
    assert "rank 3 of 4 was killed by SIGKILL" in second[2]


def test_generate_draws_by_two_tasks_and_the_first_names_the_picture(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-c", "from shardwise.cli import main; main()", "generate", "embedded"]
    options = ["--prompt", "red", "--steps", "2", "--tp", "2", "--device", "cpu", "--out", str(tmp_path)]
    first, second = finish(start([*command, *options], [task(0, port), task(1, port)]))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert first[1] == f"{tmp_path / 'seed-0.png'}\n"
    assert second[1] == ""


def test_number_of_tasks_that_the_degrees_do_not_make_is_refused_before_anything_starts() -> None:
    options = ["embedded", "--prompt", "red", "--tp", "3"]
    command = [sys.executable, "-c", "from shardwise.cli import main; main()", "generate", *options]
    for code, out, error in finish(start(command, [task(0, "1"), pod(1, "1")])):
        assert (code, out) == (2, "")
        assert "is 2, and the degrees make 3 ranks" in error
