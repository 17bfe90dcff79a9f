"""Mochi: joint blocks, the last of which drops its text; each head turns queries and keys by frequencies of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import MochiTransformer3DModel as _MochiTransformer3DModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import PackedColwiseParallel, SliceParameter

PLAN = {
    "": SliceParameter("pos_frequencies", 1),  # (axes, heads, half a head)
    "transformer_blocks.*.attn1.to_q": "colwise",
    "transformer_blocks.*.attn1.to_k": "colwise",
    "transformer_blocks.*.attn1.to_v": "colwise",
    "transformer_blocks.*.attn1.add_k_proj": "colwise",
    "transformer_blocks.*.attn1.add_v_proj": "colwise",
    "transformer_blocks.*.attn1.add_q_proj": "colwise",
    "transformer_blocks.*.attn1.to_out.0": "rowwise",
    "transformer_blocks.*.attn1.to_add_out": "rowwise",  # not in the last block
    "transformer_blocks.*.ff.net.0.proj": PackedColwiseParallel([1, 1]),
    "transformer_blocks.*.ff.net.2": "rowwise",
    "transformer_blocks.*.ff_context.net.0.proj": PackedColwiseParallel([1, 1]),  # not in the last block
    "transformer_blocks.*.ff_context.net.2": "rowwise",
    # Read the embedding of timestep and text, which is whole, and their outputs are used whole by every rank.
    "transformer_blocks.*.norm1.linear": "rowwise_split_input",
    "transformer_blocks.*.norm1_context.linear": "rowwise_split_input",  # not in the last block
    "norm_out.linear": "rowwise_split_input",
    # The pooling of the text divides the width of its input by its heads, which no rank may change.
    "time_embed.pooler.to_kv": "rowwise_split_input",
    "time_embed.pooler.to_q": "rowwise_split_input",
    "time_embed.pooler.to_out": "rowwise_split_input",
}


class MochiTransformer3DModel(TensorParallelMixin, _MochiTransformer3DModel):  # type: ignore[misc]
    """The transformer of Mochi, with tensor parallelism. Heads: 24; whole: embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "patch_size": 2,
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "num_layers": 3,
    "pooled_projection_dim": 36,
    "in_channels": 3,
    "out_channels": 5,
    "text_embed_dim": 56,
    "time_embed_dim": 18,
    "max_sequence_length": 7,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 45 video tokens (3 frames of 5 x 3), 7 of text, some padding."""
    height, width = 5 * config["patch_size"], 3 * config["patch_size"]
    mask = torch.ones(batch, 7, dtype=torch.bool)
    mask[-1, 4:] = False
    return {
        "hidden_states": torch.randn(batch, config["in_channels"], 3, height, width, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["text_embed_dim"], generator=generator),
        "encoder_attention_mask": mask,
        "timestep": torch.randint(0, 1000, (batch,), generator=generator),
    }
