"""The embedded model, drawn by one process and by ranks: the same pictures, and they show what the captions say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from diffusers import DiffusionPipeline
from PIL import Image
from tools.draw_docs_pictures import draw_with_plain_parts

from shardwise import TensorParallelConfig, demo_model_path, placement
from shardwise.cli import main
from shardwise.demo import CALL
from shardwise.demo.run import PROMPTS, draw_one_process, draw_sharded
from shardwise.demo.world import caption, judge, parse_caption, sample_scene
from shardwise.models import Flux2Transformer2DModel
from shardwise.runtime.shard import sharding_of
from tests import tolerances
from tests.pool import Pool

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def steps_of_255(a: np.ndarray, b: np.ndarray) -> int:
    return int(np.abs((a * 255).round() - (b * 255).round()).max())


def right_share(pixels: np.ndarray, captions: list[str]) -> float:
    pictures = [Image.fromarray((p * 255).round().astype("uint8")) for p in pixels]
    verdicts = [judge(p, parse_caption(c)).right for p, c in zip(pictures, captions, strict=True)]
    return sum(verdicts) / len(verdicts)


@pytest.fixture(scope="module")
def sheet() -> np.ndarray:
    """The demo's pictures as one process draws them."""
    return draw_one_process().pixels


def test_sheet_of_one_process_shows_what_the_captions_say(sheet: np.ndarray) -> None:
    assert right_share(sheet, list(PROMPTS)) == 1.0


def test_ranks_draw_the_same_pictures(ranks: Pool, sheet: np.ndarray) -> None:
    for drawn in ranks.run(draw_sharded, ranks.size):
        assert steps_of_255(drawn.pixels, sheet) <= tolerances.PIXEL
        # Two passes a step; 2 double blocks, 3 single blocks, 6 lone projections.
        assert drawn.all_reduces == 2 * (2 * 4 + 3 + 6)


def test_fused_projections_in_plain_parts_draw_noise_without_any_error(
    two_ranks: Pool, sheet: np.ndarray
) -> None:
    for drawn in two_ranks.run(draw_with_plain_parts):
        assert steps_of_255(drawn.pixels, sheet) > 100
        assert right_share(drawn.pixels, list(PROMPTS)) < 0.1


# --- accuracy ----------------------------------------------------------------------------------------------------

SCENES = [sample_scene(rng) for rng in [Random(2024)] for _ in range(40)]
CAPTIONS = [caption(scene) for scene in SCENES]


def _draw_captions(tp_degree: int) -> np.ndarray:
    """Draw the 40 captions, each from the noise of its own seed."""
    components: dict[str, Any] = {}
    if tp_degree > 1:
        config = TensorParallelConfig(tp_degree=dist.get_world_size())
        components["transformer"] = Flux2Transformer2DModel.from_pretrained(
            demo_model_path(), subfolder="transformer", parallel_config=config
        )
    pipeline = DiffusionPipeline.from_pretrained(demo_model_path(), **components)
    pipeline.set_progress_bar_config(disable=True)
    generators = [torch.Generator().manual_seed(100 + i) for i in range(len(CAPTIONS))]
    return pipeline(prompt=CAPTIONS, generator=generators, output_type="np", **CALL).images


def test_forty_captions_are_drawn_right_by_one_process_and_by_two_ranks(two_ranks: Pool) -> None:
    alone = _draw_captions(1)
    assert right_share(alone, CAPTIONS) >= tolerances.ACCURACY
    for pixels in two_ranks.run(_draw_captions, 2):
        assert right_share(pixels, CAPTIONS) >= tolerances.ACCURACY
        assert steps_of_255(pixels, alone) <= tolerances.PIXEL


# --- bytes -----------------------------------------------------------------------------------------------------------


def _weight_bytes() -> tuple[int, int, int, int]:
    config = TensorParallelConfig(tp_degree=dist.get_world_size())
    model = Flux2Transformer2DModel.from_pretrained(
        demo_model_path(), subfolder="transformer", dtype=torch.bfloat16, parallel_config=config
    )
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    report = placement(model)
    assert sharding_of(model) is not None
    return (
        report.weight_bytes,
        report.weight_bytes_one_process,
        sum(storages.values()),
        model.load_report.bytes_read,
    )


def test_weight_bytes_of_the_embedded_transformer_are_those_really_held(ranks: Pool) -> None:
    # Parameters by the configuration: inner width 192, mlp_ratio 2. Attention has 4 square projections for each
    # of two streams, each feed-forward a fused input of 2 x 384 and an output; single blocks fuse q, k, v and both.
    double = 2 * (4 * 192 * 192 + 192 * 768 + 384 * 192)
    single = 192 * (3 * 192 + 2 * 384) + (192 + 384) * 192
    # Lone: the second layer of the timestep's embedder, modulations of both streams and of single blocks, the embedder
    # of 3 x 96 text features, the last modulation.
    lone = 192 * (192 + 2 * 6 * 192 + 3 * 192 + 3 * 96 + 2 * 192)
    planned, whole = (2 * double + 3 * single + lone) * 2, 3_318_096 * 2  # bytes, in bf16
    held = planned // ranks.size + whole - planned
    assert ranks.run(_weight_bytes) == [(held, whole, held, held)] * ranks.size


# --- what a user runs ----------------------------------------------------------------------------------------------


def run(*command: str | Path, cwd: Path) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("tp", [1, 2])  # four ranks draw the same pictures: above
def test_demo_command_writes_sheet_and_report(tmp_path: Path, tp: int) -> None:
    command = ["demo", "--tp", str(tp), "--out", str(tmp_path / "out")]
    if tp > 1:
        printed = run(BIN / "shardwise", *command, cwd=tmp_path)
    else:  # nothing is started but the process itself
        printed = CliRunner().invoke(main, command, catch_exceptions=False).output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["tp_degree"] == tp
    assert report["max_pixel_difference"] <= tolerances.PIXEL
    assert len(report["weight_bytes_per_rank"]) == len(report["bytes_read_per_rank"]) == tp
    assert report["weight_bytes_one_process"] == 3_318_096 * 4
    assert report["all_reduces_per_step"] == (34 if tp > 1 else 0)
    assert report["seconds"] > 0
    for name in ("sheet.png", "sheet-one-process.png"):
        with Image.open(tmp_path / "out" / name) as picture:
            assert picture.size[0] > 600
    assert f"{report['weight_bytes_per_rank'][0]:,}" in printed
    assert "largest pixel difference" in printed


def test_L5_script_of_the_contract_runs_under_torchrun(tmp_path: Path) -> None:
    script = ROOT / "examples" / "tensor_parallel_flux2.py"
    options = ["--model", demo_model_path(), "--backend", "gloo", "--device", "cpu"]
    run(BIN / "torchrun", "--nproc-per-node", "2", script, *options, cwd=tmp_path)
    with Image.open(tmp_path / "output.png") as picture:
        assert judge(picture, parse_caption("a red circle beside a blue square on a white background")).right
