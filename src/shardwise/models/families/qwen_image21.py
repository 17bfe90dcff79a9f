"""Qwen-Image 2.1: single-stream blocks over text and images in one causal sequence; one modulation for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import QwenImage21Transformer2DModel as _QwenImage21Transformer2DModel

from shardwise.models.mixin import TensorParallelMixin

PLAN = {
    "transformer_blocks.*.attn.to_q": "colwise",
    "transformer_blocks.*.attn.to_k": "colwise",
    "transformer_blocks.*.attn.to_v": "colwise",
    "transformer_blocks.*.attn.to_out.0": "rowwise",
    "transformer_blocks.*.img_mlp.proj": "colwise",
    "transformer_blocks.*.img_mlp.gate_layer": "colwise",
    "transformer_blocks.*.img_mlp.out": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "time_text_embed.timestep_embedder.linear_2": "rowwise_split_input",
    "txt_in.in_layer": "rowwise_split_input",
    "txt_in.out_layer": "rowwise_split_input",
    "modulation.1": "rowwise_split_input",
    "norm_out.linear": "rowwise_split_input",
}


class QwenImage21Transformer2DModel(TensorParallelMixin, _QwenImage21Transformer2DModel):  # type: ignore[misc]
    """The transformer of Qwen-Image 2.1, with tensor parallelism. Heads: 32; whole: small embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 6,
    "out_channels": 5,
    "num_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "context_in_dim": 20,
    "axes_dims_rope": (2, 4, 6),
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 9 text tokens, some of them padding, around an image to edit.

    The image to edit has 8 tokens (4 x 2), for which the text has 2 slots; the image to draw has 24 (4 x 6).
    """
    images = torch.zeros(batch, 11 + 6, dtype=torch.bool)
    images[:, 3:5], images[:, 11:] = True, True
    mask = torch.ones(batch, 11, dtype=torch.bool)
    mask[-1, 8:] = False
    channels = config["in_channels"] * config["patch_size"] ** 2
    return {
        "hidden_states": torch.randn(batch, 8 + 24, channels, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 11, config["context_in_dim"], generator=generator),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.rand(batch, generator=generator),
        "img_shapes": [[(1, 4, 2), (1, 4, 6)]] * batch,
        "img_mask": images,
    }


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one_time_for_all_tokens": ({"causal_condition": False}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
