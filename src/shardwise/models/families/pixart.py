"""PixArt-alpha and PixArt-Sigma: self- and cross-attention under one modulation that all blocks share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import PixArtTransformer2DModel as _PixArtTransformer2DModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent

PLAN = {
    "transformer_blocks.*.attn1.to_q": "colwise",
    "transformer_blocks.*.attn1.to_k": "colwise",
    "transformer_blocks.*.attn1.to_v": "colwise",
    "transformer_blocks.*.attn1.to_out.0": "rowwise",
    "transformer_blocks.*.attn2.to_q": "colwise",
    "transformer_blocks.*.attn2.to_k": "colwise",
    "transformer_blocks.*.attn2.to_v": "colwise",
    "transformer_blocks.*.attn2.to_out.0": "rowwise",
    "transformer_blocks.*.ff.net.0.proj": "colwise",
    "transformer_blocks.*.ff.net.2": "rowwise",
    # Lone projections of whole inputs: the timestep, its modulation, the caption.
    "adaln_single.emb.timestep_embedder.linear_2": "rowwise_split_input",
    "adaln_single.linear": "rowwise_split_input",
    "caption_projection.linear_1": IfPresent("rowwise_split_input"),
    "caption_projection.linear_2": IfPresent("rowwise_split_input"),
}


class PixArtTransformer2DModel(TensorParallelMixin, _PixArtTransformer2DModel):  # type: ignore[misc]
    """The transformer of PixArt, with tensor parallelism. Heads: 16; whole: patches, sizes, tables, norms."""

    _tp_plan = PLAN


RELEASED_CONFIG: dict[str, Any] = {"caption_channels": 4096}
"""What the released models have beside the defaults of the class."""

TINY_CONFIG: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 3,
    "out_channels": 5,
    "num_layers": 2,
    "cross_attention_dim": 48,
    "sample_size": 16,
    "patch_size": 2,
    "use_additional_conditions": True,
    "caption_channels": 20,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 15 image tokens (5 x 3), 7 text tokens, some of them padding."""
    height, width = 5 * config["patch_size"], 3 * config["patch_size"]
    text = config.get("caption_channels") or config["cross_attention_dim"]
    mask = torch.ones(batch, 7)
    mask[-1, 4:] = 0
    sized = config.get("use_additional_conditions")
    if sized is None:  # the class decides by the size of its samples
        sized = config["sample_size"] == 128
    size = {
        "resolution": torch.full((batch, 2), 1024.0) if sized else None,
        "aspect_ratio": torch.rand(batch, 1, generator=generator) if sized else None,
    }
    return {
        "hidden_states": torch.randn(batch, config["in_channels"], height, width, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, text, generator=generator),
        "encoder_attention_mask": mask,
        "timestep": torch.randint(0, 1000, (batch,), generator=generator),
        "added_cond_kwargs": size,
    }


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sigma": ({"use_additional_conditions": False}, {}),
    "projected_captions": ({"caption_channels": None, "cross_attention_dim": 20}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
