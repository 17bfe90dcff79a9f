"""Sana-Video: the blocks of Sana over video tokens, with rotary positions and norms over all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import SanaVideoTransformer3DModel as _SanaVideoTransformer3DModel

from shardwise.models.families import sana
from shardwise.models.mixin import TensorParallelMixin

PLAN = {
    **sana.PLAN,
    # Mixes frames; reads what the other convolutions of the feed-forward leave, which is whole.
    "transformer_blocks.*.ff.conv_temp": "rowwise_split_input",
}


class SanaVideoTransformer3DModel(TensorParallelMixin, _SanaVideoTransformer3DModel):  # type: ignore[misc]
    """The transformer of Sana-Video, with tensor parallelism. Heads: 20; whole: tables, block norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 5,
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_cross_attention_heads": 8,
    "cross_attention_head_dim": 6,
    "cross_attention_dim": 48,
    "caption_channels": 20,
    "patch_size": (1, 2, 2),
    "guidance_embeds": False,
    "rope_max_seq_len": 16,
}


def example_inputs(
    config: Mapping[str, Any], generator: torch.Generator, batch: int = 3, per_token: bool = False
) -> dict[str, Any]:
    """Return inputs for a model of this config: 45 video tokens (3 frames of 5 x 3), 7 of text, some padding.

    With `per_token` each token has a noise level of its own.
    """
    video = [n * patch for n, patch in zip((3, 5, 3), config["patch_size"], strict=True)]
    mask = torch.ones(batch, 7)
    mask[-1, 4:] = 0
    inputs = {
        "hidden_states": torch.randn(batch, config["in_channels"], *video, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["caption_channels"], generator=generator),
        "encoder_attention_mask": mask,
        "timestep": torch.randint(0, 1000, (batch, 45) if per_token else (batch,), generator=generator),
    }
    if config["guidance_embeds"]:
        inputs["guidance"] = torch.rand(batch, generator=generator)
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "guidance": ({"guidance_embeds": True}, {}),
    "timestep_per_token": ({}, {"per_token": True}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
