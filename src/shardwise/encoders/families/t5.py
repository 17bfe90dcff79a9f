"""T5 and UMT5: attentions with a bias by distance, for each head, that is added to their scores."""

from __future__ import annotations

from typing import Any

import transformers

from shardwise.encoders.mixin import EncoderMixin
from shardwise.plan.styles import IfPresent, SliceParameter

PLAN = {
    # Two names of one weight.
    "shared": "embedding_rowwise",
    "encoder.embed_tokens": "embedding_rowwise",
    "encoder.block.*.layer.0.SelfAttention.q": "colwise",
    "encoder.block.*.layer.0.SelfAttention.k": "colwise",
    "encoder.block.*.layer.0.SelfAttention.v": "colwise",
    # One number for each head and distance: in T5's first block, whose bias the others are given, in all of UMT5's.
    "encoder.block.*.layer.0.SelfAttention.relative_attention_bias": SliceParameter("weight", 1),
    "encoder.block.*.layer.0.SelfAttention.o": "rowwise",
    "encoder.block.*.layer.1.DenseReluDense.wi": IfPresent("colwise"),
    "encoder.block.*.layer.1.DenseReluDense.wi_0": IfPresent("colwise"),
    "encoder.block.*.layer.1.DenseReluDense.wi_1": IfPresent("colwise"),
    "encoder.block.*.layer.1.DenseReluDense.wo": "rowwise",
}


class T5EncoderModel(EncoderMixin, transformers.T5EncoderModel):  # type: ignore[misc]
    """The encoder of T5, with tensor parallelism. Heads: 64 in XXL; whole: norms."""

    sharding_plan = PLAN


class UMT5EncoderModel(EncoderMixin, transformers.UMT5EncoderModel):  # type: ignore[misc]
    """The encoder of UMT5, with tensor parallelism. Heads: 64 in XXL; whole: norms."""

    sharding_plan = PLAN


_TINY: dict[str, Any] = {
    "vocab_size": 72,
    "d_model": 40,
    "d_kv": 6,
    "d_ff": 56,
    "num_layers": 3,
    "num_heads": 8,
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 9,
    "feed_forward_proj": "gated-gelu",
}

TINY_CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "T5EncoderModel": {"": _TINY, "relu": {**_TINY, "feed_forward_proj": "relu"}},
    "UMT5EncoderModel": {"": _TINY},
}
"""Class -> name of a case -> arguments of its configuration."""
