"""HunyuanVideo: double-stream blocks, then single-stream blocks whose output projection packs attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import HunyuanVideoTransformer3DModel as _HunyuanVideoTransformer3DModel
from torch import nn

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import PackedRowwiseParallel


def attention_and_mlp(proj_out: nn.Linear) -> list[int]:
    """Return the blocks of a single-stream output projection: the width of the model, and what is left for the MLP.

    The MLP follows `mlp_ratio` of the config, and the model does not store it on the Linear.
    """
    return [proj_out.out_features, proj_out.in_features - proj_out.out_features]


PLAN = {
    "context_embedder.token_refiner.refiner_blocks.*.attn.to_q": "colwise",
    "context_embedder.token_refiner.refiner_blocks.*.attn.to_k": "colwise",
    "context_embedder.token_refiner.refiner_blocks.*.attn.to_v": "colwise",
    "context_embedder.token_refiner.refiner_blocks.*.attn.to_out.0": "rowwise",
    "context_embedder.token_refiner.refiner_blocks.*.ff.net.0.proj": "colwise",
    "context_embedder.token_refiner.refiner_blocks.*.ff.net.2": "rowwise",
    "transformer_blocks.*.attn.to_q": "colwise",
    "transformer_blocks.*.attn.to_k": "colwise",
    "transformer_blocks.*.attn.to_v": "colwise",
    "transformer_blocks.*.attn.to_out.0": "rowwise",
    "transformer_blocks.*.attn.add_q_proj": "colwise",
    "transformer_blocks.*.attn.add_k_proj": "colwise",
    "transformer_blocks.*.attn.add_v_proj": "colwise",
    "transformer_blocks.*.attn.to_add_out": "rowwise",
    "transformer_blocks.*.ff.net.0.proj": "colwise",
    "transformer_blocks.*.ff.net.2": "rowwise",
    "transformer_blocks.*.ff_context.net.0.proj": "colwise",
    "transformer_blocks.*.ff_context.net.2": "rowwise",
    "single_transformer_blocks.*.attn.to_q": "colwise",
    "single_transformer_blocks.*.attn.to_k": "colwise",
    "single_transformer_blocks.*.attn.to_v": "colwise",
    "single_transformer_blocks.*.proj_mlp": "colwise",
    "single_transformer_blocks.*.proj_out": PackedRowwiseParallel(attention_and_mlp),
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "context_embedder.token_refiner.refiner_blocks.*.norm_out.linear": "rowwise_split_input",
    "transformer_blocks.*.norm1.linear": "rowwise_split_input",
    "transformer_blocks.*.norm1_context.linear": "rowwise_split_input",
    "single_transformer_blocks.*.norm.linear": "rowwise_split_input",
    "norm_out.linear": "rowwise_split_input",
}


class HunyuanVideoTransformer3DModel(TensorParallelMixin, _HunyuanVideoTransformer3DModel):  # type: ignore[misc]
    """The transformer of HunyuanVideo, with tensor parallelism. Heads: 24; whole: embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "patch_size": 2,
    "patch_size_t": 1,
    "guidance_embeds": True,
    "in_channels": 3,
    "out_channels": 5,
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.5,
    "text_embed_dim": 20,
    "pooled_projection_dim": 28,
    "rope_axes_dim": (2, 4, 6),
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 45 video tokens (3 frames of 5 x 3), 7 of text, some padding."""
    patch = config["patch_size"]
    video = (config["in_channels"], 3 * config["patch_size_t"], 5 * patch, 3 * patch)
    mask = torch.ones(batch, 7, dtype=torch.long)
    mask[-1, 4:] = 0
    inputs = {
        "hidden_states": torch.randn(batch, *video, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["text_embed_dim"], generator=generator),
        "encoder_attention_mask": mask,
        "pooled_projections": torch.randn(batch, config["pooled_projection_dim"], generator=generator),
        "timestep": torch.randint(0, 1000, (batch,), generator=generator),
    }
    if config["guidance_embeds"]:
        inputs["guidance"] = torch.rand(batch, generator=generator) * 4000
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "token_replace": ({"image_condition_type": "token_replace", "mlp_ratio": 4.0}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
