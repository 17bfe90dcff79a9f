"""What `make gpu` does on a machine with CUDA devices: sets up, tests the ranks there, measures, writes the figures.

    python -m tools.gpu [--ranks N] [--share] [--dry-run]

Needs the standard library alone: whatever else there is, it installs, into a virtual environment of its own. Ends with
code 2, before anything is downloaded, where there is no device; with the code of a step that fails; else with 0.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
VENV = ".venv-gpu"
PYTHON = f"{VENV}/bin/python"
TORCH = "torch==2.13.0"
"""From the ordinary package index, whose build for Linux is one for CUDA."""

NO_DEVICE = 2
CHECK = """\
import sys, torch
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no device: see nvidia-smi for the driver's")
there, needed = torch.cuda.device_count(), int(sys.argv[1])
print(*(torch.cuda.get_device_properties(i) for i in range(there)), sep="\\n")
if there < needed:
    sys.exit(f"there are {there} devices for {needed} ranks with one each: make gpu GPU_SHARE=1 has them share")
"""


@dataclass(frozen=True)
class Step:
    """A command, what it is for, and the variables that it is given."""

    title: str
    command: list[str]
    variables: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        given = [f"{name}={value}" for name, value in self.variables.items()]
        return " ".join([*given, shlex.join(self.command)])


def steps(ranks: int, share: bool) -> list[Step]:
    """Return all that is to be done, in order.

    Args:
        ranks: How many ranks are measured.
        share: Whether ranks share devices, and meet by gloo: one device is enough. Of time that says nothing.
    """
    install = [
        PYTHON,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        "constraints.txt",
    ]
    device = {"SHARDWISE_TEST_DEVICE": "cuda"} | ({"SHARDWISE_TEST_SHARE": "1"} if share else {})
    kind = "gpu-shared" if share else "gpu"
    found = [
        Step("make an environment", [sys.executable, "-m", "venv", VENV]),
        Step("install torch", [*install, TORCH]),
        Step("install what the tests need", [*install, "--editable", ".[dev,quantize,video]"]),
        Step("look for devices", [PYTHON, "-c", CHECK, "1" if share else str(ranks)]),
        Step("test", [PYTHON, "-m", "pytest", "-m", "any_device", "tests/distributed"], device),
    ]
    for name in ("load", "step"):
        file = f"benchmarks/results/{kind}-{name}-{ranks}-ranks.json"
        bench = [
            f"{VENV}/bin/shardwise",
            "bench",
            name,
            "--device",
            "cuda",
            "--ranks",
            str(ranks),
            "--json",
            file,
        ]
        found.append(Step(f"measure: {name}", bench))
    return found


def has_devices() -> bool:
    """Return whether this machine has CUDA devices, by its driver."""
    command = shutil.which("nvidia-smi")
    return command is not None and subprocess.run([command, "-L"], capture_output=True).returncode == 0


def main() -> int:
    """Do the steps, or say them; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu", description="Test and measure on CUDA devices."
    )
    parser.add_argument("--ranks", type=int, default=2, help="how many ranks are measured (default: 2)")
    parser.add_argument("--share", action="store_true", help="let ranks share devices: one is enough")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    options = parser.parse_args()
    planned = steps(options.ranks, options.share)
    if options.dry_run:
        print("\n".join(f"# {step.title}\n{step}" for step in planned))
        return 0
    if not has_devices():
        print(
            "make gpu needs a CUDA device, and nvidia-smi finds none; nothing was installed", file=sys.stderr
        )
        return NO_DEVICE
    for step in planned:
        print(f"# {step.title}", flush=True)
        code = subprocess.run(step.command, cwd=ROOT, env=os.environ | step.variables).returncode
        if code != 0:
            print(f"make gpu: failed to {step.title} (code {code})", file=sys.stderr)
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
