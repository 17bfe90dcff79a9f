"""FLUX.2: double-stream blocks with packed SwiGLU, single-stream blocks with one packed input and output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import Flux2Transformer2DModel as _Flux2Transformer2DModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent, PackedColwiseParallel, PackedRowwiseParallel

PLAN = {
    "transformer_blocks.*.attn.to_q": "colwise",
    "transformer_blocks.*.attn.to_k": "colwise",
    "transformer_blocks.*.attn.to_v": "colwise",
    "transformer_blocks.*.attn.to_out.0": "rowwise",
    "transformer_blocks.*.attn.add_q_proj": "colwise",
    "transformer_blocks.*.attn.add_k_proj": "colwise",
    "transformer_blocks.*.attn.add_v_proj": "colwise",
    "transformer_blocks.*.attn.to_add_out": "rowwise",
    "transformer_blocks.*.ff.linear_in": PackedColwiseParallel([1, 1]),  # gate, up
    "transformer_blocks.*.ff.linear_out": "rowwise",
    "transformer_blocks.*.ff_context.linear_in": PackedColwiseParallel([1, 1]),
    "transformer_blocks.*.ff_context.linear_out": "rowwise",
    # q, k, v, gate, up in; cat(attention, mlp) out: the widths follow the config, the model stores them.
    "single_transformer_blocks.*.attn.to_qkv_mlp_proj": PackedColwiseParallel(),
    "single_transformer_blocks.*.attn.to_out": PackedRowwiseParallel(),
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "time_guidance_embed.timestep_embedder.linear_2": "rowwise_split_input",
    "time_guidance_embed.guidance_embedder.linear_2": IfPresent("rowwise_split_input"),
    "double_stream_modulation_img.linear": "rowwise_split_input",
    "double_stream_modulation_txt.linear": "rowwise_split_input",
    "single_stream_modulation.linear": "rowwise_split_input",
    "context_embedder": "rowwise_split_input",
    "norm_out.linear": "rowwise_split_input",
}


class Flux2Transformer2DModel(TensorParallelMixin, _Flux2Transformer2DModel):  # type: ignore[misc]
    """The transformer of FLUX.2, with tensor parallelism. Heads: 48 (dev); whole: small embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "in_channels": 8,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 20,
    "timestep_guidance_channels": 24,
    "mlp_ratio": 3.0,
    "axes_dims_rope": (2, 4, 4, 6),
    "guidance_embeds": True,
}


def example_inputs(
    config: Mapping[str, Any], generator: torch.Generator, batch: int = 3
) -> dict[str, torch.Tensor]:
    """Return inputs for a model of this config: 15 image tokens (5 x 3) and 7 text tokens."""
    one = torch.arange(1)
    inputs = {
        "hidden_states": torch.randn(batch, 15, config["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["joint_attention_dim"], generator=generator),
        "timestep": torch.rand(batch, generator=generator),
        "img_ids": torch.cartesian_prod(one, torch.arange(5), torch.arange(3), one),
        "txt_ids": torch.cartesian_prod(one, one, one, torch.arange(7)),
    }
    if config["guidance_embeds"]:
        inputs["guidance"] = torch.rand(batch, generator=generator) * 4
    return inputs
