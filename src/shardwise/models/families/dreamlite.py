"""The transformers inside of DreamLite's U-Net: blocks over the places of an image, some without self-attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import DreamLiteTransformer2DModel as _DreamLiteTransformer2DModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent, PackedColwiseParallel

PLAN = {
    "transformer_blocks.*.attn1.to_q": IfPresent("colwise"),
    "transformer_blocks.*.attn1.to_k": IfPresent("colwise"),
    "transformer_blocks.*.attn1.to_v": IfPresent("colwise"),
    "transformer_blocks.*.attn1.to_out.0": IfPresent("rowwise"),
    # Reads the text.
    "transformer_blocks.*.attn2.to_q": IfPresent("colwise"),
    "transformer_blocks.*.attn2.to_k": IfPresent("colwise"),
    "transformer_blocks.*.attn2.to_v": IfPresent("colwise"),
    "transformer_blocks.*.attn2.to_out.0": IfPresent("rowwise"),
    "transformer_blocks.*.ff.net.0.proj": PackedColwiseParallel([1, 1]),
    "transformer_blocks.*.ff.net.2": "rowwise",
}


class DreamLiteTransformer2DModel(TensorParallelMixin, _DreamLiteTransformer2DModel):  # type: ignore[misc]
    """A transformer of DreamLite's U-Net, with tensor parallelism. Heads: 16; whole: `proj_in`, `proj_out`, norms.

    `proj_in` and `proj_out` are convolutions in some configurations, which no style shards.
    """

    _tp_plan = PLAN


RELEASED_CONFIG: dict[str, Any] = {"in_channels": 1408, "cross_attention_dim": 1280}
"""The width of the default heads, and of the U-Net's text; the class has no default of its channels."""

TINY_CONFIG: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 18,
    "num_layers": 2,
    "norm_num_groups": 3,
    "cross_attention_dim": 20,
    "qk_norm": "rms_norm",
    "ff_mult": 3,
    "use_linear_projection": True,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 15 places (5 x 3), 7 tokens of text, some of them padding."""
    image = torch.randn(batch, config["in_channels"], 5, 3, generator=generator)
    inputs: dict[str, Any] = {"hidden_states": image, "return_dict": False}  # its output class is deprecated
    if config["cross_attention_dim"] is not None:
        mask = torch.ones(batch, 7, dtype=torch.bool)
        mask[-1, 4:] = False
        inputs["encoder_hidden_states"] = torch.randn(
            batch, 7, config["cross_attention_dim"], generator=generator
        )
        inputs["encoder_attention_mask"] = mask
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "without_self_attention": ({"use_self_attention": False, "use_linear_projection": False}, {}),
    "without_text": ({"cross_attention_dim": None, "qk_norm": None}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
