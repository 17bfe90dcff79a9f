"""Qwen-Image: double-stream blocks without any fused projection, so plain styles only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel as _QwenImageTransformer2DModel

from shardwise.models.mixin import TensorParallelMixin

PLAN = {
    "transformer_blocks.*.attn.to_q": "colwise",
    "transformer_blocks.*.attn.to_k": "colwise",
    "transformer_blocks.*.attn.to_v": "colwise",
    "transformer_blocks.*.attn.to_out.0": "rowwise",
    "transformer_blocks.*.attn.add_q_proj": "colwise",
    "transformer_blocks.*.attn.add_k_proj": "colwise",
    "transformer_blocks.*.attn.add_v_proj": "colwise",
    "transformer_blocks.*.attn.to_add_out": "rowwise",
    "transformer_blocks.*.img_mlp.net.0.proj": "colwise",
    "transformer_blocks.*.img_mlp.net.2": "rowwise",
    "transformer_blocks.*.txt_mlp.net.0.proj": "colwise",
    "transformer_blocks.*.txt_mlp.net.2": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "transformer_blocks.*.img_mod.1": "rowwise_split_input",
    "transformer_blocks.*.txt_mod.1": "rowwise_split_input",
}


class QwenImageTransformer2DModel(TensorParallelMixin, _QwenImageTransformer2DModel):  # type: ignore[misc]
    """The transformer of Qwen-Image, with tensor parallelism. Heads: 24; whole: embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "joint_attention_dim": 20,
    "axes_dims_rope": (2, 4, 6),
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 15 image tokens (5 x 3), 7 text tokens, some of them padding."""
    mask = torch.ones(batch, 7, dtype=torch.bool)
    mask[-1, 4:] = False
    return {
        "hidden_states": torch.randn(batch, 15, config["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["joint_attention_dim"], generator=generator),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.rand(batch, generator=generator),
        "img_shapes": [(1, 5, 3)] * batch,
    }
