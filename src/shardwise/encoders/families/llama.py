"""Llama and Mistral: decoders with fewer key heads than query heads."""

from __future__ import annotations

from typing import Any

import transformers

from shardwise.encoders.mixin import EncoderMixin
from shardwise.encoders.plans import decoder, with_scores


class LlamaModel(EncoderMixin, transformers.LlamaModel):  # type: ignore[misc]
    """The decoder of Llama, with tensor parallelism. Heads: 32 and 8 of keys in 3.1 8B; whole: norms."""

    sharding_plan = decoder()


class LlamaForCausalLM(EncoderMixin, transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Llama with its scores, with tensor parallelism. Heads: 32 and 8 of keys in 3.1 8B; whole: norms."""

    sharding_plan = with_scores("model")


class MistralModel(EncoderMixin, transformers.MistralModel):  # type: ignore[misc]
    """The decoder of Mistral, with tensor parallelism. Heads: 32 and 8 of keys; whole: norms."""

    sharding_plan = decoder()


class MistralForCausalLM(EncoderMixin, transformers.MistralForCausalLM):  # type: ignore[misc]
    """Mistral with its scores, with tensor parallelism. Heads: 32 and 8 of keys; whole: norms."""

    sharding_plan = with_scores("model")


class Ministral3ForCausalLM(EncoderMixin, transformers.Ministral3ForCausalLM):  # type: ignore[misc]
    """Ministral 3 with its scores, with tensor parallelism. Heads: 32 and 8 of keys; whole: norms."""

    sharding_plan = with_scores("model")


_TINY: dict[str, Any] = {
    "vocab_size": 72,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "pad_token_id": 5,
    "tie_word_embeddings": False,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 4,
    "llama_4_scaling_beta": 0.1,
}
_TWO_KEY_HEADS = {"two key heads": {**_TINY, "num_key_value_heads": 2}}

TINY_CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "LlamaModel": {"": {**_TINY, "attention_bias": True, "mlp_bias": True}, **_TWO_KEY_HEADS},
    "LlamaForCausalLM": {"": _TINY, "tied": {**_TINY, "tie_word_embeddings": True}},
    "Ministral3ForCausalLM": {"": {**_TINY, "rope_parameters": _YARN}},
    "MistralForCausalLM": {"": _TINY},
    "MistralModel": {"": {**_TINY, "sliding_window": 3}, **_TWO_KEY_HEADS},
}
"""Class -> name of a case -> arguments of its configuration."""
