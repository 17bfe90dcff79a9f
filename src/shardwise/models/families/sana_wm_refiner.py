"""The refiner of SANA-WM: LTX-2 of which only the video stream runs, window by window, beside a cache of keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import SanaWMLTX2RefinerTransformer3DModel as _SanaWMLTX2RefinerTransformer3DModel
from torch import nn

from shardwise.models.families import ltx2
from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import SliceInput


def dim_of_heads(block: nn.Module) -> int:
    """Return the dim of a rotary table that is cut: the heads', or that of the features of all heads."""
    return ltx2.dim_of_heads(block.get_submodule("attn1"))


_OWN_TABLES = ("rope", "audio_rope", "cross_attn_rope", "cross_attn_audio_rope")

PLAN = {
    # The caller has the tables made, by a method of the model, and keeps one in the cache.
    "transformer_blocks.*": SliceInput("video_rotary_emb", "sink_rotary_emb", dim=dim_of_heads),
    # Weights of the audio stream are never used, and take as much memory as if they were.
    **{key: style for key, style in ltx2.PLAN.items() if key not in (*_OWN_TABLES, "prompt_adaln.linear")},
}


class SanaWMLTX2RefinerTransformer3DModel(
    TensorParallelMixin,
    _SanaWMLTX2RefinerTransformer3DModel,  # type: ignore[misc]
):
    """The refiner of SANA-WM, with tensor parallelism. Heads: 32; whole: small embeddings, tables, block norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {**ltx2.TINY_CONFIG, "rope_type": "interleaved"}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: one window of 45 video tokens, 7 of text, some of them padding."""
    heads, width = config["num_attention_heads"], config["attention_head_dim"]
    angles = torch.rand(batch, heads, 45, width // 2, generator=generator)
    if config["rope_type"] == "interleaved":
        angles = angles.transpose(1, 2).flatten(2).repeat_interleave(2, -1)
    mask = torch.ones(batch, 7)
    mask[-1, 4:] = 0
    return {
        "hidden_states": torch.randn(batch, 45, config["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["caption_channels"], generator=generator),
        "encoder_attention_mask": mask,
        "timestep": torch.randint(0, 1000, (batch, 45), generator=generator),
        "video_rotary_emb": (angles.cos(), angles.sin()),
    }


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "split": ({"rope_type": "split", "gated_attn": True, "audio_gated_attn": True}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
