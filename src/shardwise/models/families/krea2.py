"""Krea 2: single-stream blocks whose attention is gated, behind blocks that fuse the layers of a text encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import Krea2Transformer2DModel as _Krea2Transformer2DModel

from shardwise.models.mixin import TensorParallelMixin

PLAN = {
    "text_fusion.layerwise_blocks.*.attn.to_q": "colwise",
    "text_fusion.layerwise_blocks.*.attn.to_k": "colwise",
    "text_fusion.layerwise_blocks.*.attn.to_v": "colwise",
    "text_fusion.layerwise_blocks.*.attn.to_gate": "colwise",
    "text_fusion.layerwise_blocks.*.attn.to_out.0": "rowwise",
    "text_fusion.layerwise_blocks.*.ff.gate": "colwise",
    "text_fusion.layerwise_blocks.*.ff.up": "colwise",
    "text_fusion.layerwise_blocks.*.ff.down": "rowwise",
    "text_fusion.refiner_blocks.*.attn.to_q": "colwise",
    "text_fusion.refiner_blocks.*.attn.to_k": "colwise",
    "text_fusion.refiner_blocks.*.attn.to_v": "colwise",
    "text_fusion.refiner_blocks.*.attn.to_gate": "colwise",
    "text_fusion.refiner_blocks.*.attn.to_out.0": "rowwise",
    "text_fusion.refiner_blocks.*.ff.gate": "colwise",
    "text_fusion.refiner_blocks.*.ff.up": "colwise",
    "text_fusion.refiner_blocks.*.ff.down": "rowwise",
    "transformer_blocks.*.attn.to_q": "colwise",
    "transformer_blocks.*.attn.to_k": "colwise",
    "transformer_blocks.*.attn.to_v": "colwise",
    "transformer_blocks.*.attn.to_gate": "colwise",  # multiplies what the heads return, feature by feature
    "transformer_blocks.*.attn.to_out.0": "rowwise",
    "transformer_blocks.*.ff.gate": "colwise",
    "transformer_blocks.*.ff.up": "colwise",
    "transformer_blocks.*.ff.down": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "time_embed.linear_2": "rowwise_split_input",
    "time_mod_proj": "rowwise_split_input",
    "txt_in.linear_1": "rowwise_split_input",
    "txt_in.linear_2": "rowwise_split_input",
}


class Krea2Transformer2DModel(TensorParallelMixin, _Krea2Transformer2DModel):  # type: ignore[misc]
    """The transformer of Krea 2, with tensor parallelism. Heads: 48, of keys 12, of text 20; whole: tables, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "in_channels": 6,
    "num_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 56,
    "timestep_embed_dim": 18,
    "text_hidden_dim": 40,
    "num_text_layers": 5,
    "text_num_attention_heads": 8,
    "text_num_key_value_heads": 4,
    "text_intermediate_size": 28,
    "num_layerwise_text_blocks": 2,
    "num_refiner_text_blocks": 2,
    "axes_dims_rope": (2, 4, 6),
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 15 image tokens (5 x 3), 7 text tokens, some of them padding."""
    text = (batch, 7, config["num_text_layers"], config["text_hidden_dim"])
    mask = torch.ones(batch, 7, dtype=torch.bool)
    mask[-1, 4:] = False
    image = torch.cartesian_prod(torch.arange(1), torch.arange(5), torch.arange(3))
    return {
        "hidden_states": torch.randn(batch, 15, config["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(*text, generator=generator),
        "encoder_attention_mask": mask,
        "position_ids": torch.cat([torch.zeros(7, 3, dtype=torch.long), image]),
        "timestep": torch.rand(batch, generator=generator),
    }


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one_key_head": ({"num_key_value_heads": 1, "text_num_key_value_heads": 1}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
