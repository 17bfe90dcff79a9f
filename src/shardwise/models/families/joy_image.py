"""JoyImage-Edit: double-stream blocks whose attention fuses queries, keys and values of each stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import JoyImageEditTransformer3DModel as _JoyImageEditTransformer3DModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import PackedColwiseParallel

PLAN = {
    "double_blocks.*.img_mlp.net.0.proj": "colwise",
    "double_blocks.*.img_mlp.net.2": "rowwise",
    "double_blocks.*.txt_mlp.net.0.proj": "colwise",
    "double_blocks.*.txt_mlp.net.2": "rowwise",
    "double_blocks.*.attn.img_attn_qkv": PackedColwiseParallel([1, 1, 1]),
    "double_blocks.*.attn.img_attn_proj": "rowwise",
    "double_blocks.*.attn.txt_attn_qkv": PackedColwiseParallel([1, 1, 1]),
    "double_blocks.*.attn.txt_attn_proj": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "condition_embedder.time_embedder.linear_2": "rowwise_split_input",
    "condition_embedder.time_proj": "rowwise_split_input",
    "condition_embedder.text_embedder.linear_1": "rowwise_split_input",
    "condition_embedder.text_embedder.linear_2": "rowwise_split_input",
}


class JoyImageEditTransformer3DModel(TensorParallelMixin, _JoyImageEditTransformer3DModel):  # type: ignore[misc]
    """The transformer of JoyImage-Edit, with tensor parallelism. Heads: 24; whole: patches, tables, output, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "patch_size": [1, 2, 2],
    "in_channels": 3,
    "out_channels": 5,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "text_dim": 20,
    "mlp_width_ratio": 1.5,
    "num_layers": 2,
    "rope_dim_list": [2, 4, 6],
}


def example_inputs(
    config: Mapping[str, Any], generator: torch.Generator, batch: int = 3, items: int = 0
) -> dict[str, torch.Tensor]:
    """Return inputs for a model of this config: 45 video tokens (3 frames of 5 x 3), 7 text tokens.

    With `items`, so many images of 5 x 3 tokens instead, the last of which is drawn from the others.
    """
    frames, height, width = (n * patch for n, patch in zip((3, 5, 3), config["patch_size"], strict=True))
    video = (config["in_channels"], frames, height, width)
    images = (items, config["in_channels"], 1, height, width)
    return {
        "hidden_states": torch.randn(batch, *(images if items else video), generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["text_dim"], generator=generator),
        "timestep": torch.randint(0, 1000, (batch,), generator=generator),
    }


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "several_images": ({}, {"items": 3}),
    "rotary_positions_for_text": ({"rope_type": "mrope"}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
