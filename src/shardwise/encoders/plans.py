"""The plan that decoders of language models have in common, wherever in a model they are."""

from __future__ import annotations

from shardwise.plan.resolve import Plan

_DECODER = {
    "embed_tokens": "embedding_rowwise",
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}


def decoder(at: str = "") -> Plan:
    """Return the plan of a decoder, which is the model itself or the module of this path in it."""
    return {f"{at}.{pattern}".lstrip("."): style for pattern, style in _DECODER.items()}


def with_scores(at: str) -> Plan:
    """Return the plan of a model that scores the next token, its decoder being at this path.

    The scores are put together on every rank; their weight may be that of the vocabulary.
    """
    return {**decoder(at), "lm_head": "colwise_gather_output"}
