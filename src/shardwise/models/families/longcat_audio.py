"""LongCat-AudioDiT: self- and cross-attention whose query and key norms look at all heads together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import LongCatAudioDiTTransformer as _LongCatAudioDiTTransformer

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent

_TEXT_CONVOLUTIONS = 4  # in a row, and not in a list of blocks

PLAN = {
    "blocks.*.self_attn.to_q": "colwise",
    "blocks.*.self_attn.to_k": "colwise",
    "blocks.*.self_attn.to_v": "colwise",
    "blocks.*.self_attn.q_norm": IfPresent("across_head_norm"),
    "blocks.*.self_attn.k_norm": IfPresent("across_head_norm"),
    "blocks.*.self_attn.to_out.0": "rowwise",
    "blocks.*.cross_attn.to_q": IfPresent("colwise"),
    "blocks.*.cross_attn.to_k": IfPresent("colwise"),
    "blocks.*.cross_attn.to_v": IfPresent("colwise"),
    "blocks.*.cross_attn.q_norm": IfPresent("across_head_norm"),
    "blocks.*.cross_attn.k_norm": IfPresent("across_head_norm"),
    "blocks.*.cross_attn.to_out.0": IfPresent("rowwise"),
    "blocks.*.ffn.ff.0": "colwise",
    "blocks.*.ffn.ff.3": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "time_embed.time_mlp.2": "rowwise_split_input",
    "input_embed.proj.2": "rowwise_split_input",
    "text_embed.proj.0": "rowwise_split_input",
    "text_embed.proj.2": "rowwise_split_input",
    # One modulation for all blocks, or one in each.
    "adaln_global_mlp.mlp.1": IfPresent("rowwise_split_input"),
    "blocks.*.adaln_mlp.mlp.1": IfPresent("rowwise_split_input"),
    "norm_out.linear": "rowwise_split_input",
    # Between the two is a norm over all features.
    **{
        f"text_conv_layer.{i}.{name}": IfPresent("rowwise_split_input")
        for i in range(_TEXT_CONVOLUTIONS)
        for name in ("pwconv1", "pwconv2")
    },
    "latent_embed.proj.2": IfPresent("rowwise_split_input"),
    "latent_cond_embedder.proj.0": IfPresent("rowwise_split_input"),
    "latent_cond_embedder.proj.2": IfPresent("rowwise_split_input"),
}


class LongCatAudioDiTTransformer(TensorParallelMixin, _LongCatAudioDiTTransformer):  # type: ignore[misc]
    """The transformer of LongCat-AudioDiT, with tensor parallelism. Heads: 24; whole: small embeddings, tables."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "dit_dim": 48,
    "dit_depth": 2,
    "dit_heads": 4,
    "dit_text_dim": 20,
    "latent_dim": 6,
    "ff_mult": 2.5,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 15 audio tokens, 7 text tokens, of both some padding."""
    mask, text_mask = torch.ones(batch, 15, dtype=torch.bool), torch.ones(batch, 7, dtype=torch.bool)
    mask[-1, 11:], text_mask[-1, 4:] = False, False
    inputs = {
        "hidden_states": torch.randn(batch, 15, config["latent_dim"], generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["dit_text_dim"], generator=generator),
        "encoder_attention_mask": text_mask,
        "attention_mask": mask,
        "timestep": torch.rand(batch, generator=generator),
    }
    if config.get("use_latent_condition", True):
        inputs["latent_cond"] = torch.randn(batch, 15, config["latent_dim"], generator=generator)
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "modulation_in_each_block": ({"adaln_type": "local", "cross_attn_norm": True}, {}),
    "without_options": (
        {"cross_attn": False, "text_conv": False, "qk_norm": False, "use_latent_condition": False},
        {},
    ),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
