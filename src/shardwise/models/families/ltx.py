"""LTX-Video: query and key norms look at all heads together, and so does the rotary table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import LTXVideoTransformer3DModel as _LTXVideoTransformer3DModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import SliceOutput

PLAN = {
    # Laid over the features of all heads, and applied to queries and keys before they are split into heads.
    "rope": SliceOutput(-1),
    "transformer_blocks.*.attn1.to_q": "colwise",
    "transformer_blocks.*.attn1.to_k": "colwise",
    "transformer_blocks.*.attn1.to_v": "colwise",
    "transformer_blocks.*.attn1.norm_q": "across_head_norm",
    "transformer_blocks.*.attn1.norm_k": "across_head_norm",
    "transformer_blocks.*.attn1.to_out.0": "rowwise",
    "transformer_blocks.*.attn2.to_q": "colwise",
    "transformer_blocks.*.attn2.to_k": "colwise",
    "transformer_blocks.*.attn2.to_v": "colwise",
    "transformer_blocks.*.attn2.norm_q": "across_head_norm",
    "transformer_blocks.*.attn2.norm_k": "across_head_norm",
    "transformer_blocks.*.attn2.to_out.0": "rowwise",
    "transformer_blocks.*.ff.net.0.proj": "colwise",
    "transformer_blocks.*.ff.net.2": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "time_embed.emb.timestep_embedder.linear_2": "rowwise_split_input",
    "time_embed.linear": "rowwise_split_input",
    "caption_projection.linear_1": "rowwise_split_input",
    "caption_projection.linear_2": "rowwise_split_input",
}


class LTXVideoTransformer3DModel(TensorParallelMixin, _LTXVideoTransformer3DModel):  # type: ignore[misc]
    """The transformer of LTX-Video, with tensor parallelism. Heads: 32; whole: small embeddings, tables, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "in_channels": 6,
    "out_channels": 5,
    "num_attention_heads": 4,
    "attention_head_dim": 10,
    "cross_attention_dim": 40,
    "num_layers": 2,
    "caption_channels": 20,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 45 video tokens (3 frames of 5 x 3), 7 of text, some padding."""
    mask = torch.ones(batch, 7, dtype=torch.bool)
    mask[-1, 4:] = False
    return {
        "hidden_states": torch.randn(batch, 45, config["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["caption_channels"], generator=generator),
        "encoder_attention_mask": mask,
        "timestep": torch.randint(0, 1000, (batch,), generator=generator),
        "num_frames": 3,
        "height": 5,
        "width": 3,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }
