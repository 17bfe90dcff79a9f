"""Bria FIBO 2: the blocks of Z-Image; some also read the text, which a perceiver squeezes into tokens of the stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import BriaFibo2Transformer2DModel as _BriaFibo2Transformer2DModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent

PLAN = {
    "noise_refiner.*.attention.to_q": "colwise",
    "noise_refiner.*.attention.to_k": "colwise",
    "noise_refiner.*.attention.to_v": "colwise",
    "noise_refiner.*.attention.to_out.0": "rowwise",
    "noise_refiner.*.feed_forward.w1": "colwise",
    "noise_refiner.*.feed_forward.w3": "colwise",
    "noise_refiner.*.feed_forward.w2": "rowwise",
    "perceiver.layers.*.cross_attention.to_q": "colwise",
    "perceiver.layers.*.cross_attention.to_k": "colwise",
    "perceiver.layers.*.cross_attention.to_v": "colwise",
    "perceiver.layers.*.cross_attention.to_out.0": "rowwise",
    "perceiver.layers.*.self_attention.to_q": "colwise",
    "perceiver.layers.*.self_attention.to_k": "colwise",
    "perceiver.layers.*.self_attention.to_v": "colwise",
    "perceiver.layers.*.self_attention.to_out.0": "rowwise",
    "perceiver.layers.*.ffn.w1": "colwise",
    "perceiver.layers.*.ffn.w3": "colwise",
    "perceiver.layers.*.ffn.w2": "rowwise",
    "layers.*.attention.to_q": "colwise",
    "layers.*.attention.to_k": "colwise",
    "layers.*.attention.to_v": "colwise",
    "layers.*.attention.to_out.0": "rowwise",
    # In the blocks of `injection_layer_ids`.
    "layers.*.cross_attention.to_q": IfPresent("colwise"),
    "layers.*.cross_attention.to_k": IfPresent("colwise"),
    "layers.*.cross_attention.to_v": IfPresent("colwise"),
    "layers.*.cross_attention.to_out.0": IfPresent("rowwise"),
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "layers.*.adaLN_modulation.0": "rowwise_split_input",
}


class BriaFibo2Transformer2DModel(TensorParallelMixin, _BriaFibo2Transformer2DModel):  # type: ignore[misc]
    """The transformer of Bria FIBO 2, with tensor parallelism. Heads: 28; whole: embeddings, queries, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "in_channels": 3,
    "patch_size": 2,
    "dim": 48,
    "n_layers": 3,
    "n_refiner_layers": 2,
    "n_heads": 4,
    "cap_feat_dim": 20,
    "injection_layer_ids": (1,),
    "perceiver_num_layers": 2,
    "min_num_gist_tokens": 3,
    "max_num_gist_tokens": 7,
    "gist_step": 2,
    "gist_min_text_len": 4,
    "gist_max_text_len": 9,
    "axes_dims": (2, 4, 6),
    "axes_lens": (16, 8, 8),
}


def example_inputs(
    config: Mapping[str, Any], generator: torch.Generator, batch: int = 3, edit: bool = True
) -> dict[str, Any]:
    """Return inputs for a model of this config: 15 image tokens (5 x 3) and 9 text tokens.

    To edit there is an image of 6 tokens (2 x 3) beside it, and some of the text is padding, so that it is squeezed
    into fewer tokens.
    """
    patch, channels = config["patch_size"], config["in_channels"]
    text = (1 + len(config["injection_layer_ids"]), 9, config["cap_feat_dim"])
    inputs: dict[str, Any] = {
        "hidden_states": torch.randn(batch, channels, 5 * patch, 3 * patch, generator=generator),
        "encoder_hidden_states": torch.randn(batch, *text, generator=generator),
        "timestep": torch.rand(batch, generator=generator),
    }
    if edit:
        mask = torch.ones(batch, 9, dtype=torch.bool)
        mask[-1, 4:] = False
        image = torch.randn(batch, channels, 2 * patch, 3 * patch, generator=generator)
        inputs |= {"encoder_attention_mask": mask, "context_latents": [image]}
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text_to_image": ({}, {"edit": False}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
