"""The 2D transformer of VQ-Diffusion, of the first DiT and PixArt, and of the attention blocks of many UNets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import Transformer2DModel as _Transformer2DModel
from torch import nn

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent, PackedColwiseParallel


def gate_and_value(proj: nn.Linear) -> list[int]:
    """Return the blocks of a feed-forward's first Linear: two halves where its activation is a gated one.

    The blocks of diffusers widen fourfold, and a gated activation takes that twice.
    """
    return [1, 1] if proj.out_features == 8 * proj.in_features else [1]


PLAN = {
    "transformer_blocks.*.norm1.emb.timestep_embedder.linear_1": IfPresent("colwise"),
    "transformer_blocks.*.norm1.emb.timestep_embedder.linear_2": IfPresent("rowwise"),
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
    # Lone projections of whole inputs: modulations, embedders, and the scores of all codes.
    "transformer_blocks.*.norm1.linear": IfPresent("rowwise_split_input"),
    "transformer_blocks.*.norm2.linear": IfPresent("rowwise_split_input"),
    "out": IfPresent("rowwise_split_input"),
    "proj_out_1": IfPresent("rowwise_split_input"),
    "adaln_single.emb.timestep_embedder.linear_2": IfPresent("rowwise_split_input"),
    "adaln_single.linear": IfPresent("rowwise_split_input"),
    "caption_projection.linear_1": IfPresent("rowwise_split_input"),
    "caption_projection.linear_2": IfPresent("rowwise_split_input"),
}


class Transformer2DModel(TensorParallelMixin, _Transformer2DModel):  # type: ignore[misc]
    """The 2D transformer, with tensor parallelism. Heads: 16; whole: embeddings, norms, a UNet's `proj_in`, `proj_out`.

    The two are convolutions in most UNets, so that no plan fits both forms.
    """

    _tp_plan = PLAN


RELEASED_CONFIG: dict[str, Any] = {
    "attention_head_dim": 64,
    "num_layers": 36,
    "cross_attention_dim": 512,
    "attention_bias": True,
    "sample_size": 32,
    "num_vector_embeds": 4097,
    "activation_fn": "geglu-approximate",
    "num_embeds_ada_norm": 100,
    "norm_type": "ada_norm",
}
"""The sizes of VQ-Diffusion; the class has no defaults of them that work."""

TINY_CONFIG: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "num_layers": 2,
    "cross_attention_dim": 20,
    "attention_bias": True,
    "sample_size": 5,
    "num_vector_embeds": 31,
    "activation_fn": "geglu-approximate",
    "num_embeds_ada_norm": 100,
    "norm_type": "ada_norm",
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: codes of every position, an image of 5 x 5 patches, or of 5 x 3 pixels.

    There are 7 text tokens, some of them padding. A modulation without label takes one timestep for all samples.
    """
    patch, codes, norm = config.get("patch_size"), config.get("num_vector_embeds"), config.get("norm_type")
    side = 5 * patch if patch else 5
    image: tuple[Any, ...] = (batch, config.get("in_channels"), side, side if patch else 3)
    inputs: dict[str, Any] = {
        "hidden_states": torch.randint(0, codes, (batch, config["sample_size"] ** 2), generator=generator)
        if codes
        else torch.randn(*image, generator=generator),
    }
    if config.get("cross_attention_dim"):
        text = config.get("caption_channels") or config["cross_attention_dim"]
        inputs["encoder_hidden_states"] = torch.randn(batch, 7, text, generator=generator)
        inputs["encoder_attention_mask"] = torch.ones(batch, 7)
        inputs["encoder_attention_mask"][-1, 4:] = 0
    if norm == "ada_norm":
        inputs["timestep"] = torch.tensor(config["num_embeds_ada_norm"] // 2)
    elif norm in ("ada_norm_zero", "ada_norm_single"):
        inputs["timestep"] = torch.randint(0, 1000, (batch,), generator=generator)
    if norm == "ada_norm_zero":
        inputs["class_labels"] = torch.randint(
            0, config["num_embeds_ada_norm"], (batch,), generator=generator
        )
    return inputs


_CONTINUOUS: dict[str, Any] = {
    "in_channels": 6,
    "norm_num_groups": 3,
    "num_vector_embeds": None,
    "activation_fn": "geglu",
    "num_embeds_ada_norm": None,
    "norm_type": "layer_norm",
}
_PATCHED: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 5,
    "patch_size": 2,
    "sample_size": 10,
    "num_vector_embeds": None,
    "activation_fn": "gelu-approximate",
}

TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "continuous": (_CONTINUOUS, {}),
    "continuous_linear": ({**_CONTINUOUS, "use_linear_projection": True, "attention_bias": False}, {}),
    "two_self_attentions": (
        {**_CONTINUOUS, "cross_attention_dim": None, "double_self_attention": True},
        {},
    ),
    "only_cross_attention": ({**_CONTINUOUS, "only_cross_attention": True}, {}),
    "patched_with_labels": ({**_PATCHED, "cross_attention_dim": None, "norm_type": "ada_norm_zero"}, {}),
    "patched_with_captions": (
        {**_PATCHED, "cross_attention_dim": 48, "caption_channels": 20, "norm_type": "ada_norm_single"},
        {},
    ),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
