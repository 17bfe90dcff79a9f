"""Sana: linear self-attention, cross-attention with heads of another size, and gated convolutions as feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import SanaTransformer2DModel as _SanaTransformer2DModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent, PackedColwiseParallel, PackedDepthwiseParallel

PLAN = {
    "transformer_blocks.*.attn1.to_q": "colwise",
    "transformer_blocks.*.attn1.to_k": "colwise",
    "transformer_blocks.*.attn1.to_v": "colwise",
    # Over all heads, in Sana 1.5 and Sana-Sprint.
    "transformer_blocks.*.attn1.norm_q": IfPresent("across_head_norm"),
    "transformer_blocks.*.attn1.norm_k": IfPresent("across_head_norm"),
    "transformer_blocks.*.attn1.to_out.0": "rowwise",
    "transformer_blocks.*.attn2.to_q": "colwise",
    "transformer_blocks.*.attn2.to_k": "colwise",
    "transformer_blocks.*.attn2.to_v": "colwise",
    "transformer_blocks.*.attn2.norm_q": IfPresent("across_head_norm"),
    "transformer_blocks.*.attn2.norm_k": IfPresent("across_head_norm"),
    "transformer_blocks.*.attn2.to_out.0": "rowwise",
    "transformer_blocks.*.ff.conv_inverted": PackedColwiseParallel([1, 1]),
    "transformer_blocks.*.ff.conv_depth": PackedDepthwiseParallel([1, 1]),
    "transformer_blocks.*.ff.conv_point": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "time_embed.emb.timestep_embedder.linear_2": IfPresent("rowwise_split_input"),
    # With guidance the time is embedded by other modules.
    "time_embed.timestep_embedder.linear_2": IfPresent("rowwise_split_input"),
    "time_embed.guidance_embedder.linear_2": IfPresent("rowwise_split_input"),
    "time_embed.linear": "rowwise_split_input",
    "caption_projection.linear_1": "rowwise_split_input",
    "caption_projection.linear_2": "rowwise_split_input",
}


class SanaTransformer2DModel(TensorParallelMixin, _SanaTransformer2DModel):  # type: ignore[misc]
    """The transformer of Sana, with tensor parallelism. Heads: 70 and 20; whole: tables, block norms."""

    _tp_plan = PLAN


# Wide heads: linear attention jumps where rounding decides whether any feature of a query is positive.
TINY_CONFIG: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 5,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_cross_attention_heads": 8,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 64,
    "caption_channels": 20,
    "sample_size": 6,
    "guidance_embeds": False,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 15 image tokens (5 x 3), 7 text tokens, some of them padding."""
    patch = config.get("patch_size", 1)
    mask = torch.ones(batch, 7)
    mask[-1, 4:] = 0
    inputs = {
        "hidden_states": torch.randn(batch, config["in_channels"], 5 * patch, 3 * patch, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["caption_channels"], generator=generator),
        "encoder_attention_mask": mask,
        "timestep": torch.randint(0, 1000, (batch,), generator=generator),
    }
    if config["guidance_embeds"]:
        inputs["guidance"] = torch.rand(batch, generator=generator)
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "guidance_and_norms": ({"guidance_embeds": True, "qk_norm": "rms_norm_across_heads"}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
