"""Wan Animate 2: the blocks of Wan under names of their own, with a cache of the reference's keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import WanAnimate2Transformer3DModel as _WanAnimate2Transformer3DModel
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent

PLAN = {
    "blocks.*.self_attn.to_q": "colwise",
    "blocks.*.self_attn.to_k": "colwise",
    "blocks.*.self_attn.to_v": "colwise",
    "blocks.*.self_attn.norm_q": "across_head_norm",
    "blocks.*.self_attn.norm_k": "across_head_norm",
    "blocks.*.self_attn.to_out.0": "rowwise",
    "blocks.*.cross_attn.to_q": "colwise",
    "blocks.*.cross_attn.to_k": "colwise",
    "blocks.*.cross_attn.to_v": "colwise",
    "blocks.*.cross_attn.norm_q": "across_head_norm",
    "blocks.*.cross_attn.norm_k": "across_head_norm",
    # Keys and values of the image.
    "blocks.*.cross_attn.add_k_proj": IfPresent("colwise"),
    "blocks.*.cross_attn.add_v_proj": IfPresent("colwise"),
    "blocks.*.cross_attn.norm_added_k": IfPresent("across_head_norm"),
    "blocks.*.cross_attn.to_out.0": "rowwise",
    "blocks.*.ffn.0": "colwise",
    "blocks.*.ffn.2": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "time_embedding.2": "rowwise_split_input",
    "time_projection.1": "rowwise_split_input",
    "text_embedding.0": "rowwise_split_input",
    "text_embedding.2": "rowwise_split_input",
}


class WanAnimate2Transformer3DModel(TensorParallelMixin, _WanAnimate2Transformer3DModel):  # type: ignore[misc]
    """The transformer of Wan Animate 2, with tensor parallelism. Heads: 40; whole: patch embedding, tables, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "text_len": 9,
    "in_dim": 10,
    "dim": 48,
    "ffn_dim": 56,
    "freq_dim": 18,
    "text_dim": 20,
    "out_dim": 5,
    "num_heads": 4,
    "num_layers": 2,
    "use_img_emb": True,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: the pass that reads a reference of 45 tokens (3 frames of 5 x 3).

    Videos and texts (of 7 tokens and fewer) come as lists.
    """
    frames, height, width = (n * patch for n, patch in zip((3, 5, 3), config["patch_size"], strict=True))

    def latents(channels: int) -> list[torch.Tensor]:
        return [torch.randn(channels, frames, height, width, generator=generator) for _ in range(batch)]

    texts = [torch.randn(7 - i % 3, config["text_dim"], generator=generator) for i in range(batch)]
    inputs = {
        "hidden_states": latents((config["in_dim"] - 4) // 2),
        "condition_latents": latents((config["in_dim"] + 4) // 2),
        "encoder_hidden_states": texts,
        "timestep": torch.randint(0, 1000, (batch,), generator=generator),
        "kv_cache": WanAnimate2KVCache(config["num_layers"]),
        "kv_cache_mode": "extract",
        "seq_len": 45,
        "offset_grid_sizes": torch.tensor([[3, 5, 3]]),
    }
    if config["use_img_emb"]:
        inputs["encoder_hidden_states_image"] = torch.randn(batch, 9, 1280, generator=generator)
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "without_image": ({"use_img_emb": False}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
