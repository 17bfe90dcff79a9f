"""FLUX.1: double-stream blocks, then single-stream blocks whose output projection packs attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import FluxTransformer2DModel as _FluxTransformer2DModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import PackedRowwiseParallel

PLAN = {
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
    # Reads cat(attention, mlp): the model stores both widths on the Linear.
    "single_transformer_blocks.*.proj_out": PackedRowwiseParallel(),
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "context_embedder": "rowwise_split_input",
    "transformer_blocks.*.norm1.linear": "rowwise_split_input",
    "transformer_blocks.*.norm1_context.linear": "rowwise_split_input",
    "single_transformer_blocks.*.norm.linear": "rowwise_split_input",
    "norm_out.linear": "rowwise_split_input",
}


class FluxTransformer2DModel(TensorParallelMixin, _FluxTransformer2DModel):  # type: ignore[misc]
    """The transformer of FLUX.1, with tensor parallelism. Heads: 24; whole: small embeddings, norms."""

    _tp_plan = PLAN


# Sizes that no degree makes equal to one another: a size used in the wrong place must not fit by chance.
TINY_CONFIG: dict[str, Any] = {
    "in_channels": 8,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "joint_attention_dim": 20,
    "pooled_projection_dim": 28,
    "guidance_embeds": True,
    "axes_dims_rope": (2, 4, 6),
}


def example_inputs(
    config: Mapping[str, Any], generator: torch.Generator, batch: int = 3
) -> dict[str, torch.Tensor]:
    """Return inputs for a model of this config: 15 image tokens (5 x 3) and 7 text tokens."""
    inputs = {
        "hidden_states": torch.randn(batch, 15, config["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["joint_attention_dim"], generator=generator),
        "pooled_projections": torch.randn(batch, config["pooled_projection_dim"], generator=generator),
        "timestep": torch.rand(batch, generator=generator),
        "img_ids": torch.cartesian_prod(torch.arange(1.0), torch.arange(5.0), torch.arange(3.0)),
        "txt_ids": torch.zeros(7, 3),
    }
    if config["guidance_embeds"]:
        inputs["guidance"] = torch.rand(batch, generator=generator) * 4
    return inputs


def adapter_inputs(model: Any, generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return what a model with IP adapters is given beside its inputs: features of one image for each of them."""
    projections = getattr(model, "encoder_hid_proj", None)
    if projections is None:
        return {}
    widths = [layer.image_embeds.in_features for layer in projections.image_projection_layers]
    embeds = [torch.randn(batch, 1, width, generator=generator) for width in widths]
    return {"joint_attention_kwargs": {"ip_adapter_image_embeds": embeds}}
