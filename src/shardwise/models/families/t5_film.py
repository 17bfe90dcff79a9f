"""The spectrogram decoder of music generation: T5 blocks whose inputs are scaled and shifted by the noise level."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import T5FilmDecoder as _T5FilmDecoder

from shardwise.models.mixin import TensorParallelMixin

PLAN = {
    "conditioning_emb.0": "colwise",
    "conditioning_emb.2": "rowwise",
    "decoders.*.layer.0.attention.to_q": "colwise",
    "decoders.*.layer.0.attention.to_k": "colwise",
    "decoders.*.layer.0.attention.to_v": "colwise",
    "decoders.*.layer.0.attention.to_out.0": "rowwise",
    "decoders.*.layer.1.attention.to_q": "colwise",
    "decoders.*.layer.1.attention.to_k": "colwise",
    "decoders.*.layer.1.attention.to_v": "colwise",
    "decoders.*.layer.1.attention.to_out.0": "rowwise",
    "decoders.*.layer.2.DenseReluDense.wi_0": "colwise",
    "decoders.*.layer.2.DenseReluDense.wi_1": "colwise",
    "decoders.*.layer.2.DenseReluDense.wo": "rowwise",
    # Read the embedding of the noise level, which is whole, and their outputs are used whole by every rank.
    "decoders.*.layer.0.FiLMLayer.scale_bias": "rowwise_split_input",
    "decoders.*.layer.2.film.scale_bias": "rowwise_split_input",
}


class T5FilmDecoder(TensorParallelMixin, _T5FilmDecoder):  # type: ignore[misc]
    """The spectrogram decoder of music generation, with tensor parallelism. Heads: 12; whole: embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "input_dims": 6,
    "targets_length": 17,
    "d_model": 20,
    "num_layers": 2,
    "num_heads": 4,
    "d_kv": 12,
    "d_ff": 56,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 15 frames to decode, and encodings of 7 and 5, some of them padding."""
    mask = torch.ones(batch, 7)
    mask[-1, 4:] = 0
    tokens, context = (torch.randn(batch, n, config["d_model"], generator=generator) for n in (7, 5))
    return {
        "encodings_and_masks": [(tokens, mask), (context, torch.ones(batch, 5))],
        "decoder_input_tokens": torch.randn(batch, 15, config["input_dims"], generator=generator),
        "decoder_noise_time": torch.rand(batch, generator=generator),
    }
