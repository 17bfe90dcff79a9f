"""What is refused before any rank is started: by a command that exits with 2, in words that say what to do."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from shardwise import models
from shardwise.checkpoint.adapters import check_factors
from shardwise.cli import main
from shardwise.errors import CheckpointError, ConfigError
from shardwise.generate import command
from shardwise.generate.preflight import arguments_of
from shardwise.generate.request import OURS
from shardwise.launch import machine
from shardwise.plan.resolve import fitting_degrees
from tests.helpers import tiny_skeleton
from tests.whole_pipelines import embedded_copy


def refused(*options: str, model: str = "embedded") -> str:
    """Return what the command says that refuses; nothing may be started."""
    with mock.patch.object(command, "run_ranks", side_effect=AssertionError("ranks were started")):
        done = CliRunner().invoke(main, ["generate", model, "--prompt", "a", *options])
    assert done.exit_code == 2, done.output
    return done.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tp", "99999999"], "99999999 ranks on the"),
        (["--cfg", "100000", "--dp", "100000"], "10000000000 ranks on the"),
        (["--tp", "9" * 5000], "neither a number of ranks"),
        (["--cfg", "9" * 5000], "Invalid value for '--cfg'"),
        (["--tp", "3"], "the transformer has 8 attention heads, which 3 ranks cannot share; use one of 1, 2, 4, 8"),
        (["--tp", "2", "--ulysses", "3"], "--tp 2 --ulysses 3: the transformer has 8 attention heads"),
        (["--timeout", "nan"], "nan is not a finite number"),
        (["--timeout", "1e300"], "Invalid value for '--timeout'"),
        (["--load-timeout", "inf"], "Invalid value for '--load-timeout'"),
        (["--guidance", "inf"], "inf is not a finite number"),
        (["--arguments", "[" * 100_000], "not valid JSON"),
        (["--arguments", '{"strenth": 1}'], "Flux2KleinPipeline takes no strenth; it takes attention_kwargs"),
        (["--arguments", '{"num_images_per_prompt": 2}'], "num_images_per_prompt follows from other options"),
        (["--num-images", "99999999999"], "Invalid value for '--num-images'"),
        (["--size", "999999x2"], "is not a width and a height"),
        (["--components", "transformer,vea"], "vea is no component of this pipeline; it has scheduler, text_encoder"),
        (["--lora", "./nothing.safetensors"], "there is no such file"),
    ],
)  # fmt: skip
def test_request_that_cannot_be_meant_starts_nothing(options: list[str], says: str) -> None:
    with mock.patch.object(machine, "cores", return_value=2):
        assert says in refused(*options)


def test_mistyped_degree_is_refused_in_a_moment_and_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; from shardwise.cli import main\n"
        "def start(*args, **kwargs): raise AssertionError('a process was started')\n"
        "subprocess.Popen = start\n"
        "try: main(['generate', 'embedded', '--prompt', 'a', '--tp', '99999999'])\n"
        "finally: assert not {'torch', 'diffusers'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert not list(tmp_path.iterdir())


def test_more_ranks_than_cores_are_started_on_request() -> None:
    with (
        mock.patch.object(machine, "cores", return_value=1),
        mock.patch.object(command, "run_ranks", return_value=[["file"]]) as run,
    ):
        options = ["generate", "embedded", "--prompt", "a", "--tp", "8", "--device", "cpu"]
        assert CliRunner().invoke(main, options).exit_code == 2
        assert CliRunner().invoke(main, [*options, "--oversubscribe"]).exit_code == 0
    assert run.call_args.kwargs["oversubscribe"]


@pytest.mark.parametrize(
    ("gpus", "visible", "device", "fits"),
    [(4, None, None, True), (4, None, "cuda", True), (2, None, "cuda", False), (4, "0,1", "cuda", False),
     (4, "0,1,-1,3", "cuda", False), (4, "2,3,0,1", "cuda", True), (None, None, "cuda", True)],
)  # fmt: skip
def test_ranks_are_held_against_the_devices_that_are_visible(
    tmp_path: Path, monkeypatch: Any, gpus: int | None, visible: str | None, device: str | None, fits: bool
) -> None:  # fmt: skip
    monkeypatch.setattr(machine, "_NVIDIA", tmp_path / "gpus")
    monkeypatch.setattr(machine, "cores", lambda: 64)
    for number in range(gpus or 0):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    refusal = nullcontext() if fits else pytest.raises(ConfigError, match="4 ranks need a CUDA device each")
    with refusal:
        machine.require_room(4, device)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "its JSON is not an object"),
        ("null", "its JSON is not an object"),
        ("{}", "names no pipeline"),
        ('{"_class_name": ["A"]}', "names no pipeline"),
        ('{"_class_name": "A", "_class_name": "B"}', "is given twice"),
        ('{"a": ' * 50_000, "nested too deeply"),
        ("{", "invalid JSON"),
    ],
)
def test_index_that_is_none_is_refused(tmp_path: Path, text: str, says: str) -> None:
    folder = embedded_copy(tmp_path / "m")
    (folder / "model_index.json").write_text(text)
    assert says in refused(model=str(folder))


def test_folder_that_is_not_there_or_no_pipeline_s_is_refused(tmp_path: Path) -> None:
    assert "there is no such folder" in refused(model=str(tmp_path / "nothing"))
    assert "it has no model_index.json" in refused(model=str(tmp_path))


def test_infinite_numbers_of_a_scheduler_are_no_fault(tmp_path: Path) -> None:
    folder = embedded_copy(tmp_path / "m")
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"least": -float("inf")}))
    assert "there is no such file" in refused("--lora", "./nothing.safetensors", model=str(folder))
    with mock.patch.object(command, "run_ranks", return_value=[["file"]]):
        done = CliRunner().invoke(main, ["generate", str(folder), "--prompt", "a", "--device", "cpu"])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ([], "has no tensors"),
        (["a.lora_B.weight"], "has a.lora_B.weight and no a.lora_A.weight"),
        (["a.lora_A.default.weight", "b.alpha"], "and no a.lora_B.default.weight"),
        (["lora_unet_a.lora_down.weight"], "and no lora_unet_a.lora_up.weight"),
        (["a.to_q_lora.up.weight"], "and no a.to_q_lora.down.weight"),
    ],
)
def test_adapter_without_its_other_half_is_refused(names: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says):
        check_factors(names, "x")
    file = tmp_path / "x.safetensors"
    save_file({name: torch.ones(1) for name in names}, file)
    assert says in refused("--lora", str(file))


def test_adapter_of_whole_pairs_is_taken() -> None:
    check_factors(
        ["a.lora_A.weight", "a.lora_B.weight", "b.lora_up.weight", "b.lora_down.weight", "b.alpha"], "x"
    )
    check_factors(["a.lora_A.weight", "a.lora_B.weight", "a.lora_B.bias"], "x")  # that has no partner


@pytest.mark.parametrize(
    "name", ["FluxPipeline", "Flux2KleinPipeline", "QwenImageEditPipeline", "WanImageToVideoPipeline"]
)
def test_arguments_are_read_from_the_source_as_the_class_has_them(name: str) -> None:
    taken = inspect.signature(getattr(diffusers, name).__call__).parameters.keys()
    assert arguments_of(name) == taken - OURS - {"self"}


def test_pipeline_that_is_not_known_is_left_to_the_ranks() -> None:
    assert arguments_of("NoPipelineOfDiffusers") is None


def test_degree_that_does_not_divide_the_heads_of_a_configuration_never_fits() -> None:
    # Else the command would refuse what the ranks could do.
    seen, wrong = 0, []
    for name in models.FAMILIES:
        model: Any = tiny_skeleton(name)
        heads = model.config.get("num_attention_heads")
        if isinstance(heads, int):
            seen += 1
            wrong += [f"{name} at {d}" for d in fitting_degrees(model, model._tp_plan) if heads % d]
    assert wrong == []
    assert seen > 30
