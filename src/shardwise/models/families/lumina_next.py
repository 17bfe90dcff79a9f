"""Lumina-Next: self- and cross-attention added head by head; query and key norms look at all heads together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import LuminaNextDiT2DModel as _LuminaNextDiT2DModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent, SliceParameter

PLAN = {
    # A number for each head, which weighs the cross-attention. Inference does not slice parameters, and so does not
    # find the attentions.
    "layers.*": SliceParameter("gate", 0),
    "layers.*.attn1.to_q": "colwise",
    "layers.*.attn1.to_k": "colwise",
    "layers.*.attn1.to_v": "colwise",
    "layers.*.attn1.norm_q": IfPresent("across_head_norm"),
    "layers.*.attn1.norm_k": IfPresent("across_head_norm"),
    "layers.*.attn2.to_q": "colwise",
    "layers.*.attn2.to_k": "colwise",
    "layers.*.attn2.to_v": "colwise",
    "layers.*.attn2.norm_q": IfPresent("across_head_norm"),
    "layers.*.attn2.norm_k": IfPresent("across_head_norm"),
    "layers.*.attn2.to_out.0": "rowwise",  # of both attentions
    "layers.*.feed_forward.linear_1": "colwise",
    "layers.*.feed_forward.linear_3": "colwise",
    "layers.*.feed_forward.linear_2": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "layers.*.norm1.linear": "rowwise_split_input",
    "norm_out.linear_1": "rowwise_split_input",
}


class LuminaNextDiT2DModel(TensorParallelMixin, _LuminaNextDiT2DModel):  # type: ignore[misc]
    """The transformer of Lumina-Next, with tensor parallelism. Heads: 32, of keys 8; whole: embeddings, RMS norms."""

    _tp_plan = PLAN


RELEASED_CONFIG: dict[str, Any] = {"num_kv_heads": 8}
"""What the class cannot be made without, though it has a default."""

TINY_CONFIG: dict[str, Any] = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 3,
    "hidden_size": 96,
    "num_layers": 2,
    "num_attention_heads": 8,
    "num_kv_heads": 4,
    "multiple_of": 4,
    "ffn_dim_multiplier": 0.3,
    "cross_attention_dim": 20,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 15 image tokens (5 x 3), 7 text tokens, some of them padding.

    The rotary table covers a larger image; half of the angles of a head follow the row, half the column.
    """
    patch, pairs = config["patch_size"], config["hidden_size"] // config["num_attention_heads"] // 4
    angles = torch.outer(torch.arange(6.0), 10000 ** (-torch.arange(pairs) / pairs))
    rows, columns = angles[:, None].expand(6, 6, pairs), angles.expand(6, 6, pairs)
    mask = torch.ones(batch, 7, dtype=torch.long)
    mask[-1, 4:] = 0
    return {
        "hidden_states": torch.randn(batch, config["in_channels"], 5 * patch, 3 * patch, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["cross_attention_dim"], generator=generator),
        "encoder_mask": mask,
        "image_rotary_emb": torch.polar(torch.ones(6, 6, 2 * pairs), torch.cat([rows, columns], -1)),
        "timestep": torch.rand(batch, generator=generator),
        "cross_attention_kwargs": {},
    }


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one_key_head": ({"num_kv_heads": 1}, {}),
    "without_norms": ({"qk_norm": False}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
