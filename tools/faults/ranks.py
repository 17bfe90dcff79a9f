"""A rank that is lost on one machine, in every phase and every way."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.faults import PHASES

from shardwise.demo import CALL

ROOT = Path(__file__).parents[2]
PATIENCE = 10
LIMIT = 120
"""Seconds after which a job is taken for one that hangs."""
WAYS = ("is killed", "is stopped", "raises", "exits with 0")

Row = dict[str, Any]


def command(out: Path, *others: str, model: str = "embedded") -> list[str]:
    """Return a command that draws, with a fault if the environment describes one."""
    patience = ["--timeout", str(PATIENCE), "--load-timeout", str(PATIENCE)]
    if model != "embedded":
        patience += [
            "--arguments",
            json.dumps({name: CALL[name] for name in CALL if name != "num_inference_steps"}),
        ]
    return [
        *(sys.executable, "-m", "tools.faults.worker", model, "--prompt", "a red circle"),
        *("--tp", "2", "--steps", "4", "--device", "cpu", "--out", str(out), *patience, *others),
    ]


def environment(rank: int, phase: str, act: str, stamp: Path) -> dict[str, str]:
    """Return the environment that describes a fault."""
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    described = "|".join((str(rank), phase, act, str(stamp)))
    return {**os.environ, "FAULT": described, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def seconds_since(stamp: Path, end: float) -> float | None:
    """Return how long after the fault something was, None if there was no fault."""
    return round(end - float(stamp.read_text()), 1) if stamp.exists() else None


def said(output: str) -> str:
    """Return what a command said of its end."""
    found = re.findall(r"^Error: (.*)", output, re.M)
    return found[-1] if found else ""


def rank_faults() -> Iterator[Row]:
    """Yield what came of each fault."""
    for phase in PHASES:
        for way in WAYS:
            for rank in (0, 1):
                yield {"phase": phase, "way": way, "rank": rank, **_one(rank, phase, way)}


def run(command: Sequence[str], env: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a job until it ends, or is ended because it hangs: then its exit code is -9."""
    job = subprocess.Popen(
        command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, errors = job.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        job.kill()
        out, errors = job.communicate()
    return subprocess.CompletedProcess(command, job.returncode, out, errors)


def _one(rank: int, phase: str, way: str) -> Row:
    with TemporaryDirectory() as name:
        folder, stamp = Path(name), Path(name) / "stamp"
        done = run(command(folder / "out"), environment(rank, phase, way, stamp), folder)
        end = time.time()
        files = sorted(file.name for file in (folder / "out").glob("*")) if (folder / "out").exists() else []
        return {
            "exit": done.returncode,
            "seconds": seconds_since(stamp, end),
            "said": said(done.stderr),
            "left": len(_of(stamp)),
            "files": files,
        }


def _of(stamp: Path) -> list[int]:
    """Return the processes that still belong to a job."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if str(stamp).encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # gone, or a zombie
            continue
    return found
