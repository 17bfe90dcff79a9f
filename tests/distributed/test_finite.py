"""Numbers that are not finite: an error that says where they began, on every rank, in place of a black picture."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shardwise import DiffusionPipeline, ParallelConfig, demo_model_path
from shardwise.demo import CALL
from tests.faults import outcome
from tests.pool import Pool
from tests.whole_pipelines import embedded_copy


def _broken(folder: Path, component: str, change: Callable[[dict[str, Any]], None]) -> None:
    (file,) = (folder / component).glob("*.safetensors")
    with safe_open(file, "pt") as stream:
        metadata = stream.metadata()
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata)


def _no_numbers(tensors: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        if (
            tensor.is_floating_point() and "running" not in name
        ):  # what latents are normed by comes before the VAE
            tensors[name] = torch.full_like(tensor, float("nan"))


def _drawn(folder: Path, tp: int, watched: bool, **call: Any) -> str:
    def draw() -> Any:
        pipeline = DiffusionPipeline.from_pretrained(folder, parallel_config=ParallelConfig(tp=tp))
        pipeline.set_progress_bar_config(disable=True)
        steps = {"num_inference_steps": 3, "generator": torch.Generator().manual_seed(1)}
        return np.asarray(pipeline(prompt="a red circle", **{**CALL, **steps, **call}).images[0]).max()

    if watched:
        return outcome(draw)[0]
    with mock.patch("shardwise.pipeline.load.watch_finite"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns of what it casts
        return outcome(draw)[0]


@pytest.mark.parametrize(
    ("component", "says"),
    [
        ("text_encoder", "what the text_encoder returned is not finite"),
        ("transformer", "what the denoiser returned in step 1 is not finite"),
        ("vae", "what the vae decoded is not finite"),
    ],
)
def test_component_whose_weights_are_no_numbers_is_named_on_every_rank(
    two_ranks: Pool, tmp_path: Path, component: str, says: str
) -> None:
    folder = embedded_copy(tmp_path / "m")
    _broken(folder, component, _no_numbers)
    for said in two_ranks.run(_drawn, folder, 2, True):
        assert said.startswith(f"NotFinite: no picture: {says}")
    for said in two_ranks.run(_drawn, folder, 2, False):
        assert said == "0"  # the negative control: a black picture


def _late(folder: Path, step: int) -> str:
    pipeline = DiffusionPipeline.from_pretrained(folder, parallel_config=ParallelConfig(tp=2))
    pipeline.set_progress_bar_config(disable=True)

    def spoil(pipeline: Any, index: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
        return {"latents": values["latents"] * float("inf")} if index == step else {}

    call = {**CALL, "num_inference_steps": 5, "callback_on_step_end": spoil}
    first, _ = outcome(lambda: pipeline(prompt="a", generator=torch.Generator().manual_seed(1), **call))
    call["callback_on_step_end"] = None
    again, _ = outcome(lambda: pipeline(prompt="a", generator=torch.Generator().manual_seed(1), **call))
    return f"{first} | {again[:30]}"


def test_step_in_which_it_began_is_named_and_the_next_call_starts_anew(
    two_ranks: Pool, tmp_path: Path
) -> None:
    folder = embedded_copy(tmp_path / "m")
    for said in two_ranks.run(_late, folder, 2):
        first, again = said.split(" | ")
        assert "what the denoiser returned in step 4 is not finite" in first
        assert not again.startswith("NotFinite")


def _integers(tensors: dict[str, Any]) -> None:
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    tensors[name] = tensors[name].to(torch.int32)


@pytest.mark.parametrize("component", ["text_encoder", "transformer"])
def test_weights_that_are_no_floats_are_refused_before_one_is_read(
    two_ranks: Pool, tmp_path: Path, component: str
) -> None:
    folder = embedded_copy(tmp_path / "m")
    _broken(folder, component, _integers)
    for said in two_ranks.run(_drawn, folder, 2, True):
        assert said.startswith("CheckpointError")
        assert "is int32 in the checkpoint, and floats in the model" in said


def _adapted(file: Path) -> tuple[str, bool]:
    pipeline = DiffusionPipeline.from_pretrained(demo_model_path(), parallel_config=ParallelConfig(tp=2))
    said, _ = outcome(lambda: pipeline.load_lora_weights(file.parent, weight_name=file.name))
    return said, any("lora" in name for name, _ in pipeline.transformer.named_modules())


@pytest.mark.parametrize("names", [[], ["lora_B"], ["lora_A"]], ids=["empty", "only B", "only A"])
def test_adapter_without_its_other_half_is_refused_on_every_rank_and_changes_nothing(
    two_ranks: Pool, tmp_path: Path, names: list[str]
) -> None:
    shapes = {"lora_A": (2, 64), "lora_B": (64, 2)}
    path = "transformer.single_transformer_blocks.0.attn.to_out"
    file = tmp_path / "x.safetensors"
    save_file({f"{path}.{name}.weight": torch.ones(shapes[name]) for name in names}, file)
    for said, changed in two_ranks.run(_adapted, file):
        assert said.startswith("CheckpointError"), said
        assert "the adapter" in said
        assert not changed
