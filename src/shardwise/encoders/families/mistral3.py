"""Mistral 3, the text encoder of FLUX.2: a Mistral beside a vision tower that stays whole."""

from __future__ import annotations

from typing import Any

import transformers

from shardwise.encoders.mixin import EncoderMixin
from shardwise.encoders.plans import decoder, with_scores


class Mistral3ForConditionalGeneration(EncoderMixin, transformers.Mistral3ForConditionalGeneration):  # type: ignore[misc]
    """Mistral 3 with its scores, with tensor parallelism.

    Heads: 32 and 8 of keys in Small 3.1; whole: the vision tower and its projector, norms.
    """

    sharding_plan = with_scores("model.language_model")


class Mistral3Model(EncoderMixin, transformers.Mistral3Model):  # type: ignore[misc]
    """Mistral 3, with tensor parallelism. Heads: 32 and 8 of keys; whole: the vision tower and its projector, norms."""

    sharding_plan = decoder("language_model")


_TEXT: dict[str, Any] = {
    "model_type": "mistral",
    "vocab_size": 72,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
_VISION: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 7,
}
_TINY: dict[str, Any] = {"text_config": _TEXT, "vision_config": _VISION, "image_token_index": 70}

TINY_CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "Mistral3ForConditionalGeneration": {
        "": {**_TINY, "tie_word_embeddings": False},
        "tied": {**_TINY, "tie_word_embeddings": True},
    },
    "Mistral3Model": {"": _TINY},
}
"""Class -> name of a case -> arguments of its configuration."""
