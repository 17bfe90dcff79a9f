"""Which process this is of those that a cluster's launcher has started for one job. Needs no torch.

What each launcher sets was read from:

- torchrun: https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables".
- Slurm: srun(1), "OUTPUT ENVIRONMENT VARIABLES", and `env_array_for_step` in src/common/env.c of its source. The tasks
  of a step have `SLURM_STEP_ID`, `SLURM_STEP_NUM_TASKS` and so on. A batch script and a shell of `salloc` have
  `SLURM_PROCID` and `SLURM_NTASKS` as well, but none of the former: they are no tasks. `SLURM_LAUNCH_NODE_IPADDR` is
  where srun runs, which may be a login node, so the ranks meet on the first node of the step.
- LeaderWorkerSet: https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables/; it sets
  `LWS_WORKER_INDEX` since 0.6.0.
- JobSet: https://jobset.sigs.k8s.io/docs/concepts/, "DNS hostnames for Pods". Kubernetes sets `JOB_COMPLETION_INDEX`;
  names come from the pod's labels and the number of pods from the manifest, as docs/clusters.md shows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.launch.reach import LOOPBACK

TORCHRUN = "torchrun"
TETHER = "SHARDWISE_TETHER"
"""The variable that tells a rank to look after those that other processes have started."""
PORT = 29500
"""Where pods meet, each of which has an address of its own."""
_PORTS = range(15000, 30000)
"""Where steps of Slurm meet, by the number of the job: below the ports that systems hand out by themselves."""


@dataclass(frozen=True)
class Found:
    """This process among those that a launcher has started.

    Attributes:
        by: The launcher.
        counted_by: The variable that says how many there are, for messages.
        index: Which this is.
        count: How many there are, 2 or more; of torchrun's, 1 or more.
        local_index, local_count: The same among those of this machine.
        address: Where the first of them can be reached.
        port: The port at which it waits for the others.
        may_divide: Whether a process may start several ranks: it has its machine, or its pod, to itself.
    """

    by: str
    counted_by: str
    index: int
    count: int
    local_index: int
    local_count: int
    address: str
    port: int
    may_divide: bool

    def each(self, ranks: int) -> int:
        """Return how many of `ranks` ranks each of the processes is or starts: 1 if it is a rank itself.

        Raises:
            ConfigError: they do not come out even.
        """
        each, left = divmod(ranks, self.count)
        if not left and (each == 1 or (each and self.may_divide)):
            return each
        degrees = f"the degrees make {ranks} rank{'s' if ranks > 1 else ''}"
        if not self.may_divide:
            raise ConfigError(
                f"{self.counted_by} is {self.count}, and {degrees}: start {ranks} processes by {self.by}, or change "
                "the degrees"
            )
        raise ConfigError(
            f"{self.counted_by} is {self.count}, and {degrees}, which so many cannot share evenly: change one of them"
        )

    def variables(self) -> dict[str, str]:
        """Return what torchrun would have set for this process, if it is a rank."""
        local = {"LOCAL_RANK": str(self.local_index), "LOCAL_WORLD_SIZE": str(self.local_count)}
        return self.of_local(0, 1) | local

    def of_local(self, local: int, ranks: int) -> dict[str, str]:
        """Return what it would have set for one of `ranks` ranks that this process starts, each of them as many."""
        return {
            "RANK": str(self.index * ranks + local),
            "WORLD_SIZE": str(self.count * ranks),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": LOOPBACK if self.index == 0 else self.address,  # its own name may lead elsewhere
            "MASTER_PORT": str(self.port),
            TETHER: "1",
        }


def found(environment: Mapping[str, str] = os.environ) -> Found | None:
    """Return which process this is of a job of several; None if it was started by itself, or by our own launcher.

    Raises:
        ConfigError: variables that a launcher sets are missing, or contradict each other.
    """
    if "SHARDWISE_LAUNCHER" in environment:
        return None
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _torchrun(environment)
    for look in (_slurm, _leader_worker_set, _job_set):
        process = look(environment)
        if process is not None:
            return process if process.count > 1 else None
    return None


def _torchrun(environment: Mapping[str, str]) -> Found:
    read = _Reader(TORCHRUN, environment)
    index, count = read.place("RANK", "WORLD_SIZE")
    local_count = read.number("LOCAL_WORLD_SIZE", default=count)
    local = read.number("LOCAL_RANK", default=index % max(local_count, 1))
    address, port = (
        read.text("MASTER_ADDR"),
        read.number("MASTER_PORT", default=None),
    )
    return Found(TORCHRUN, "WORLD_SIZE", index, count, local, local_count, address, port, False)


def _slurm(environment: Mapping[str, str]) -> Found | None:
    """Return the task of a step. The shell of `srun --pty` is none, whatever else it is told."""
    if "SLURM_STEP_NUM_TASKS" not in environment or "SLURM_PTY_PORT" in environment:
        return None
    read = _Reader("srun", environment)
    if read.number("SLURM_STEP_NUM_TASKS") == 1:
        return None
    index, count = read.place("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    nodes = read.number("SLURM_STEP_NUM_NODES")
    local = read.number("SLURM_LOCALID")
    on_node = _tasks_by_node(read.text("SLURM_STEP_TASKS_PER_NODE"))
    if len(on_node) != nodes or sum(on_node) != count:
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE is {environment['SLURM_STEP_TASKS_PER_NODE']!r}, which is not "
            f"SLURM_STEP_NUM_TASKS={count} tasks on SLURM_STEP_NUM_NODES={nodes} nodes: are they of another step? "
            "Start the command by srun itself, or unset SLURM_STEP_NUM_TASKS to start ranks on this machine"
        )
    node = read.number("SLURM_NODEID")
    if node >= nodes or local >= on_node[node]:
        raise ConfigError(
            f"SLURM_NODEID={node} and SLURM_LOCALID={local} are no place in SLURM_STEP_TASKS_PER_NODE="
            f"{environment['SLURM_STEP_TASKS_PER_NODE']}: start the command by srun itself"
        )
    first = _first_host(read.text("SLURM_STEP_NODELIST")) if nodes > 1 else LOOPBACK
    step = read.number("SLURM_JOB_ID") * 31 + read.number("SLURM_STEP_ID")
    port = read.number("MASTER_PORT", default=_PORTS[step % len(_PORTS)])
    address = environment.get("MASTER_ADDR", first)
    alone = nodes == count
    return Found(
        "srun", "SLURM_STEP_NUM_TASKS", index, count, local, on_node[node], address, port, may_divide=alone
    )


def _leader_worker_set(environment: Mapping[str, str]) -> Found | None:
    if "LWS_GROUP_SIZE" not in environment:
        return None
    read = _Reader("LeaderWorkerSet", environment)
    index, count = read.place("LWS_WORKER_INDEX", "LWS_GROUP_SIZE")
    address = environment.get("MASTER_ADDR") or read.text("LWS_LEADER_ADDRESS")
    port = read.number("MASTER_PORT", default=PORT)
    return Found("LeaderWorkerSet", "LWS_GROUP_SIZE", index, count, 0, 1, address, port, may_divide=True)


def _job_set(environment: Mapping[str, str]) -> Found | None:
    """Return the pod of a JobSet. An indexed Job by itself is none: its pods may work each for itself."""
    if "JOB_COMPLETION_INDEX" not in environment or "JOBSET_NAME" not in environment:
        return None
    read = _Reader("JobSet", environment)
    count, jobs = read.number("NNODES"), read.number("REPLICATED_JOB_REPLICAS", default=1)
    if jobs < 1 or count % jobs:
        raise ConfigError(
            f"NNODES is {count}, and REPLICATED_JOB_REPLICAS {jobs} does not divide it: NNODES is the number of all "
            "pods, replicas x completions of the manifest"
        )
    index = read.number("JOB_INDEX", default=0) * (count // jobs) + read.number("JOB_COMPLETION_INDEX")
    if index >= count:
        raise ConfigError(
            f"JOB_COMPLETION_INDEX={environment['JOB_COMPLETION_INDEX']} makes this pod number {index}, and NNODES is "
            f"{count}: set NNODES to the number of all pods, replicas x completions of the manifest"
        )
    address = environment.get("MASTER_ADDR")
    if not address:
        name = read.text("JOBSET_NAME")
        domain = environment.get("JOBSET_SUBDOMAIN") or name
        address = f"{name}-{read.text('REPLICATED_JOB_NAME')}-0-0.{domain}"
    port = read.number("MASTER_PORT", default=PORT)
    return Found("JobSet", "NNODES", index, count, 0, 1, address, port, may_divide=True)


_MENDS = {
    "MASTER_ADDR": "set it to the name or address of the machine of rank 0",
    "MASTER_PORT": "set it to a free port of the machine of rank 0",
    "LWS_WORKER_INDEX": (
        "LeaderWorkerSet sets it since 0.6.0; before, take it from the label "
        "leaderworkerset.sigs.k8s.io/worker-index by the downward API"
    ),
    "NNODES": "set it to the number of all pods, replicas x completions of the manifest; 1 if each works for itself",
    "REPLICATED_JOB_NAME": (
        "take it from the label jobset.sigs.k8s.io/replicatedjob-name by the downward API, or set MASTER_ADDR"
    ),
}


@dataclass(frozen=True)
class _Reader:
    """Variables of one launcher, of which each that is wrong is named with what would mend it."""

    by: str
    environment: Mapping[str, str]

    def text(self, name: str) -> str:
        value = self.environment.get(name, "")
        if not value:
            raise ConfigError(
                f"{name} is not set, and {self.by} has started this process as one of several: {self._mend(name)}"
            )
        return value

    def number(self, name: str, default: int | None = None) -> int:
        if default is not None and not self.environment.get(name):
            return default
        value = self.text(name)
        if not (value.isascii() and value.isdecimal()):
            raise ConfigError(f"{name} is {value!r}, which is no number: {self._mend(name)}")
        return int(value)

    def place(self, index: str, count: str) -> tuple[int, int]:
        this, all_of_them = self.number(index), self.number(count)
        if this >= all_of_them:
            raise ConfigError(
                f"{index} is {this}, and {count} is {all_of_them}: they are counted from 0; {self._mend(index)}"
            )
        return this, all_of_them

    def _mend(self, name: str) -> str:
        return _MENDS.get(name, f"start the command by {self.by} itself, which sets it")


def _tasks_by_node(text: str) -> list[int]:
    """Return the numbers that Slurm writes as `2(x3),1`: 2, 2, 2, 1; none if it is something else."""
    counts = []
    for part in text.split(","):
        known = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if known is None:
            return []
        counts += [int(known[1])] * int(known[2] or 1)
    return counts


def _first_host(nodes: str) -> str:
    """Return the first of hosts that Slurm writes as `gpu[07-09,12],login1`: gpu07."""
    host = re.match(r"[^\[,]+", nodes)
    if host is None:
        raise ConfigError(
            f"SLURM_STEP_NODELIST is {nodes!r}, which names no host: set MASTER_ADDR to that of task 0"
        )
    name, rest = host[0], nodes[host.end() :]
    while inside := re.match(r"\[(\d+)[^\]]*\]([^\[,]*)", rest):
        name, rest = name + inside[1] + inside[2], rest[inside.end() :]
    return name
