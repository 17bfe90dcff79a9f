"""Kandinsky 6 super-resolution: blocks of sparse self-attention over tiles of 8 x 8 tokens, without text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import Kandinsky6SRTransformer3DModel as _Kandinsky6SRTransformer3DModel

from shardwise.models.mixin import TensorParallelMixin

PLAN = {
    "visual_transformer_blocks.*.self_attention.to_query": "colwise",
    "visual_transformer_blocks.*.self_attention.to_key": "colwise",
    "visual_transformer_blocks.*.self_attention.to_value": "colwise",
    "visual_transformer_blocks.*.self_attention.out_layer": "rowwise",
    "visual_transformer_blocks.*.feed_forward.net.0.proj": "colwise",
    "visual_transformer_blocks.*.feed_forward.net.2": "rowwise",
    # Read the timestep embedding, which is whole, and their outputs are used whole by every rank.
    "visual_transformer_blocks.*.visual_modulation.out_layer": "rowwise_split_input",
    "out_layer.modulation.out_layer": "rowwise_split_input",
}


class Kandinsky6SRTransformer3DModel(TensorParallelMixin, _Kandinsky6SRTransformer3DModel):  # type: ignore[misc]
    """The upsampler of Kandinsky 6, with tensor parallelism. Heads: 28; whole: embeddings, norms, output layer."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "in_visual_dim": 3,
    "out_visual_dim": 5,
    "time_dim": 24,
    "patch_size": (1, 2, 2),
    "model_dim": 48,
    "ff_dim": 56,
    "num_visual_blocks": 2,
    "axes_dims": (2, 4, 6),
    "nabla_threshold": 0.5,
    "nabla_window": (1, 1, 1),
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 384 tokens in 6 tiles of 8 x 8 (3 frames of 2 x 1 tiles)."""
    frames, height, width = (n * patch for n, patch in zip((3, 16, 8), config["patch_size"], strict=True))
    channels = 2 * config["in_visual_dim"] + 1
    return {
        "hidden_states": torch.randn(batch, frames, height, width, channels, generator=generator),
        "timestep": torch.rand(batch, generator=generator) * 1000,
    }
