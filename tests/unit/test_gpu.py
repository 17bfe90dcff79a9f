"""`make gpu` on a machine without a GPU: one line and a code of its own, and what it would do elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools import gpu

from shardwise.bench.gauges import require_devices
from shardwise.cli import main
from shardwise.errors import UnsupportedOption

ROOT = Path(__file__).parents[2]


def run(*options: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    variables = os.environ | ({"PATH": str(path)} if path is not None else {})
    command = [sys.executable, "-m", "tools.gpu", *options]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)


def test_machine_without_a_device_is_told_so_before_anything_is_installed(tmp_path: Path) -> None:
    result = run(path=tmp_path)
    assert (result.returncode, result.stdout) == (gpu.NO_DEVICE, "")
    assert result.stderr == "make gpu needs a CUDA device, and nvidia-smi finds none; nothing was installed\n"
    assert not (ROOT / gpu.VENV).exists()


@pytest.mark.parametrize(("options", "kind", "needed"), [((), "gpu", "2"), (("--share",), "gpu-shared", "1")])
def test_dry_run_says_what_would_be_done(options: tuple[str, ...], kind: str, needed: str) -> None:
    result = run("--dry-run", *options)
    assert result.returncode == 0
    assert "pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0" in result.stdout
    assert f"' {needed}\n" in result.stdout
    assert "SHARDWISE_TEST_DEVICE=cuda" in result.stdout
    assert ("SHARDWISE_TEST_SHARE=1" in result.stdout) == bool(options)
    assert f"benchmarks/results/{kind}-load-2-ranks.json" in result.stdout
    assert f"benchmarks/results/{kind}-step-2-ranks.json" in result.stdout


def test_step_that_fails_ends_all_with_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [
        gpu.Step("write", ["touch", "one"]),
        gpu.Step("fail", ["false"]),
        gpu.Step("go on", ["touch", "two"]),
    ]
    monkeypatch.setattr(gpu, "steps", lambda ranks, share: made)
    monkeypatch.setattr(gpu, "has_devices", lambda: True)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 1
    assert [file.name for file in tmp_path.iterdir()] == ["one"]


def test_options_of_the_benchmark_exist() -> None:
    bench = main.commands["bench"].commands  # type: ignore[attr-defined]
    for step in gpu.steps(2, share=False)[-2:]:
        command = bench[step.command[2]]
        known = {name for option in command.params for name in option.opts}
        assert {word for word in step.command if word.startswith("--")} <= known


def test_torch_is_that_of_the_other_environment() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert set(re.findall(r"torch==[\d.]+", makefile)) == {gpu.TORCH}


def test_benchmark_on_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(UnsupportedOption, match="finds no xpu device"):
        require_devices("xpu")
    require_devices("cpu")
