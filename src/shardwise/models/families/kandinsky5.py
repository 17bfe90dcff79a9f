"""Kandinsky 5: blocks for the text, then blocks for the video that read it by cross-attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import Kandinsky5Transformer3DModel as _Kandinsky5Transformer3DModel

from shardwise.models.mixin import TensorParallelMixin

PLAN = {
    "text_embeddings.in_layer": "rowwise_split_input",  # reads the text, which is whole
    "text_transformer_blocks.*.self_attention.to_query": "colwise",
    "text_transformer_blocks.*.self_attention.to_key": "colwise",
    "text_transformer_blocks.*.self_attention.to_value": "colwise",
    "text_transformer_blocks.*.self_attention.out_layer": "rowwise",
    "text_transformer_blocks.*.feed_forward.in_layer": "colwise",
    "text_transformer_blocks.*.feed_forward.out_layer": "rowwise",
    "visual_transformer_blocks.*.self_attention.to_query": "colwise",
    "visual_transformer_blocks.*.self_attention.to_key": "colwise",
    "visual_transformer_blocks.*.self_attention.to_value": "colwise",
    "visual_transformer_blocks.*.self_attention.out_layer": "rowwise",
    "visual_transformer_blocks.*.cross_attention.to_query": "colwise",
    "visual_transformer_blocks.*.cross_attention.to_key": "colwise",
    "visual_transformer_blocks.*.cross_attention.to_value": "colwise",
    "visual_transformer_blocks.*.cross_attention.out_layer": "rowwise",
    "visual_transformer_blocks.*.feed_forward.in_layer": "colwise",
    "visual_transformer_blocks.*.feed_forward.out_layer": "rowwise",
    # Read the embedding of timestep and pooled text, which is whole, and their outputs are used whole by every rank.
    "text_transformer_blocks.*.text_modulation.out_layer": "rowwise_split_input",
    "visual_transformer_blocks.*.visual_modulation.out_layer": "rowwise_split_input",
}


class Kandinsky5Transformer3DModel(TensorParallelMixin, _Kandinsky5Transformer3DModel):  # type: ignore[misc]
    """The transformer of Kandinsky 5, with tensor parallelism. Heads: 32; whole: embeddings, norms, output layer."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "in_visual_dim": 3,
    "in_text_dim": 20,
    "in_text_dim2": 28,
    "time_dim": 24,
    "out_visual_dim": 5,
    "patch_size": (1, 2, 2),
    "model_dim": 48,
    "ff_dim": 56,
    "num_text_blocks": 2,
    "num_visual_blocks": 2,
    "axes_dims": (2, 4, 6),
    "visual_cond": True,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 45 video tokens (3 frames of 5 x 3) and 7 text tokens."""
    grid = (3, 5, 3)
    sizes = [n * patch for n, patch in zip(grid, config["patch_size"], strict=True)]
    channels = config["in_visual_dim"] * (2 if config["visual_cond"] else 1) + bool(config["visual_cond"])
    return {
        "hidden_states": torch.randn(batch, *sizes, channels, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["in_text_dim"], generator=generator),
        "timestep": torch.rand(batch, generator=generator) * 1000,
        "pooled_projections": torch.randn(batch, config["in_text_dim2"], generator=generator),
        "visual_rope_pos": tuple(torch.arange(n) for n in grid),
        "text_rope_pos": torch.arange(7),
    }
