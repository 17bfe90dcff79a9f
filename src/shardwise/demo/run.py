"""The demo job: draw a sheet on N ranks, draw it in one process, compare the two and count what it took."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import torch.distributed as dist
import transformers
from diffusers import DiffusionPipeline
from PIL import Image

from shardwise.config import TensorParallelConfig
from shardwise.demo import CALL, demo_model_path
from shardwise.demo.sheet import contact_sheet
from shardwise.launch import run_ranks
from shardwise.models.families.flux2 import Flux2Transformer2DModel
from shardwise.runtime.devices import accelerator
from shardwise.runtime.placement import placement
from shardwise.runtime.shard import sharding_of

PROMPTS = (
    "a red circle on a white background",
    "a blue square on a yellow background",
    "a green triangle on a black background",
    "a large yellow star on a blue background",
    "a small white heart on a red background",
    "an orange cross on a purple background",
    "a purple circle on the left on a green background",
    "a black square at the top on an orange background",
    "two green squares on a white background",
    "two red hearts on a black background",
    "a red circle beside a blue square on a white background",
    "a yellow star above a green cross on a purple background",
)
SEED = 7


@dataclass(frozen=True)
class Drawn:
    """What one process drew, and what it cost.

    Attributes:
        pixels: (pictures, height, width, 3), 0 to 1.
        weight_bytes: Bytes of the transformer's parameters that this process holds.
        bytes_read: Bytes of weights it read from the checkpoint.
        all_reduces: Sums over the ranks while drawing one denoising step of the whole sheet.
        device: The type of the device, such as `"cpu"`.
        load_seconds, draw_seconds: Wall time.
    """

    pixels: np.ndarray[Any, Any]
    weight_bytes: int
    bytes_read: int
    all_reduces: float
    device: str
    load_seconds: float
    draw_seconds: float


@dataclass(frozen=True)
class DemoReport:
    """What `shardwise demo` measured; the fields are the keys of `report.json`. Sizes in bytes, times in seconds."""

    tp_degree: int
    device: str
    weight_bytes_one_process: int
    weight_bytes_per_rank: list[int]
    bytes_read_one_process: int
    bytes_read_per_rank: list[int]
    all_reduces_per_step: float
    seconds: float
    """To draw the sheet on the ranks."""
    seconds_one_process: float
    load_seconds: float
    load_seconds_one_process: float
    max_pixel_difference: int
    prompts: list[str]


def run_demo(tp_degree: int, out: Path) -> DemoReport:
    """Draw the demo's sheet on `tp_degree` ranks and in one process, and write both with a report to `out`.

    Writes `sheet.png` (drawn by the ranks), `sheet-one-process.png` and `report.json`.
    """
    out.mkdir(parents=True, exist_ok=True)
    per_rank = run_ranks(draw_sharded, tp_degree, tp_degree) if tp_degree > 1 else [draw_one_process()]
    alone = draw_one_process()
    report = _compare(tp_degree, per_rank, alone)
    for name, drawn in (("sheet.png", per_rank[0]), ("sheet-one-process.png", alone)):
        contact_sheet(_pictures(drawn.pixels), PROMPTS).save(out / name)
    (out / "report.json").write_text(json.dumps(asdict(report), indent=2) + "\n", "utf-8")
    return report


def draw_one_process() -> Drawn:
    """Draw the sheet with the ordinary, whole pipeline."""
    device = accelerator() or torch.device("cpu")
    start = time.perf_counter()
    pipeline = _load_pipeline().to(device)
    return draw(pipeline, time.perf_counter() - start)


def draw_sharded(tp_degree: int) -> Drawn:
    """Draw the sheet with the transformer sharded over the ranks of the process group."""
    start = time.perf_counter()
    transformer = Flux2Transformer2DModel.from_pretrained(
        demo_model_path(),
        subfolder="transformer",
        dtype=torch.float32,
        parallel_config=TensorParallelConfig(tp_degree=tp_degree),
    )
    pipeline = _load_pipeline(transformer=transformer)
    device = transformer.device
    pipeline.text_encoder.to(device)
    pipeline.vae.to(device)
    return draw(pipeline, time.perf_counter() - start)


@torch.inference_mode()
def draw(pipeline: Any, load_seconds: float = 0.0) -> Drawn:
    """Draw the demo's prompts with a pipeline whose transformer may be sharded."""
    pipeline.set_progress_bar_config(disable=not _is_first_rank(), desc=f"drawing {len(PROMPTS)} pictures")
    generators = [torch.Generator().manual_seed(SEED + i) for i in range(len(PROMPTS))]
    start = time.perf_counter()
    pixels = pipeline(prompt=list(PROMPTS), generator=generators, output_type="np", **CALL).images
    seconds = time.perf_counter() - start
    sharding = sharding_of(pipeline.transformer)
    held = placement(pipeline.transformer).weight_bytes
    report = getattr(pipeline.transformer, "load_report", None)
    return Drawn(
        pixels=pixels,
        weight_bytes=held,
        bytes_read=report.bytes_read if report else _file_bytes(),
        all_reduces=sharding.group.traffic.all_reduces / CALL["num_inference_steps"] if sharding else 0,
        device=pipeline.transformer.device.type,
        load_seconds=load_seconds,
        draw_seconds=seconds,
    )


def _load_pipeline(**components: Any) -> Any:
    """Load the embedded pipeline in fp32, without a progress bar for each of its five small components."""
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    try:
        return DiffusionPipeline.from_pretrained(demo_model_path(), dtype=torch.float32, **components)
    finally:
        diffusers.utils.logging.enable_progress_bar()
        transformers.utils.logging.enable_progress_bar()


def _compare(tp_degree: int, per_rank: list[Drawn], alone: Drawn) -> DemoReport:
    first = per_rank[0]
    steps = np.abs(_bytes(first.pixels).astype(int) - _bytes(alone.pixels).astype(int))
    return DemoReport(
        tp_degree=tp_degree,
        device=first.device,
        weight_bytes_one_process=alone.weight_bytes,
        weight_bytes_per_rank=[drawn.weight_bytes for drawn in per_rank],
        bytes_read_one_process=alone.bytes_read,
        bytes_read_per_rank=[drawn.bytes_read for drawn in per_rank],
        all_reduces_per_step=first.all_reduces,
        seconds=max(drawn.draw_seconds for drawn in per_rank),
        seconds_one_process=alone.draw_seconds,
        load_seconds=max(drawn.load_seconds for drawn in per_rank),
        load_seconds_one_process=alone.load_seconds,
        max_pixel_difference=int(steps.max()),
        prompts=list(PROMPTS),
    )


def _pictures(pixels: np.ndarray[Any, Any]) -> list[Image.Image]:
    return [Image.fromarray(picture) for picture in _bytes(pixels)]


def _bytes(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return pixels of 0 to 1 as bytes, rounded as diffusers does."""
    return (pixels * 255).round().astype("uint8")


def _file_bytes() -> int:
    return sum(file.stat().st_size for file in (demo_model_path() / "transformer").glob("*.safetensors"))


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
