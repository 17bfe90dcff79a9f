"""Wan 2.1 and 2.2: self- and cross-attention whose query and key norms look at all heads together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import WanTransformer3DModel as _WanTransformer3DModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent

PLAN = {
    "blocks.*.attn1.to_q": "colwise",
    "blocks.*.attn1.to_k": "colwise",
    "blocks.*.attn1.to_v": "colwise",
    "blocks.*.attn1.norm_q": "across_head_norm",
    "blocks.*.attn1.norm_k": "across_head_norm",
    "blocks.*.attn1.to_out.0": "rowwise",
    "blocks.*.attn2.to_q": "colwise",
    "blocks.*.attn2.to_k": "colwise",
    "blocks.*.attn2.to_v": "colwise",
    "blocks.*.attn2.norm_q": "across_head_norm",
    "blocks.*.attn2.norm_k": "across_head_norm",
    # Keys and values of the image, in the image-to-video models of Wan 2.1.
    "blocks.*.attn2.add_k_proj": IfPresent("colwise"),
    "blocks.*.attn2.add_v_proj": IfPresent("colwise"),
    "blocks.*.attn2.norm_added_k": IfPresent("across_head_norm"),
    "blocks.*.attn2.to_out.0": "rowwise",
    "blocks.*.ffn.net.0.proj": "colwise",
    "blocks.*.ffn.net.2": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "condition_embedder.time_embedder.linear_2": "rowwise_split_input",
    "condition_embedder.time_proj": "rowwise_split_input",
    "condition_embedder.text_embedder.linear_1": "rowwise_split_input",
    "condition_embedder.text_embedder.linear_2": "rowwise_split_input",
}


class WanTransformer3DModel(TensorParallelMixin, _WanTransformer3DModel):  # type: ignore[misc]
    """The transformer of Wan, with tensor parallelism. Heads: 12, 24 or 40; whole: small embeddings, tables, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 3,
    "out_channels": 5,
    "text_dim": 20,
    "freq_dim": 18,
    "ffn_dim": 56,
    "num_layers": 2,
    "rope_max_seq_len": 16,
}


def example_inputs(
    config: Mapping[str, Any], generator: torch.Generator, batch: int = 3, per_token: bool = False
) -> dict[str, Any]:
    """Return inputs for a model of this config: 45 video tokens (3 frames of 5 x 3), 7 text tokens.

    With image features the class takes 512 text tokens, whatever its config says. With `per_token` each token has
    a noise level of its own, as the 5B model of Wan 2.2 takes them.
    """
    frames, height, width = (n * patch for n, patch in zip((3, 5, 3), config["patch_size"], strict=True))
    with_image = config.get("image_dim") is not None
    text = 512 if with_image else 7
    inputs = {
        "hidden_states": torch.randn(
            batch, config["in_channels"], frames, height, width, generator=generator
        ),
        "encoder_hidden_states": torch.randn(batch, text, config["text_dim"], generator=generator),
        "timestep": torch.randint(0, 1000, (batch, 45) if per_token else (batch,), generator=generator),
    }
    if with_image:
        # First and last frame come as two samples of the batch, where the config counts tokens of both.
        pair = config.get("pos_embed_seq_len")
        shape = (2 * batch, pair // 2) if pair else (batch, 9)
        inputs["encoder_hidden_states_image"] = torch.randn(*shape, config["image_dim"], generator=generator)
    return inputs


_IMAGE: dict[str, Any] = {"image_dim": 28, "added_kv_proj_dim": 48}

TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "image_to_video": (_IMAGE, {"batch": 1}),
    "first_and_last_frame": ({**_IMAGE, "pos_embed_seq_len": 10}, {"batch": 1}),
    "timestep_per_token": ({}, {"per_token": True}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
