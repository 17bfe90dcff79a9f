"""Qwen2 and Qwen3: decoders with fewer key heads than query heads; Qwen2's projections have biases, Qwen3's norms."""

from __future__ import annotations

from typing import Any

import transformers

from shardwise.encoders.mixin import EncoderMixin
from shardwise.encoders.plans import decoder, with_scores


class Qwen2Model(EncoderMixin, transformers.Qwen2Model):  # type: ignore[misc]
    """The decoder of Qwen2, with tensor parallelism. Heads: 28 and 4 of keys in 7B; whole: norms."""

    sharding_plan = decoder()


class Qwen2ForCausalLM(EncoderMixin, transformers.Qwen2ForCausalLM):  # type: ignore[misc]
    """Qwen2 with its scores, with tensor parallelism. Heads: 28 and 4 of keys in 7B; whole: norms."""

    sharding_plan = with_scores("model")


class Qwen3Model(EncoderMixin, transformers.Qwen3Model):  # type: ignore[misc]
    """The decoder of Qwen3, with tensor parallelism. Heads: 32 and 8 of keys in 4B; whole: norms."""

    sharding_plan = decoder()


class Qwen3ForCausalLM(EncoderMixin, transformers.Qwen3ForCausalLM):  # type: ignore[misc]
    """Qwen3 with its scores, with tensor parallelism. Heads: 32 and 8 of keys in 4B; whole: norms."""

    sharding_plan = with_scores("model")


_TINY: dict[str, Any] = {
    "vocab_size": 72,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 61,
    "tie_word_embeddings": False,
}
_QWEN2 = {**_TINY, "hidden_size": 48}
_QWEN3 = {**_TINY, "head_dim": 6}

TINY_CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "Qwen2Model": {"": _QWEN2},
    "Qwen2ForCausalLM": {"": _QWEN2, "tied": {**_QWEN2, "tie_word_embeddings": True}},
    "Qwen3Model": {
        "": _QWEN3,
        "two key heads": {**_QWEN3, "num_key_value_heads": 2},
        "one key head": {**_QWEN3, "num_key_value_heads": 1},
        "odd vocabulary": {**_QWEN3, "vocab_size": 73},
    },
    "Qwen3ForCausalLM": {
        "": _QWEN3,
        "tied": {**_QWEN3, "tie_word_embeddings": True},
        "odd vocabulary, tied": {**_QWEN3, "vocab_size": 73, "tie_word_embeddings": True},
    },
}
"""Class -> name of a case -> arguments of its configuration."""
