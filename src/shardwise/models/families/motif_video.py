"""Motif-Video: the blocks of FLUX.1 over video; blocks may read the text once more, and the last may decode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import MotifVideoTransformer3DModel as _MotifVideoTransformer3DModel

from shardwise.models.families import longcat_image
from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent

PLAN = {
    **longcat_image.PLAN,
    # Double-stream blocks may read the text once more, after their own output projection ...
    "transformer_blocks.*.cross_attn.to_q": IfPresent("colwise"),
    "transformer_blocks.*.cross_attn.to_k": IfPresent("colwise"),
    "transformer_blocks.*.cross_attn.to_v": IfPresent("colwise"),
    "transformer_blocks.*.cross_attn.to_out.0": IfPresent("rowwise"),
    # ... and single-stream blocks may, before it: each rank has the part of the queries' input that its own heads
    # made, sums it to the queries of all heads, and adds its part of what comes back to the part that it had.
    "single_transformer_blocks.*.cross_attn.to_q": IfPresent("rowwise"),
    "single_transformer_blocks.*.cross_attn.to_k": IfPresent("rowwise_split_input"),
    "single_transformer_blocks.*.cross_attn.to_v": IfPresent("rowwise_split_input"),
    "single_transformer_blocks.*.cross_attn.to_out.0": IfPresent("colwise"),
    "context_embedder.linear_1": "rowwise_split_input",
}


class MotifVideoTransformer3DModel(TensorParallelMixin, _MotifVideoTransformer3DModel):  # type: ignore[misc]
    """The transformer of Motif-Video, with tensor parallelism. Heads: 24; whole: small embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 5,
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_single_layers": 3,
    "num_decoder_layers": 1,
    "mlp_ratio": 2.5,
    "patch_size": 2,
    "patch_size_t": 1,
    "text_embed_dim": 20,
    "image_embed_dim": 14,
    "rope_axes_dim": (2, 4, 6),
    "enable_text_cross_attention_dual": True,
    "enable_text_cross_attention_single": True,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 45 video tokens (3 frames of 5 x 3), 7 of text, some padding.

    A model that takes images gets 3 tokens of one.
    """
    patch = config["patch_size"]
    video = (config["in_channels"], 3 * config["patch_size_t"], 5 * patch, 3 * patch)
    mask = torch.ones(batch, 7, dtype=torch.long)
    mask[-1, 4:] = 0
    inputs = {
        "hidden_states": torch.randn(batch, *video, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["text_embed_dim"], generator=generator),
        "encoder_attention_mask": mask,
        "timestep": torch.randint(0, 1000, (batch,), generator=generator),
    }
    if config["image_embed_dim"] is not None:
        inputs["image_embeds"] = torch.randn(batch, 3, config["image_embed_dim"], generator=generator)
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default_branches": (
        {
            "num_decoder_layers": 0,
            "image_embed_dim": None,
            "enable_text_cross_attention_dual": False,
            "enable_text_cross_attention_single": False,
        },
        {},
    ),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
