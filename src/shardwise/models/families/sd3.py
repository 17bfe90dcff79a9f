"""Stable Diffusion 3 and 3.5: joint blocks, the last of which drops its text; a third of the weights modulates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import SD3Transformer2DModel as _SD3Transformer2DModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent

PLAN = {
    "transformer_blocks.*.attn.to_q": "colwise",
    "transformer_blocks.*.attn.to_k": "colwise",
    "transformer_blocks.*.attn.to_v": "colwise",
    "transformer_blocks.*.attn.to_out.0": "rowwise",
    "transformer_blocks.*.attn.add_q_proj": "colwise",
    "transformer_blocks.*.attn.add_k_proj": "colwise",
    "transformer_blocks.*.attn.add_v_proj": "colwise",
    "transformer_blocks.*.attn.to_add_out": "rowwise",  # not in the last block
    # The second attention of SD 3.5 medium.
    "transformer_blocks.*.attn2.to_q": IfPresent("colwise"),
    "transformer_blocks.*.attn2.to_k": IfPresent("colwise"),
    "transformer_blocks.*.attn2.to_v": IfPresent("colwise"),
    "transformer_blocks.*.attn2.to_out.0": IfPresent("rowwise"),
    "transformer_blocks.*.ff.net.0.proj": "colwise",
    "transformer_blocks.*.ff.net.2": "rowwise",
    "transformer_blocks.*.ff_context.net.0.proj": "colwise",  # not in the last block
    "transformer_blocks.*.ff_context.net.2": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "time_text_embed.timestep_embedder.linear_2": "rowwise_split_input",
    "time_text_embed.text_embedder.linear_1": "rowwise_split_input",
    "time_text_embed.text_embedder.linear_2": "rowwise_split_input",
    "context_embedder": "rowwise_split_input",
    "transformer_blocks.*.norm1.linear": "rowwise_split_input",
    "transformer_blocks.*.norm1_context.linear": "rowwise_split_input",
    "norm_out.linear": "rowwise_split_input",
}


class SD3Transformer2DModel(TensorParallelMixin, _SD3Transformer2DModel):  # type: ignore[misc]
    """The transformer of SD 3 and 3.5, with tensor parallelism. Heads: 24 or 38; whole: small embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 3,
    "out_channels": 5,
    "num_layers": 3,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "joint_attention_dim": 20,
    "caption_projection_dim": 48,
    "pooled_projection_dim": 28,
    "pos_embed_max_size": 9,
    "dual_attention_layers": (0,),
    "qk_norm": "rms_norm",
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 15 image tokens (5 x 3) and 7 text tokens."""
    height, width = 5 * config["patch_size"], 3 * config["patch_size"]
    return {
        "hidden_states": torch.randn(batch, config["in_channels"], height, width, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["joint_attention_dim"], generator=generator),
        "pooled_projections": torch.randn(batch, config["pooled_projection_dim"], generator=generator),
        "timestep": torch.randint(0, 1000, (batch,), generator=generator),
    }


def adapter_inputs(model: Any, generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return what a model with an IP adapter is given beside its inputs: 9 tokens of image features."""
    projection = getattr(model, "image_proj", None)
    if projection is None:
        return {}
    embeds = torch.randn(batch, 9, projection.proj_in.in_features, generator=generator)
    return {"joint_attention_kwargs": {"ip_adapter_image_embeds": embeds}}


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "without_norms_and_second_attention": ({"dual_attention_layers": (), "qk_norm": None}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
