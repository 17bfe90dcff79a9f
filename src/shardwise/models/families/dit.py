"""DiT: class-conditional blocks, each with embedders of its own for timestep and label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import DiTTransformer2DModel as _DiTTransformer2DModel

from shardwise.models.mixin import TensorParallelMixin

PLAN = {
    "transformer_blocks.*.norm1.emb.timestep_embedder.linear_1": "colwise",
    "transformer_blocks.*.norm1.emb.timestep_embedder.linear_2": "rowwise",
    "transformer_blocks.*.attn1.to_q": "colwise",
    "transformer_blocks.*.attn1.to_k": "colwise",
    "transformer_blocks.*.attn1.to_v": "colwise",
    "transformer_blocks.*.attn1.to_out.0": "rowwise",
    "transformer_blocks.*.ff.net.0.proj": "colwise",
    "transformer_blocks.*.ff.net.2": "rowwise",
    # Modulations: read the embedding of timestep and label, which is whole, and are used whole by every rank.
    "transformer_blocks.*.norm1.linear": "rowwise_split_input",
    "proj_out_1": "rowwise_split_input",
}


class DiTTransformer2DModel(TensorParallelMixin, _DiTTransformer2DModel):  # type: ignore[misc]
    """The transformer of DiT, with tensor parallelism. Heads: 16; whole: patch and label embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 3,
    "out_channels": 5,
    "num_layers": 3,
    "sample_size": 10,
    "patch_size": 2,
    "num_embeds_ada_norm": 7,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 25 image tokens (5 x 5; the class takes squares only), a label."""
    side = 5 * config["patch_size"]
    return {
        "hidden_states": torch.randn(batch, config["in_channels"], side, side, generator=generator),
        "timestep": torch.randint(0, 1000, (batch,), generator=generator),
        "class_labels": torch.randint(0, config["num_embeds_ada_norm"], (batch,), generator=generator),
    }
