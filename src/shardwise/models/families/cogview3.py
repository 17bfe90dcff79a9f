"""CogView3-Plus: text and image in one sequence, modulated apart from each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import CogView3PlusTransformer2DModel as _CogView3PlusTransformer2DModel

from shardwise.models.mixin import TensorParallelMixin

PLAN = {
    "patch_embed.text_proj": "rowwise_split_input",
    # Reads the embedding of timestep and sizes, which is whole, and is used whole by every rank.
    "transformer_blocks.*.norm1.linear": "rowwise_split_input",
    "transformer_blocks.*.attn1.to_q": "colwise",
    "transformer_blocks.*.attn1.to_k": "colwise",
    "transformer_blocks.*.attn1.to_v": "colwise",
    "transformer_blocks.*.attn1.to_out.0": "rowwise",
    "transformer_blocks.*.ff.net.0.proj": "colwise",
    "transformer_blocks.*.ff.net.2": "rowwise",
}


class CogView3PlusTransformer2DModel(TensorParallelMixin, _CogView3PlusTransformer2DModel):  # type: ignore[misc]
    """The transformer of CogView3-Plus, with tensor parallelism. Heads: 64; whole: image and size embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 3,
    "num_layers": 3,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "out_channels": 5,
    "text_embed_dim": 20,
    "time_embed_dim": 28,
    "condition_dim": 6,
    "pos_embed_max_size": 9,
    "sample_size": 16,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 15 image tokens (5 x 3), 7 text tokens, sizes of the image."""
    height, width = 5 * config["patch_size"], 3 * config["patch_size"]
    sizes = torch.rand(3, batch, 2, generator=generator) * 1024
    return {
        "hidden_states": torch.randn(batch, config["in_channels"], height, width, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["text_embed_dim"], generator=generator),
        "timestep": torch.randint(0, 1000, (batch,), generator=generator),
        "original_size": sizes[0],
        "target_size": sizes[1],
        "crop_coords": sizes[2],
    }
