"""The finished model: a diffusers folder on disk, and how many of its pictures are right.

Owns the precision of the files and the call that draws a picture.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import torch
from diffusers import (
    AutoencoderKLFlux2,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from transformers import Qwen2Tokenizer, Qwen3ForCausalLM

from shardwise.demo.world import SIDE, Judgement, caption, judge, sample_scene

from .captions import TOKENS
from .denoiser import TEXT_LAYERS

_CHUNK = 20


def save_pipeline(
    folder: Path,
    tokenizer: Qwen2Tokenizer,
    autoencoder: AutoencoderKLFlux2,
    text_encoder: Qwen3ForCausalLM,
    transformer: Flux2Transformer2DModel,
) -> None:
    """Write the parts as a folder that `DiffusionPipeline.from_pretrained` loads.

    Transformer and autoencoder are written in bfloat16. The text encoder is not: transformers loads a model in the
    precision of its file where diffusers loads float32, and a pipeline of both would stop at the first product.
    """
    pipeline = Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=2.0),
        vae=autoencoder.bfloat16(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer.bfloat16(),
    )
    pipeline.save_pretrained(folder)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)  # weights are written for their owner's eyes only


def draw(pipeline: DiffusionPipeline, captions: list[str], seeds: range) -> list[Any]:
    """Draw one picture for each caption, each from the noise of its own seed."""
    pictures: list[Any] = pipeline(
        prompt=captions,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        height=SIDE,
        width=SIDE,
        num_inference_steps=12,
        guidance_scale=2.0,
        max_sequence_length=TOKENS,
        text_encoder_out_layers=TEXT_LAYERS,
    ).images
    return pictures


def judge_model(folder: Path, count: int, seed: int) -> list[Judgement]:
    """Load a model, let it draw made-up scenes, and judge every picture."""
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    rng = Random(seed)
    verdicts: list[Judgement] = []
    for start in range(0, count, _CHUNK):
        seeds = range(100 + start, 100 + min(start + _CHUNK, count))
        scenes = [sample_scene(rng) for _ in seeds]
        pictures = draw(pipeline, [caption(scene) for scene in scenes], seeds)
        verdicts += [judge(picture, scene) for picture, scene in zip(pictures, scenes, strict=True)]
    return verdicts
