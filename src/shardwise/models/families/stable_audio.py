"""Stable Audio: self-attention, then cross-attention with fewer key and value heads than queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import StableAudioDiTModel as _StableAudioDiTModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import PackedColwiseParallel

PLAN = {
    "transformer_blocks.*.attn1.to_q": "colwise",
    "transformer_blocks.*.attn1.to_k": "colwise",
    "transformer_blocks.*.attn1.to_v": "colwise",
    "transformer_blocks.*.attn1.to_out.0": "rowwise",
    "transformer_blocks.*.attn2.to_q": "colwise",
    "transformer_blocks.*.attn2.to_k": "colwise",
    "transformer_blocks.*.attn2.to_v": "colwise",
    "transformer_blocks.*.attn2.to_out.0": "rowwise",
    "transformer_blocks.*.ff.net.0.proj": PackedColwiseParallel([1, 1]),  # value and gate
    "transformer_blocks.*.ff.net.2": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "timestep_proj.2": "rowwise_split_input",
    "global_proj.0": "rowwise_split_input",
    "global_proj.2": "rowwise_split_input",
}


class StableAudioDiTModel(TensorParallelMixin, _StableAudioDiTModel):  # type: ignore[misc]
    """The transformer of Stable Audio, with tensor parallelism. Heads: 24, of keys 12; whole: convolutions, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "in_channels": 3,
    "num_layers": 2,
    "attention_head_dim": 6,
    "num_attention_heads": 8,
    "num_key_value_attention_heads": 4,
    "out_channels": 5,
    "cross_attention_dim": 20,
    "time_proj_dim": 18,
    "global_states_input_dim": 28,
    "cross_attention_input_dim": 22,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 15 audio and 7 text tokens, some of each padding, and a duration.

    The rotary table covers the duration too, and turns half of the features of each head.
    """
    mask, text_mask = torch.ones(batch, 15, dtype=torch.bool), torch.ones(batch, 7, dtype=torch.bool)
    mask[-1, 12:], text_mask[-1, 4:] = False, False
    pairs = config["attention_head_dim"] // 4
    angles = torch.outer(torch.arange(16.0), 10000 ** (-torch.arange(pairs) / pairs)).repeat(1, 2)
    text, duration = config["cross_attention_input_dim"], config["global_states_input_dim"]
    return {
        "hidden_states": torch.randn(batch, config["in_channels"], 15, generator=generator),
        "attention_mask": mask,
        "encoder_hidden_states": torch.randn(batch, 7, text, generator=generator),
        "encoder_attention_mask": text_mask,
        "global_hidden_states": torch.randn(batch, 1, duration, generator=generator),
        "rotary_embedding": (angles.cos(), angles.sin()),
        "timestep": torch.rand(batch, generator=generator),
    }


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one_key_head": ({"num_key_value_attention_heads": 1}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
