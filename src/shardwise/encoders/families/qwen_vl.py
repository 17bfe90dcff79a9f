"""Qwen2.5-VL and Qwen3-VL: decoders whose tokens have three positions, beside a vision tower that stays whole."""

from __future__ import annotations

from typing import Any

import transformers

from shardwise.encoders.mixin import EncoderMixin
from shardwise.encoders.plans import decoder, with_scores


class Qwen2_5_VLForConditionalGeneration(  # noqa: N801  # as transformers calls it
    EncoderMixin,
    transformers.Qwen2_5_VLForConditionalGeneration,  # type: ignore[misc]
):
    """Qwen2.5-VL with its scores, with tensor parallelism.

    Heads: 28 and 4 of keys in 7B; whole: the vision tower, norms.
    """

    sharding_plan = with_scores("model.language_model")


class Qwen2_5_VLTextModel(EncoderMixin, transformers.Qwen2_5_VLTextModel):  # type: ignore[misc]  # noqa: N801
    """The decoder of Qwen2.5-VL, with tensor parallelism. Heads: 28 and 4 of keys in 7B; whole: norms."""

    sharding_plan = decoder()


class Qwen3VLForConditionalGeneration(EncoderMixin, transformers.Qwen3VLForConditionalGeneration):  # type: ignore[misc]
    """Qwen3-VL with its scores, with tensor parallelism.

    Heads: 32 and 8 of keys in 8B; whole: the vision tower, norms.
    """

    sharding_plan = with_scores("model.language_model")


class Qwen3VLModel(EncoderMixin, transformers.Qwen3VLModel):  # type: ignore[misc]
    """Qwen3-VL, with tensor parallelism. Heads: 32 and 8 of keys in 8B; whole: the vision tower, norms."""

    sharding_plan = decoder("language_model")


_TEXT: dict[str, Any] = {
    "vocab_size": 72,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]},
}
_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 48,
}
_TOKENS = {"image_token_id": 70, "video_token_id": 71, "vision_start_token_id": 68, "vision_end_token_id": 69}
_QWEN2_5: dict[str, Any] = {
    "text_config": _TEXT,
    "vision_config": {**_VISION, "window_size": 16, "fullatt_block_indexes": [1]},
    **_TOKENS,
}
_QWEN3: dict[str, Any] = {
    "text_config": {**_TEXT, "head_dim": 6},
    "vision_config": {**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
    **_TOKENS,
}
_TWO = {**_QWEN2_5, "text_config": {**_TEXT, "num_key_value_heads": 2}}

TINY_CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "Qwen2_5_VLForConditionalGeneration": {"": _QWEN2_5, "two key heads": _TWO},
    "Qwen2_5_VLTextModel": {"": _TEXT},
    "Qwen3VLForConditionalGeneration": {"": _QWEN3, "tied": {**_QWEN3, "tie_word_embeddings": True}},
    "Qwen3VLModel": {"": _QWEN3},
}
"""Class -> name of a case -> arguments of its configuration."""
