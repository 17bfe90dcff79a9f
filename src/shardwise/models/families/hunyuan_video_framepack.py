"""FramePack: HunyuanVideo that also reads an image and earlier frames, the older the coarser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import HunyuanVideoFramepackTransformer3DModel as _Framepack

from shardwise.models.families import hunyuan_video
from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent

PLAN = {
    **hunyuan_video.PLAN,
    # Of the released models; the default configuration has no projection of an image, and no forward either.
    "image_projection.down": IfPresent("rowwise_split_input"),
}


class HunyuanVideoFramepackTransformer3DModel(TensorParallelMixin, _Framepack):  # type: ignore[misc]
    """The transformer of FramePack, with tensor parallelism. Heads: 24; whole: embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    **hunyuan_video.TINY_CONFIG,
    "has_image_proj": True,
    "image_proj_dim": 14,
    "has_clean_x_embedder": True,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: those of HunyuanVideo, 3 tokens of an image, and 8 earlier frames.

    Two of these are read as they are, two at half size and four at a quarter.
    """
    inputs = hunyuan_video.example_inputs(config, generator, batch)
    channels, frames, height, width = inputs["hidden_states"].shape[1:]

    def earlier(count: int) -> torch.Tensor:
        return torch.randn(batch, channels, count, height, width, generator=generator)

    return {
        **inputs,
        "image_embeds": torch.randn(batch, 3, config["image_proj_dim"], generator=generator),
        "indices_latents": torch.arange(8, 8 + frames // config["patch_size_t"]),
        "latents_clean": earlier(2),
        "indices_latents_clean": torch.arange(6, 8),
        "latents_history_2x": earlier(2),
        "indices_latents_history_2x": torch.arange(4, 6),
        "latents_history_4x": earlier(4),
        "indices_latents_history_4x": torch.arange(4),
    }


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one_sample": ({}, {"batch": 1}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
