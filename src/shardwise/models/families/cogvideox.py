"""CogVideoX: text and video in one sequence, modulated apart from each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import CogVideoXTransformer3DModel as _CogVideoXTransformer3DModel

from shardwise.models.mixin import TensorParallelMixin

PLAN = {
    "transformer_blocks.*.attn1.to_q": "colwise",
    "transformer_blocks.*.attn1.to_k": "colwise",
    "transformer_blocks.*.attn1.to_v": "colwise",
    "transformer_blocks.*.attn1.to_out.0": "rowwise",
    "transformer_blocks.*.ff.net.0.proj": "colwise",
    "transformer_blocks.*.ff.net.2": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "patch_embed.text_proj": "rowwise_split_input",
    "transformer_blocks.*.norm1.linear": "rowwise_split_input",
    "transformer_blocks.*.norm2.linear": "rowwise_split_input",
    "norm_out.linear": "rowwise_split_input",
}


class CogVideoXTransformer3DModel(TensorParallelMixin, _CogVideoXTransformer3DModel):  # type: ignore[misc]
    """The transformer of CogVideoX, with tensor parallelism. Heads: 30 or 48; whole: small embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "patch_size": 2,
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 3,
    "out_channels": 5,
    "time_embed_dim": 28,
    "ofs_embed_dim": 28,
    "text_embed_dim": 20,
    "num_layers": 2,
    "sample_width": 6,
    "sample_height": 10,
    "sample_frames": 9,
    "max_text_seq_length": 7,
    "use_rotary_positional_embeddings": True,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 3 frames of 5 x 3 tokens; learned positions fix the size."""
    patch, frames = config["patch_size"], 3 * (config.get("patch_size_t") or 1)
    height, width = 5 * patch, 3 * patch
    if config.get("use_learned_positional_embeddings"):
        height, width = config["sample_height"], config["sample_width"]
    text = (config["max_text_seq_length"], config["text_embed_dim"])
    inputs: dict[str, Any] = {
        "hidden_states": torch.randn(
            batch, frames, config["in_channels"], height, width, generator=generator
        ),
        "encoder_hidden_states": torch.randn(batch, *text, generator=generator),
        "timestep": torch.randint(0, 1000, (batch,), generator=generator),
    }
    if config.get("ofs_embed_dim"):
        inputs["ofs"] = torch.rand(batch, generator=generator)
    if config["use_rotary_positional_embeddings"]:
        tokens = 3 * (height // patch) * (width // patch)
        angles = torch.rand(tokens, config["attention_head_dim"] // 2, generator=generator)
        inputs["image_rotary_emb"] = (
            angles.cos().repeat_interleave(2, 1),
            angles.sin().repeat_interleave(2, 1),
        )
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fixed_positions": ({"use_rotary_positional_embeddings": False, "ofs_embed_dim": None}, {}),
    "learned_positions": ({"use_learned_positional_embeddings": True}, {}),
    "time_patches": ({"patch_size_t": 2, "patch_bias": False}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
