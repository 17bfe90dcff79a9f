"""MiniMax Music 3, the depth decoder: predicts the codes of one audio frame, one codebook after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import MiniMaxMusic3RVQDepthDecoder as _MiniMaxMusic3RVQDepthDecoder

from shardwise.models.mixin import TensorParallelMixin

PLAN = {
    "layers.*.attn.to_q": "colwise",
    "layers.*.attn.to_k": "colwise",
    "layers.*.attn.to_v": "colwise",
    "layers.*.attn.to_out": "rowwise",
    "layers.*.gate_proj": "colwise",
    "layers.*.up_proj": "colwise",
    "layers.*.down_proj": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output. The pipeline
    # calls them around the forward.
    "projection": "rowwise_split_input",
    "audio_heads.*": "rowwise_split_input",
}


class MiniMaxMusic3RVQDepthDecoder(TensorParallelMixin, _MiniMaxMusic3RVQDepthDecoder):  # type: ignore[misc]
    """The depth decoder of MiniMax Music 3, with tensor parallelism. Heads: 16; whole: embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "hidden_size": 48,
    "num_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "audio_vocab_size": 10,
    "num_codebooks": 3,
    "max_position_embeddings": 9,
}


def example_inputs(
    config: Mapping[str, Any], generator: torch.Generator, batch: int = 3
) -> dict[str, torch.Tensor]:
    """Return inputs for a model of this config: the 7 steps of a frame so far."""
    return {"inputs_embeds": torch.randn(batch, 7, config["hidden_size"], generator=generator)}
