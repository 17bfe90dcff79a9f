"""Lumina-Image 2.0: single-stream blocks with fewer key and value heads than queries, behind refiners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import Lumina2Transformer2DModel as _Lumina2Transformer2DModel

from shardwise.models.mixin import TensorParallelMixin

PLAN = {
    "noise_refiner.*.attn.to_q": "colwise",
    "noise_refiner.*.attn.to_k": "colwise",
    "noise_refiner.*.attn.to_v": "colwise",
    "noise_refiner.*.attn.to_out.0": "rowwise",
    "noise_refiner.*.feed_forward.linear_1": "colwise",
    "noise_refiner.*.feed_forward.linear_3": "colwise",
    "noise_refiner.*.feed_forward.linear_2": "rowwise",
    "context_refiner.*.attn.to_q": "colwise",
    "context_refiner.*.attn.to_k": "colwise",
    "context_refiner.*.attn.to_v": "colwise",
    "context_refiner.*.attn.to_out.0": "rowwise",
    "context_refiner.*.feed_forward.linear_1": "colwise",
    "context_refiner.*.feed_forward.linear_3": "colwise",
    "context_refiner.*.feed_forward.linear_2": "rowwise",
    "layers.*.attn.to_q": "colwise",
    "layers.*.attn.to_k": "colwise",
    "layers.*.attn.to_v": "colwise",
    "layers.*.attn.to_out.0": "rowwise",
    "layers.*.feed_forward.linear_1": "colwise",
    "layers.*.feed_forward.linear_3": "colwise",
    "layers.*.feed_forward.linear_2": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "noise_refiner.*.norm1.linear": "rowwise_split_input",
    "layers.*.norm1.linear": "rowwise_split_input",
}


class Lumina2Transformer2DModel(TensorParallelMixin, _Lumina2Transformer2DModel):  # type: ignore[misc]
    """The transformer of Lumina-Image 2.0, with tensor parallelism. Heads: 24, of keys 8; whole: embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "patch_size": 2,
    "sample_size": 16,
    "in_channels": 3,
    "out_channels": 5,
    "hidden_size": 48,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 8,
    "num_kv_heads": 4,
    "multiple_of": 4,
    "ffn_dim_multiplier": 1.25,
    "axes_dim_rope": (2, 2, 2),
    "axes_lens": (16, 8, 8),
    "cap_feat_dim": 20,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 15 image tokens (5 x 3), 7 text tokens, some of them padding."""
    height, width = 5 * config["patch_size"], 3 * config["patch_size"]
    mask = torch.ones(batch, 7, dtype=torch.bool)
    mask[-1, 4:] = False
    return {
        "hidden_states": torch.randn(batch, config["in_channels"], height, width, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["cap_feat_dim"], generator=generator),
        "encoder_attention_mask": mask,
        "timestep": torch.rand(batch, generator=generator),
    }


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one_key_head": ({"num_kv_heads": 1}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
