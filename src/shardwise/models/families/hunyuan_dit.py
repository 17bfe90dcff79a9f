"""Hunyuan-DiT: self- and cross-attention, and long skip connections from the first half of the blocks to the second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import HunyuanDiT2DModel as _HunyuanDiT2DModel

from shardwise.models.mixin import TensorParallelMixin

PLAN = {
    # Lone projections of whole inputs: the text of T5, the timestep and what is told of the image.
    "text_embedder.linear_1": "rowwise_split_input",
    "text_embedder.linear_2": "rowwise_split_input",
    "time_extra_emb.timestep_embedder.linear_2": "rowwise_split_input",
    "time_extra_emb.extra_embedder.linear_1": "rowwise_split_input",
    "time_extra_emb.extra_embedder.linear_2": "rowwise_split_input",
    "blocks.*.norm1.linear": "rowwise_split_input",
    "blocks.*.attn1.to_q": "colwise",
    "blocks.*.attn1.to_k": "colwise",
    "blocks.*.attn1.to_v": "colwise",
    "blocks.*.attn1.to_out.0": "rowwise",
    "blocks.*.attn2.to_q": "colwise",
    "blocks.*.attn2.to_k": "colwise",
    "blocks.*.attn2.to_v": "colwise",
    "blocks.*.attn2.to_out.0": "rowwise",
    "blocks.*.ff.net.0.proj": "colwise",
    "blocks.*.ff.net.2": "rowwise",
    "blocks.*.skip_linear": "rowwise_split_input",  # in the second half
    "norm_out.linear": "rowwise_split_input",
}


class HunyuanDiT2DModel(TensorParallelMixin, _HunyuanDiT2DModel):  # type: ignore[misc]
    """The transformer of Hunyuan-DiT, with tensor parallelism. Heads: 16; whole: embeddings, norms, the text pooler.

    The pooler hands the weights of its Linears to one function, which no style can follow.
    """

    _tp_plan = PLAN


RELEASED_CONFIG: dict[str, Any] = {
    "in_channels": 4,
    "patch_size": 2,
    "sample_size": 128,
    "hidden_size": 1408,
    "num_layers": 40,
    "mlp_ratio": 4.3637,
}
"""The sizes of Hunyuan-DiT 1.1; the class has no defaults of them that work."""

TINY_CONFIG: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 3,
    "patch_size": 2,
    "sample_size": 16,
    "hidden_size": 48,
    "num_layers": 6,
    "mlp_ratio": 2.5,
    "cross_attention_dim": 20,
    "cross_attention_dim_t5": 16,
    "pooled_projection_dim": 28,
    "text_len": 7,
    "text_len_t5": 5,
    "use_style_cond_and_image_meta_size": True,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 15 image tokens (5 x 3), as much text as it takes, some padding."""
    height, width = 5 * config["patch_size"], 3 * config["patch_size"]
    bert, t5 = config["text_len"], config["text_len_t5"]
    masks = torch.ones(batch, bert + t5)
    masks[-1, 4:] = 0
    angles = torch.rand(15, config["attention_head_dim"] // 2, generator=generator).repeat_interleave(2, 1)
    inputs = {
        "hidden_states": torch.randn(batch, config["in_channels"], height, width, generator=generator),
        "timestep": torch.randint(0, 1000, (batch,), generator=generator).float(),
        "encoder_hidden_states": torch.randn(batch, bert, config["cross_attention_dim"], generator=generator),
        "text_embedding_mask": masks[:, :bert],
        "encoder_hidden_states_t5": torch.randn(
            batch, t5, config["cross_attention_dim_t5"], generator=generator
        ),
        "text_embedding_mask_t5": masks[:, bert:],
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }
    if config["use_style_cond_and_image_meta_size"]:
        inputs["image_meta_size"] = torch.rand(batch, 6, generator=generator) * 1024
        inputs["style"] = torch.zeros(batch, dtype=torch.long)
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "without_style": ({"use_style_cond_and_image_meta_size": False}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
