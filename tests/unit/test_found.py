"""Which process a launcher's variables say this is. Those of Slurm were written down from Slurm itself."""

from __future__ import annotations

import pytest

from shardwise.errors import ConfigError
from shardwise.launch.found import Found, found

# Of `srun -N2 -n4 --distribution=cyclic`, task 2; of a script of `sbatch -N2 -n4`; of a shell of `salloc -N2 -n4`.
STEP = {
    "SLURM_DISTRIBUTION": "cyclic", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_STEPID": "0", "SLURM_STEP_ID": "0",
    "SLURM_STEP_LAUNCHER_PORT": "34013", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
BATCH = {
    "SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_NODELIST": "n[1-2]", "SLURM_NPROCS": "4", "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_TASK_PID": "16144",
}  # fmt: skip
SALLOC = {
    "SLURM_JOB_ID": "4", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2",
    "SLURM_NPROCS": "4", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
PTY = STEP | {"SLURM_PTY_PORT": "41629", "SLURM_PTY_WIN_COL": "80"}
POD = {"LWS_LEADER_ADDRESS": "draw-0.draw.default", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
JOB = {"JOB_COMPLETION_INDEX": "3", "JOBSET_NAME": "draw", "REPLICATED_JOB_NAME": "workers", "NNODES": "4"}
TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1",
}  # fmt: skip


def process(environment: dict[str, str]) -> Found:
    this = found(environment)
    assert this is not None
    return this


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("environment", "process"),
    [
        (TORCHRUN, Found("torchrun", "WORLD_SIZE", 5, 8, 1, 4, "a", 1, False)),
        (STEP | TORCHRUN, Found("torchrun", "WORLD_SIZE", 5, 8, 1, 4, "a", 1, False)),  # srun torchrun
        (STEP, Found("srun", "SLURM_STEP_NUM_TASKS", 2, 4, 1, 2, "n1", 15031, False)),
        (
            STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1",
                    "SLURM_NODEID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "gpu[07-09,12],b"},
            Found("srun", "SLURM_STEP_NUM_TASKS", 1, 2, 0, 1, "gpu07", 15031, True),
        ),
        (
            STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_LOCALID": "2"},
            Found("srun", "SLURM_STEP_NUM_TASKS", 2, 4, 2, 4, "127.0.0.1", 15031, False),
        ),
        (
            STEP | {"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "7"},
            Found("srun", "SLURM_STEP_NUM_TASKS", 2, 4, 1, 2, "10.1.1.1", 7, False),
        ),
        (POD, Found("LeaderWorkerSet", "LWS_GROUP_SIZE", 1, 2, 0, 1, "draw-0.draw.default", 29500, True)),
        (JOB, Found("JobSet", "NNODES", 3, 4, 0, 1, "draw-workers-0-0.draw", 29500, True)),
        (
            JOB | {"JOB_COMPLETION_INDEX": "1", "JOB_INDEX": "1", "REPLICATED_JOB_REPLICAS": "2", "MASTER_PORT": "9"},
            Found("JobSet", "NNODES", 3, 4, 0, 1, "draw-workers-0-0.draw", 9, True),
        ),
    ],
    ids=["torchrun", "torchrun in a step", "task", "one task on each node", "one node", "address and port said",
         "LeaderWorkerSet", "JobSet", "JobSet of several jobs"],
)  # fmt: skip
def test_process_is_found_by_its_launchers_variables(environment: dict[str, str], process: Found) -> None:
    assert found(environment) == process


@pytest.mark.parametrize(
    "environment",
    [
        {},
        BATCH,
        SALLOC,
        PTY,
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},
        STEP | {"SHARDWISE_LAUNCHER": "7"},
        POD | {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"},
        JOB | {"NNODES": "1", "JOB_COMPLETION_INDEX": "0"},
        {"JOB_COMPLETION_INDEX": "3"},
        {"RANK": "0", "MASTER_ADDR": "a"},  # how examples of JobSet call the number of a pod
    ],
    ids=["nothing", "sbatch", "salloc", "srun --pty", "one task", "a rank of ours", "one pod", "one pod of a JobSet",
         "an indexed Job", "RANK alone"],
)  # fmt: skip
def test_process_that_works_by_itself_is_not_taken_for_a_rank(environment: dict[str, str]) -> None:
    assert found(environment) is None


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR is not set, and torchrun .*: set it to the name or address"),
        (TORCHRUN | {"RANK": "8"}, "RANK is 8, and WORLD_SIZE is 8: they are counted from 0"),
        (TORCHRUN | {"MASTER_PORT": "x"}, "MASTER_PORT is 'x', which is no number: set it to a free port"),
        (without(STEP, "SLURM_PROCID"), "SLURM_PROCID is not set, and srun .*: start the command by srun itself"),
        (without(STEP, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST is not set"),
        (STEP | {"SLURM_STEP_NODELIST": "[1-2]"}, "SLURM_STEP_NODELIST is .* names no host: set MASTER_ADDR"),
        (
            STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"},
            "SLURM_STEP_TASKS_PER_NODE is '2\\(x3\\)', which is not SLURM_STEP_NUM_TASKS=4 tasks .* unset",
        ),
        (STEP | {"SLURM_LOCALID": "2"}, "SLURM_NODEID=0 and SLURM_LOCALID=2 are no place"),
        (without(POD, "LWS_LEADER_ADDRESS"), "LWS_LEADER_ADDRESS is not set, and LeaderWorkerSet"),
        (without(POD, "LWS_WORKER_INDEX"), "LWS_WORKER_INDEX is not set.*since 0.6.0.*downward API"),
        (POD | {"LWS_WORKER_INDEX": "2"}, "LWS_WORKER_INDEX is 2, and LWS_GROUP_SIZE is 2"),
        (without(JOB, "NNODES"), "NNODES is not set.*replicas x completions of the manifest"),
        (without(JOB, "REPLICATED_JOB_NAME"), "REPLICATED_JOB_NAME is not set.*or set MASTER_ADDR"),
        (JOB | {"JOB_COMPLETION_INDEX": "4"}, "JOB_COMPLETION_INDEX=4 makes this pod number 4, and NNODES is 4"),
        (JOB | {"REPLICATED_JOB_REPLICAS": "3"}, "NNODES is 4, and REPLICATED_JOB_REPLICAS 3 does not divide it"),
    ],
)  # fmt: skip
def test_variables_that_cannot_be_meant_are_named_with_what_would_mend_them(
    environment: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        found(environment)


def test_number_of_processes_has_to_fit_the_degrees() -> None:
    torchrun, task, pod = (process(environment) for environment in (TORCHRUN, STEP, POD))
    assert (torchrun.each(8), task.each(4), pod.each(2), pod.each(8)) == (1, 1, 1, 4)
    with pytest.raises(
        ConfigError, match="WORLD_SIZE is 8, and the degrees make 4 ranks: start 4 processes by torchrun"
    ):
        torchrun.each(4)
    with pytest.raises(
        ConfigError, match="SLURM_STEP_NUM_TASKS is 4, and the degrees make 8 ranks: start 8 processes"
    ):
        task.each(8)
    for ranks in (1, 3):
        with pytest.raises(
            ConfigError, match=r"LWS_GROUP_SIZE is 2, and the degrees make .* cannot share evenly"
        ):
            pod.each(ranks)


def test_ranks_of_a_pod_have_the_numbers_that_torchrun_would_give_them() -> None:
    pod, leader = process(POD), process(POD | {"LWS_WORKER_INDEX": "0"})
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert [pod.of_local(1, 4)[name] for name in names] == ["5", "1", "8", "4", "draw-0.draw.default"]
    assert [leader.of_local(1, 4)[name] for name in names] == ["1", "1", "8", "4", "127.0.0.1"]
