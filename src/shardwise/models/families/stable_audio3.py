"""Stable Audio 3: differential attention, the difference of two, whose fused projections make five or three parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import StableAudio3DiTModel as _StableAudio3DiTModel
from torch import nn

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import PackedColwiseParallel


def parts_as_wide_as_the_input(projection: nn.Linear) -> list[int]:
    """Return the blocks of a fused projection: two queries, two keys and values, or one of each.

    All are as wide as the model. How many there are follows `use_differential_attention` of the config, and the
    model does not store it on the Linear.
    """
    return [1] * (projection.out_features // projection.in_features)


PLAN = {
    "transformer_blocks.*.self_attn.to_qkv": PackedColwiseParallel(parts_as_wide_as_the_input),
    "transformer_blocks.*.self_attn.to_out": "rowwise",
    "transformer_blocks.*.cross_attn.to_q": PackedColwiseParallel(parts_as_wide_as_the_input),
    "transformer_blocks.*.cross_attn.to_kv": PackedColwiseParallel(parts_as_wide_as_the_input),
    "transformer_blocks.*.cross_attn.to_out": "rowwise",
    "transformer_blocks.*.ff.proj_in": PackedColwiseParallel([1, 1]),  # value and gate
    "transformer_blocks.*.ff.proj_out": "rowwise",
    "transformer_blocks.*.to_local_embed.0": "colwise",
    "transformer_blocks.*.to_local_embed.2": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "to_timestep_embed.2": "rowwise_split_input",
    "to_cond_embed.2": "rowwise_split_input",
    "to_global_embed.2": "rowwise_split_input",
    "global_cond_embedder.0": "rowwise_split_input",
    "global_cond_embedder.2": "rowwise_split_input",
}


class StableAudio3DiTModel(TensorParallelMixin, _StableAudio3DiTModel):  # type: ignore[misc]
    """The transformer of Stable Audio 3, with tensor parallelism. Heads: 24; whole: convolutions, tables, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "io_channels": 5,
    "embed_dim": 48,
    "depth": 2,
    "num_heads": 4,
    "cond_token_dim": 20,
    "global_cond_dim": 28,
    "local_add_cond_dim": 7,
    "timestep_features_dim": 18,
    "ff_mult": 1.5,
    "num_memory_tokens": 3,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 15 audio tokens with a part to fill in, 7 of text, some padding."""
    mask = torch.ones(batch, 7, dtype=torch.bool)
    mask[-1, 4:] = False
    return {
        "hidden_states": torch.randn(batch, config["io_channels"], 15, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["cond_token_dim"], generator=generator),
        "encoder_attention_mask": mask,
        "global_hidden_states": torch.randn(batch, config["global_cond_dim"], generator=generator),
        "local_add_cond": torch.randn(batch, config["local_add_cond_dim"], 15, generator=generator),
        "timestep": torch.rand(batch, generator=generator),
    }


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain_attention": ({"use_differential_attention": False}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
