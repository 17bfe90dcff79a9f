"""Cosmos: self- and cross-attention, each under a modulation of low rank; Cosmos 2.5 also reads an image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import CosmosTransformer3DModel as _CosmosTransformer3DModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import DivideAttributes, IfPresent

PLAN = {
    "time_embed.t_embedder.linear_1": "rowwise_split_input",
    "time_embed.t_embedder.linear_2": "rowwise_split_input",
    "transformer_blocks.*.norm1.linear_1": "colwise",
    "transformer_blocks.*.norm1.linear_2": "rowwise",
    "transformer_blocks.*.attn1.to_q": "colwise",
    "transformer_blocks.*.attn1.to_k": "colwise",
    "transformer_blocks.*.attn1.to_v": "colwise",
    "transformer_blocks.*.attn1.to_out.0": "rowwise",
    "transformer_blocks.*.norm2.linear_1": "colwise",
    "transformer_blocks.*.norm2.linear_2": "rowwise",
    # With an image, its code takes the width of a head from the width of the output.
    "transformer_blocks.*.attn2": DivideAttributes("heads", "out_dim"),
    "transformer_blocks.*.attn2.to_q": "colwise",
    "transformer_blocks.*.attn2.to_k": "colwise",
    "transformer_blocks.*.attn2.to_v": "colwise",
    "transformer_blocks.*.attn2.q_img": IfPresent("colwise"),
    "transformer_blocks.*.attn2.k_img": IfPresent("colwise"),
    "transformer_blocks.*.attn2.v_img": IfPresent("colwise"),
    "transformer_blocks.*.attn2.to_out.0": "rowwise",
    "transformer_blocks.*.norm3.linear_1": "colwise",
    "transformer_blocks.*.norm3.linear_2": "rowwise",
    "transformer_blocks.*.ff.net.0.proj": "colwise",
    "transformer_blocks.*.ff.net.2": "rowwise",
    "crossattn_proj.0": IfPresent("rowwise_split_input"),
}


class CosmosTransformer3DModel(TensorParallelMixin, _CosmosTransformer3DModel):  # type: ignore[misc]
    """The transformer of Cosmos, with tensor parallelism. Heads: 16, 32 or 40; whole: patches, tables, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 5,
    "num_attention_heads": 4,
    "attention_head_dim": 18,
    "num_layers": 2,
    "mlp_ratio": 2,
    "text_embed_dim": 20,
    "adaln_lora_dim": 12,
    "max_size": (5, 12, 14),
    "patch_size": (1, 2, 2),
    "concat_padding_mask": False,
    "img_context_dim_in": 14,
    "img_context_num_tokens": 5,
    "img_context_dim_out": 72,
}


def example_inputs(
    config: Mapping[str, Any], generator: torch.Generator, batch: int = 3, per_frame: bool = False
) -> dict[str, Any]:
    """Return inputs for a model of this config: 45 video tokens (3 frames of 5 x 3), 7 text tokens, some padding.

    With `per_frame` each frame has a noise level of its own, as models that go on from given frames take them.
    """
    size = tuple(n * patch for n, patch in zip((3, 5, 3), config["patch_size"], strict=True))
    projected = config.get("use_crossattn_projection")
    width = config["crossattn_proj_in_channels"] if projected else config["text_embed_dim"]
    text = torch.randn(batch, 7, width, generator=generator)
    mask = torch.ones(batch, 7, dtype=torch.bool)
    mask[-1, 4:] = False
    levels = (batch, 1, 3, 1, 1) if per_frame else (batch,)
    inputs: dict[str, Any] = {
        "hidden_states": torch.randn(batch, config["in_channels"], *size, generator=generator),
        "timestep": torch.rand(levels, generator=generator),
        "encoder_hidden_states": text,
        "fps": 16,
    }
    if every := config.get("controlnet_block_every_n"):
        width, count = config["num_attention_heads"] * config["attention_head_dim"], config["num_layers"]
        residuals = torch.randn(-(-count // every), batch, 45, width, generator=generator)
        inputs["block_controlnet_hidden_states"] = list(residuals)
    if config.get("concat_padding_mask", True):
        inputs["padding_mask"] = torch.zeros(1, 1, *size[1:])
    if config.get("img_context_dim_in"):
        image = (config["img_context_num_tokens"], config["img_context_dim_in"])
        inputs["encoder_hidden_states"] = (text, torch.randn(batch, *image, generator=generator))
    else:
        inputs["attention_mask"] = mask  # with an image the class wants a pair of masks, and takes one
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "without_image": ({"img_context_dim_in": None}, {}),
    "controlled": (
        {
            "img_context_dim_in": None,
            "extra_pos_embed_type": None,
            "use_crossattn_projection": True,
            "crossattn_proj_in_channels": 28,
            "encoder_hidden_states_channels": 20,
            "controlnet_block_every_n": 2,
        },
        {"per_frame": True},
    ),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
