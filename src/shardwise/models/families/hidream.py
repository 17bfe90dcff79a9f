"""HiDream-I1: blocks for image and text, then for both as one, with a mixture of experts for the image in each.

Query and key norms look at all heads together. The experts and the one that all tokens share are summed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import HiDreamImageTransformer2DModel as _HiDreamImageTransformer2DModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent, SumOnce

_EXPERTS = SumOnce(
    {
        "experts.*.w1": IfPresent("colwise"),
        "experts.*.w3": IfPresent("colwise"),
        "experts.*.w2": IfPresent("rowwise"),
        "shared_experts.w1": IfPresent("colwise"),
        "shared_experts.w3": IfPresent("colwise"),
        "shared_experts.w2": IfPresent("rowwise"),
        # Without experts there is one of them.
        "w1": IfPresent("colwise"),
        "w3": IfPresent("colwise"),
        "w2": IfPresent("rowwise"),
    }
)

PLAN = {
    "double_stream_blocks.*.block.attn1.to_q": "colwise",
    "double_stream_blocks.*.block.attn1.to_k": "colwise",
    "double_stream_blocks.*.block.attn1.to_v": "colwise",
    "double_stream_blocks.*.block.attn1.to_out": "rowwise",
    "double_stream_blocks.*.block.attn1.q_rms_norm": "across_head_norm",
    "double_stream_blocks.*.block.attn1.k_rms_norm": "across_head_norm",
    "double_stream_blocks.*.block.attn1.to_q_t": "colwise",
    "double_stream_blocks.*.block.attn1.to_k_t": "colwise",
    "double_stream_blocks.*.block.attn1.to_v_t": "colwise",
    "double_stream_blocks.*.block.attn1.to_out_t": "rowwise",
    "double_stream_blocks.*.block.attn1.q_rms_norm_t": "across_head_norm",
    "double_stream_blocks.*.block.attn1.k_rms_norm_t": "across_head_norm",
    "double_stream_blocks.*.block.ff_i": _EXPERTS,
    "double_stream_blocks.*.block.ff_t.w1": "colwise",
    "double_stream_blocks.*.block.ff_t.w3": "colwise",
    "double_stream_blocks.*.block.ff_t.w2": "rowwise",
    "single_stream_blocks.*.block.attn1.to_q": "colwise",
    "single_stream_blocks.*.block.attn1.to_k": "colwise",
    "single_stream_blocks.*.block.attn1.to_v": "colwise",
    "single_stream_blocks.*.block.attn1.to_out": "rowwise",
    "single_stream_blocks.*.block.attn1.q_rms_norm": "across_head_norm",
    "single_stream_blocks.*.block.attn1.k_rms_norm": "across_head_norm",
    "single_stream_blocks.*.block.ff_i": _EXPERTS,
    # Read the embedding of timestep and pooled text, which is whole, and their outputs are used whole by every rank.
    "double_stream_blocks.*.block.adaLN_modulation.1": "rowwise_split_input",
    "single_stream_blocks.*.block.adaLN_modulation.1": "rowwise_split_input",
    # One for each block and one more: they read text.
    "caption_projection.*.linear": "rowwise_split_input",
}


class HiDreamImageTransformer2DModel(TensorParallelMixin, _HiDreamImageTransformer2DModel):  # type: ignore[misc]
    """The transformer of HiDream-I1, with tensor parallelism. Heads: 20; whole: embeddings, routers, block norms."""

    _tp_plan = PLAN


RELEASED_CONFIG: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 16,
    "caption_channels": [4096, 4096],
    "axes_dims_rope": (64, 32, 32),
    "llama_layers": [*range(32), *[31] * 16],
}
"""Of HiDream-I1: the class has no defaults of them that work."""

TINY_CONFIG: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 3,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "caption_channels": [20, 28],
    "text_emb_dim": 18,
    "num_routed_experts": 3,
    "num_activated_experts": 2,
    "axes_dims_rope": (4, 2, 6),
    "max_resolution": (10, 8),
    "llama_layers": [0, 2, 1, 1],
}


def example_inputs(
    config: Mapping[str, Any], generator: torch.Generator, batch: int = 3, square: bool = True
) -> dict[str, Any]:
    """Return inputs for a model of this config: 9 image tokens (3 x 3), 7 and 5 of text.

    An image that is not `square` has 15 (5 x 3), and is filled up to the most there may be.
    """
    height, width = (3, 3) if square else (5, 3)
    patch, (t5, llama) = config["patch_size"], config["caption_channels"]
    layers = 1 + max(config["llama_layers"])
    return {
        "hidden_states": torch.randn(
            batch, config["in_channels"], height * patch, width * patch, generator=generator
        ),
        "timesteps": torch.randint(0, 1000, (batch,), generator=generator),
        "encoder_hidden_states_t5": torch.randn(batch, 7, t5, generator=generator),
        "encoder_hidden_states_llama3": torch.randn(layers, batch, 5, llama, generator=generator),
        "pooled_embeds": torch.randn(batch, config["text_emb_dim"], generator=generator),
    }


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "filled_up": ({}, {"square": False}),
    "without_experts": ({"num_routed_experts": 0}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
