"""What is installed: the command, the version, and a wheel that carries the embedded model."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

from click.testing import CliRunner

import shardwise
from shardwise.cli import main

ROOT = Path(__file__).parents[2]


def test_version_of_the_command_is_that_of_the_package() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"shardwise, version {shardwise.__version__}"


def test_demo_refuses_a_degree_of_zero() -> None:
    result = CliRunner().invoke(main, ["demo", "--tp", "0"])
    assert result.exit_code == 2
    assert "--tp" in result.output


def test_embedded_model_is_where_the_package_says() -> None:
    folder = shardwise.demo_model_path()
    assert (folder / "model_index.json").is_file()
    assert (folder / "transformer" / "diffusion_pytorch_model.safetensors").stat().st_size > 6_000_000


def test_wheel_carries_the_model_and_the_types(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    source = ROOT / "src"
    here = {p.relative_to(source).as_posix() for p in (source / "shardwise").rglob("*") if p.is_file()}
    assert {name for name in here if "__pycache__" not in name} <= packed
    assert "shardwise/py.typed" in packed
    assert not [name for name in packed if name.startswith(("tests/", "tools/"))]


def test_import_of_the_package_does_not_import_diffusers() -> None:
    code = "import sys, shardwise; sys.exit('diffusers' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_make_test_runs_every_file_of_tests_once() -> None:
    named = re.findall(r"pytest (tests/[^\s;]+)", (ROOT / "Makefile").read_text("utf-8"))
    found = [path for name in named for path in ROOT.glob(name if "*" in name else f"{name}/**/test_*.py")]
    assert sorted(found) == sorted((ROOT / "tests").rglob("test_*.py"))
