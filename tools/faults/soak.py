"""Many pictures in one process for each rank: adapters, meshes, sizes, requests that are given up."""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import diffusers
import numpy as np
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from tests.lora import adapter

from shardwise import DiffusionPipeline, ParallelConfig, demo_model_path
from shardwise.bench.gauges import memory
from shardwise.demo import CALL
from shardwise.launch import run_ranks

SIZES = ((64, 64), (32, 64), (64, 32), (96, 64), (128, 128))
PROMPTS = ("a red circle", "a blue square on a yellow background", "x " * 40, "")
DEGREES = ({"cfg": 2}, {"dp": 2}, {"tp": 2})
ROUND = 10
"""Pictures between two checks, beside those with an adapter, of other degrees, and given up."""

Row = dict[str, Any]


class GivenUp(Exception):
    """A request that is cancelled while it is drawn."""


def soak(pictures: int) -> list[list[Row]]:
    """Return the checks of each rank."""
    with TemporaryDirectory() as name:
        transformer = diffusers.DiffusionPipeline.from_pretrained(demo_model_path()).transformer
        files = []
        for seed in range(2):
            files.append(str(Path(name) / f"{seed}.safetensors"))
            save_file(adapter(transformer, seed=seed), files[-1])
        return run_ranks(draw_many, 2, pictures, files, device="cpu")


def draw_many(pictures: int, adapters: list[str]) -> list[Row]:
    """Draw, and check now and then."""
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    pipeline, rows, drawn, turn = _load(tp=2), [], 0, 0
    for degrees in DEGREES:
        _draw(_load(**degrees), 1)  # each has its mesh from now on
    while drawn < pictures:
        for i in range(ROUND):
            _draw(pipeline, drawn + i, SIZES[(drawn + i) % 5], PROMPTS[(drawn + i) % 4])
        pipeline.load_lora_weights(adapters[turn % 2], adapter_name="it")
        _draw(pipeline, 7)
        pipeline.unload_lora_weights()
        with suppress(GivenUp):
            _draw(pipeline, 7, callback_on_step_end=_give_up)
        if turn % 4 == 0:
            _draw(_load(**DEGREES[turn // 4 % 3]), 1)
        drawn, turn = drawn + ROUND + 2 + (turn % 4 == 0), turn + 1
        reference = _draw(pipeline, 7)
        drawn += 1
        gc.collect()
        rows.append({"pictures": drawn, "reference": reference, **_held()})
    return rows


def _load(**degrees: Any) -> Any:
    pipeline = DiffusionPipeline.from_pretrained(
        demo_model_path(), parallel_config=ParallelConfig(**degrees), dtype=torch.float32
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _draw(
    pipeline: Any, seed: int, size: tuple[int, int] = (64, 64), prompt: str = PROMPTS[0], **more: Any
) -> str:
    call = {**CALL, "num_inference_steps": 2, "width": size[0], "height": size[1], **more}
    with torch.no_grad():
        picture = pipeline(prompt=prompt, generator=torch.Generator().manual_seed(seed), **call).images[0]
    return hashlib.sha256(np.asarray(picture).tobytes()).hexdigest()[:12]


def _give_up(pipeline: Any, step: int, time: Any, values: Mapping[str, Any]) -> Any:
    raise GivenUp


def _held() -> Row:
    """Return what this process holds."""
    return {
        "MiB": memory()["VmRSS"] // 2**20,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "groups": len(dist.distributed_c10d._world.pg_map),
    }
