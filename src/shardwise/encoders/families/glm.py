"""GLM: a decoder that fuses gate and up in one projection."""

from __future__ import annotations

from typing import Any

import transformers

from shardwise.encoders.mixin import EncoderMixin
from shardwise.encoders.plans import decoder
from shardwise.plan.styles import PackedColwiseParallel

PLAN = {key: style for key, style in decoder().items() if not key.endswith(("gate_proj", "up_proj"))} | {
    "layers.*.mlp.gate_up_proj": PackedColwiseParallel([1, 1]),
}


class GlmModel(EncoderMixin, transformers.GlmModel):  # type: ignore[misc]
    """The decoder of GLM-4, with tensor parallelism. Heads: 32 and 2 of keys in 9B; whole: norms."""

    sharding_plan = PLAN


_TINY: dict[str, Any] = {
    "vocab_size": 72,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "pad_token_id": 5,
    "attention_bias": True,
}

TINY_CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "GlmModel": {"": _TINY, "two key heads": {**_TINY, "num_key_value_heads": 2}},
}
"""Class -> name of a case -> arguments of its configuration."""
