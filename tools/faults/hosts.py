"""A rank, a host or a link that is lost among several hosts, under torchrun."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests import hosts
from tests.hosts import Host
from tests.whole_pipelines import embedded_copy
from tools.faults.ranks import LIMIT, Row, command, environment, said, seconds_since

PHASES = ("reading", "denoising", "decoding", "writing")
WAYS = {"rank": "is killed", "host": "host", "link": "link"}


def host_faults() -> Iterator[Row]:
    """Yield what came of each fault on two hosts, and of some on four; first of none."""
    for count in (2, 4):
        yield {"hosts": count, "lost": "nothing", "phase": "", **_one(count, "none", "is killed")}
    for phase in PHASES:
        for lost, act in WAYS.items():
            yield {"hosts": 2, "lost": lost, "phase": phase, **_one(2, phase, act)}
    for lost, act in WAYS.items():
        yield {"hosts": 4, "lost": lost, "phase": "denoising", **_one(4, "denoising", act)}


def _one(count: int, phase: str, act: str) -> Row:
    with TemporaryDirectory() as name:
        folder = Path(name)
        for shared in ("model", "out"):
            (folder / shared).mkdir()
        with hosts.hosts(count, folder, partial(_own, folder)) as made:
            return _run(made, folder, phase, act)


def _own(folder: Path, number: int) -> Mapping[Path, Path]:
    """Return what a host has of its own: a copy of the model, which nobody else reads, and a folder for pictures."""
    own = folder / f"host-{number}"
    embedded_copy(own / "model")
    (own / "out").mkdir()
    return {folder / "model": own / "model", folder / "out": own / "out"}


def _run(made: list[Host], folder: Path, phase: str, act: str) -> Row:
    last, stamp, logs = len(made) - 1, folder / "stamp", [folder / f"log-{i}" for i in range(len(made))]
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(made)), "--nproc-per-node", "1"),
        *(
            "--rdzv-backend",
            "c10d",
            "--rdzv-id",
            "faults",
            "--rdzv-endpoint",
            f"{made[0].address}:29400",
            "-m",
        ),
    ]
    ranks = ("--cfg", str(len(made) // 2))
    env = environment(last, phase, act, stamp)
    agents = []
    for host, log in zip(made, logs, strict=True):
        with log.open("w") as output:
            agents.append(
                host.start(
                    [*torchrun, *command(folder / "out", *ranks, model=str(folder / "model"))[2:]],
                    env=env,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    ended = _ends(made, agents)
    return {
        "exit": [agent.poll() for agent in agents],
        "seconds": [seconds_since(stamp, at) if at is not None else None for at in ended],
        "said": [said(log.read_text()) for log in logs],
        "files": [sorted(f.name for f in (folder / f"host-{i}" / "out").iterdir()) for i in range(len(made))],
    }


def _ends(made: list[Host], agents: list[Any]) -> list[float | None]:
    """Return when all processes of each host had ended; None where some had not when the limit came."""
    ended: list[float | None] = [None] * len(made)
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and None in ended:
        for number, (host, agent) in enumerate(zip(made, agents, strict=True)):
            if ended[number] is None and agent.poll() is not None and not host.processes():
                ended[number] = time.time()
        time.sleep(0.2)
    return ended
