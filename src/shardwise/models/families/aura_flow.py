"""AuraFlow: joint blocks, then single-stream blocks; two fifths of the weights modulate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import AuraFlowTransformer2DModel as _AuraFlowTransformer2DModel

from shardwise.models.mixin import TensorParallelMixin

PLAN = {
    "joint_transformer_blocks.*.attn.to_q": "colwise",
    "joint_transformer_blocks.*.attn.to_k": "colwise",
    "joint_transformer_blocks.*.attn.to_v": "colwise",
    "joint_transformer_blocks.*.attn.to_out.0": "rowwise",
    "joint_transformer_blocks.*.attn.add_q_proj": "colwise",
    "joint_transformer_blocks.*.attn.add_k_proj": "colwise",
    "joint_transformer_blocks.*.attn.add_v_proj": "colwise",
    "joint_transformer_blocks.*.attn.to_add_out": "rowwise",
    "joint_transformer_blocks.*.ff.linear_1": "colwise",
    "joint_transformer_blocks.*.ff.linear_2": "colwise",
    "joint_transformer_blocks.*.ff.out_projection": "rowwise",
    "joint_transformer_blocks.*.ff_context.linear_1": "colwise",
    "joint_transformer_blocks.*.ff_context.linear_2": "colwise",
    "joint_transformer_blocks.*.ff_context.out_projection": "rowwise",
    "single_transformer_blocks.*.attn.to_q": "colwise",
    "single_transformer_blocks.*.attn.to_k": "colwise",
    "single_transformer_blocks.*.attn.to_v": "colwise",
    "single_transformer_blocks.*.attn.to_out.0": "rowwise",
    "single_transformer_blocks.*.ff.linear_1": "colwise",
    "single_transformer_blocks.*.ff.linear_2": "colwise",
    "single_transformer_blocks.*.ff.out_projection": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "time_step_proj.linear_2": "rowwise_split_input",
    "joint_transformer_blocks.*.norm1.linear": "rowwise_split_input",
    "joint_transformer_blocks.*.norm1_context.linear": "rowwise_split_input",
    "single_transformer_blocks.*.norm1.linear": "rowwise_split_input",
    "norm_out.linear": "rowwise_split_input",
}


class AuraFlowTransformer2DModel(TensorParallelMixin, _AuraFlowTransformer2DModel):  # type: ignore[misc]
    """The transformer of AuraFlow, with tensor parallelism. Heads: 12; whole: small embeddings, norms, registers."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 3,
    "out_channels": 5,
    "num_mmdit_layers": 2,
    "num_single_dit_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "joint_attention_dim": 20,
    "caption_projection_dim": 48,
    "pos_embed_max_size": 81,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 15 image tokens (5 x 3) and 7 text tokens."""
    height, width = 5 * config["patch_size"], 3 * config["patch_size"]
    return {
        "hidden_states": torch.randn(batch, config["in_channels"], height, width, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["joint_attention_dim"], generator=generator),
        "timestep": torch.rand(batch, generator=generator),
    }
