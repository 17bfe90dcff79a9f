"""The temporal transformer of video UNets: attention over the frames at each position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import TransformerTemporalModel as _TransformerTemporalModel

from shardwise.models.families.transformer_2d import gate_and_value
from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent, PackedColwiseParallel

PLAN = {
    "proj_in": "rowwise_split_input",
    "transformer_blocks.*.attn1.to_q": "colwise",
    "transformer_blocks.*.attn1.to_k": "colwise",
    "transformer_blocks.*.attn1.to_v": "colwise",
    "transformer_blocks.*.attn1.to_out.0": "rowwise",
    "transformer_blocks.*.attn2.to_q": IfPresent("colwise"),
    "transformer_blocks.*.attn2.to_k": IfPresent("colwise"),
    "transformer_blocks.*.attn2.to_v": IfPresent("colwise"),
    "transformer_blocks.*.attn2.to_out.0": IfPresent("rowwise"),
    "transformer_blocks.*.ff.net.0.proj": PackedColwiseParallel(gate_and_value),
    "transformer_blocks.*.ff.net.2": "rowwise",
    "proj_out": "rowwise_split_input",
}


class TransformerTemporalModel(TensorParallelMixin, _TransformerTemporalModel):  # type: ignore[misc]
    """The temporal transformer, with tensor parallelism. Heads: 8 or 16; whole: norms."""

    _tp_plan = PLAN


RELEASED_CONFIG: dict[str, Any] = {
    "num_attention_heads": 8,
    "attention_head_dim": 40,
    "in_channels": 320,
}
"""The sizes of one in the outermost blocks of a UNet; the class has no defaults of them that work."""

TINY_CONFIG: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 10,
    "in_channels": 12,
    "num_layers": 2,
    "norm_num_groups": 3,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 5 frames of 3 x 2 pixels, which the class takes as one batch.

    Text, where the config has it, is given for each pixel: 7 tokens.
    """
    inputs = {
        "hidden_states": torch.randn(5 * batch, config["in_channels"], 3, 2, generator=generator),
        "num_frames": 5,
    }
    if config.get("cross_attention_dim") and not config["double_self_attention"]:
        text = (7, config["cross_attention_dim"])
        inputs["encoder_hidden_states"] = torch.randn(6 * batch, *text, generator=generator)
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "numbered_frames": (
        {"positional_embeddings": "sinusoidal", "num_positional_embeddings": 9, "activation_fn": "gelu"},
        {},
    ),
    "text": ({"double_self_attention": False, "cross_attention_dim": 20, "attention_bias": True}, {}),
    "one_attention": ({"double_self_attention": False}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
