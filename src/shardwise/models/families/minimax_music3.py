"""MiniMax Music 3: single-stream blocks over audio latents, with partial rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import MiniMaxMusic3Transformer1DModel as _MiniMaxMusic3Transformer1DModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import PackedColwiseParallel

PLAN = {
    "transformer_blocks.*.attn.to_q": "colwise",
    "transformer_blocks.*.attn.to_k": "colwise",
    "transformer_blocks.*.attn.to_v": "colwise",
    "transformer_blocks.*.attn.to_out.0": "rowwise",
    "transformer_blocks.*.ff_in": PackedColwiseParallel([1, 1]),  # value and gate
    "transformer_blocks.*.ff_out": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "time_embed.linear_2": "rowwise_split_input",
    "proj_in": "rowwise_split_input",
}


class MiniMaxMusic3Transformer1DModel(TensorParallelMixin, _MiniMaxMusic3Transformer1DModel):  # type: ignore[misc]
    """The transformer of MiniMax Music 3, with tensor parallelism. Heads: 32; whole: convolutions, output, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "in_channels": 6,
    "condition_dim": 20,
    "num_layers": 2,
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "ff_inner_dim": 56,
    "rotary_dim": 10,
    "fourier_embedding_dim": 18,
}


def example_inputs(
    config: Mapping[str, Any], generator: torch.Generator, batch: int = 3
) -> dict[str, torch.Tensor]:
    """Return inputs for a model of this config: 15 audio tokens, with a condition for each."""
    return {
        "hidden_states": torch.randn(batch, config["in_channels"], 15, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 15, config["condition_dim"], generator=generator),
        "timestep": torch.rand(batch, generator=generator),
    }
