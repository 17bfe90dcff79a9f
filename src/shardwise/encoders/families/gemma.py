"""Gemma 2 and 3: decoders that scale what they look up, and mix layers with and without a sliding window."""

from __future__ import annotations

from typing import Any

import transformers

from shardwise.encoders.mixin import EncoderMixin
from shardwise.encoders.plans import decoder, with_scores


class Gemma2Model(EncoderMixin, transformers.Gemma2Model):  # type: ignore[misc]
    """The decoder of Gemma 2, with tensor parallelism. Heads: 8 and 4 of keys in 2B; whole: norms."""

    sharding_plan = decoder()


class Gemma3TextModel(EncoderMixin, transformers.Gemma3TextModel):  # type: ignore[misc]
    """The decoder of Gemma 3, with tensor parallelism. Heads: 8 and 4 of keys in 4B; whole: norms."""

    sharding_plan = decoder()


class Gemma3ForConditionalGeneration(EncoderMixin, transformers.Gemma3ForConditionalGeneration):  # type: ignore[misc]
    """Gemma 3 with images and scores, with tensor parallelism.

    Heads: 16 and 8 of keys in 12B; whole: the vision tower and its projector, norms.
    """

    sharding_plan = with_scores("model.language_model")


_TINY: dict[str, Any] = {
    "vocab_size": 72,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "pad_token_id": 40,
    "query_pre_attn_scalar": 9,
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_ONE_KEY_HEAD = {**_TINY, "num_key_value_heads": 1}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
_TOKENS = {"mm_tokens_per_image": 4, "image_token_index": 70, "boi_token_index": 68, "eoi_token_index": 69}

TINY_CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "Gemma2Model": {"": _TINY},
    "Gemma3ForConditionalGeneration": {"": {"text_config": _TINY, "vision_config": _VISION, **_TOKENS}},
    "Gemma3TextModel": {"": _TINY, "one key head": _ONE_KEY_HEAD},
}
"""Class -> name of a case -> arguments of its configuration."""
