"""Latte: spatial blocks as those of PixArt, each followed by a temporal one without text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import LatteTransformer3DModel as _LatteTransformer3DModel

from shardwise.models.families import pixart
from shardwise.models.mixin import TensorParallelMixin

PLAN = {
    **pixart.PLAN,
    "temporal_transformer_blocks.*.attn1.to_q": "colwise",
    "temporal_transformer_blocks.*.attn1.to_k": "colwise",
    "temporal_transformer_blocks.*.attn1.to_v": "colwise",
    "temporal_transformer_blocks.*.attn1.to_out.0": "rowwise",
    "temporal_transformer_blocks.*.ff.net.0.proj": "colwise",
    "temporal_transformer_blocks.*.ff.net.2": "rowwise",
}


class LatteTransformer3DModel(TensorParallelMixin, _LatteTransformer3DModel):  # type: ignore[misc]
    """The transformer of Latte, with tensor parallelism. Heads: 16; whole: patch embedding, tables, norms."""

    _tp_plan = PLAN


RELEASED_CONFIG: dict[str, Any] = {
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 28,
    "cross_attention_dim": 1152,
    "attention_bias": True,
    "patch_size": 2,
    "activation_fn": "gelu-approximate",
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "caption_channels": 4096,
}
"""The sizes of Latte-1; the class has no defaults of them that work."""

TINY_CONFIG: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 3,
    "out_channels": 5,
    "num_layers": 2,
    "cross_attention_dim": 48,
    "attention_bias": True,
    "sample_size": 16,
    "patch_size": 2,
    "activation_fn": "gelu-approximate",
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "caption_channels": 20,
    "video_length": 3,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 15 tokens (5 x 3) in each frame of its length, 7 text tokens."""
    height, width = 5 * config["patch_size"], 3 * config["patch_size"]
    video = (config["in_channels"], config["video_length"], height, width)
    return {
        "hidden_states": torch.randn(batch, *video, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["caption_channels"], generator=generator),
        "timestep": torch.randint(0, 1000, (batch,), generator=generator),
    }
