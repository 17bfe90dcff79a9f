"""Kandinsky 6: video and audio in fused blocks that read each other, each behind text blocks of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import Kandinsky6Transformer3DModel as _Kandinsky6Transformer3DModel

from shardwise.models.mixin import TensorParallelMixin

PLAN = {
    "video_text_transformer_blocks.*.attn.to_query": "colwise",
    "video_text_transformer_blocks.*.attn.to_key": "colwise",
    "video_text_transformer_blocks.*.attn.to_value": "colwise",
    "video_text_transformer_blocks.*.attn.out_layer": "rowwise",
    "video_text_transformer_blocks.*.feed_forward.net.0.proj": "colwise",
    "video_text_transformer_blocks.*.feed_forward.net.2": "rowwise",
    "audio_text_transformer_blocks.*.attn.to_query": "colwise",
    "audio_text_transformer_blocks.*.attn.to_key": "colwise",
    "audio_text_transformer_blocks.*.attn.to_value": "colwise",
    "audio_text_transformer_blocks.*.attn.out_layer": "rowwise",
    "audio_text_transformer_blocks.*.feed_forward.net.0.proj": "colwise",
    "audio_text_transformer_blocks.*.feed_forward.net.2": "rowwise",
    "visual_transformer_blocks.*.video_dec_block.self_attention.to_query": "colwise",
    "visual_transformer_blocks.*.video_dec_block.self_attention.to_key": "colwise",
    "visual_transformer_blocks.*.video_dec_block.self_attention.to_value": "colwise",
    "visual_transformer_blocks.*.video_dec_block.self_attention.out_layer": "rowwise",
    "visual_transformer_blocks.*.video_dec_block.cross_attention.to_query": "colwise",
    "visual_transformer_blocks.*.video_dec_block.cross_attention.to_key": "colwise",
    "visual_transformer_blocks.*.video_dec_block.cross_attention.to_value": "colwise",
    "visual_transformer_blocks.*.video_dec_block.cross_attention.out_layer": "rowwise",
    "visual_transformer_blocks.*.video_dec_block.feed_forward.net.0.proj": "colwise",
    "visual_transformer_blocks.*.video_dec_block.feed_forward.net.2": "rowwise",
    "visual_transformer_blocks.*.audio_dec_block.self_attention.to_query": "colwise",
    "visual_transformer_blocks.*.audio_dec_block.self_attention.to_key": "colwise",
    "visual_transformer_blocks.*.audio_dec_block.self_attention.to_value": "colwise",
    "visual_transformer_blocks.*.audio_dec_block.self_attention.out_layer": "rowwise",
    "visual_transformer_blocks.*.audio_dec_block.cross_attention.to_query": "colwise",
    "visual_transformer_blocks.*.audio_dec_block.cross_attention.to_key": "colwise",
    "visual_transformer_blocks.*.audio_dec_block.cross_attention.to_value": "colwise",
    "visual_transformer_blocks.*.audio_dec_block.cross_attention.out_layer": "rowwise",
    "visual_transformer_blocks.*.audio_dec_block.feed_forward.net.0.proj": "colwise",
    "visual_transformer_blocks.*.audio_dec_block.feed_forward.net.2": "rowwise",
    "visual_transformer_blocks.*.va_cross_attention.to_query": "colwise",
    "visual_transformer_blocks.*.va_cross_attention.to_key": "colwise",
    "visual_transformer_blocks.*.va_cross_attention.to_value": "colwise",
    "visual_transformer_blocks.*.va_cross_attention.out_layer": "rowwise",
    "visual_transformer_blocks.*.av_cross_attention.to_query": "colwise",
    "visual_transformer_blocks.*.av_cross_attention.to_key": "colwise",
    "visual_transformer_blocks.*.av_cross_attention.to_value": "colwise",
    "visual_transformer_blocks.*.av_cross_attention.out_layer": "rowwise",
    # Read the embeddings of timestep and pooled text, which are whole, and their outputs are used whole by every rank.
    "video_text_transformer_blocks.*.text_modulation.out_layer": "rowwise_split_input",
    "audio_text_transformer_blocks.*.text_modulation.out_layer": "rowwise_split_input",
    "visual_transformer_blocks.*.video_dec_block.visual_modulation.out_layer": "rowwise_split_input",
    "visual_transformer_blocks.*.audio_dec_block.visual_modulation.out_layer": "rowwise_split_input",
    "visual_transformer_blocks.*.va_modulation.out_layer": "rowwise_split_input",
    "visual_transformer_blocks.*.av_modulation.out_layer": "rowwise_split_input",
}


class Kandinsky6Transformer3DModel(TensorParallelMixin, _Kandinsky6Transformer3DModel):  # type: ignore[misc]
    """The transformer of Kandinsky 6, with tensor parallelism. Heads: 32 and 32 of audio; whole: embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "in_visual_dim": 3,
    "out_visual_dim": 5,
    "in_text_dim": 20,
    "in_text_dim2": 28,
    "time_dim": 24,
    "time_dim_a": 32,
    "patch_size": (1, 2, 2),
    "model_dim": 48,
    "model_dim_a": 96,
    "ff_dim": 56,
    "ff_dim_a": 40,
    "num_text_blocks": 2,
    "num_visual_blocks": 2,
    "axes_dims": (2, 4, 6),
    "visual_cond": True,
    "in_audio_dim": 6,
    "out_audio_dim": 7,
    "ca_rope": True,
    "cross_gates": True,
    "fix_modulation": True,
    "visual_token_type_num_embeddings": 3,
}


def example_inputs(
    config: Mapping[str, Any], generator: torch.Generator, batch: int = 3, audio: bool = True
) -> dict[str, Any]:
    """Return inputs for a model of this config: 45 video tokens (3 frames of 5 x 3), 11 of audio, 7 of text."""
    frames, height, width = (n * patch for n, patch in zip((3, 5, 3), config["patch_size"], strict=True))
    channels = config["in_visual_dim"] * (2 if config["visual_cond"] else 1) + bool(config["visual_cond"])
    mask = torch.ones(batch, 7, dtype=torch.bool)
    mask[-1, 4:] = False
    inputs = {
        "hidden_states": torch.randn(batch, frames, height, width, channels, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["in_text_dim"], generator=generator),
        "encoder_attention_mask": mask,
        "pooled_projections": torch.randn(batch, config["in_text_dim2"], generator=generator),
        "timestep": torch.rand(batch, generator=generator) * 1000,
    }
    if audio:
        inputs["audio_hidden_states"] = torch.randn(batch, 11, config["in_audio_dim"], generator=generator)
    if config["visual_token_type_num_embeddings"]:
        kinds = config["visual_token_type_num_embeddings"]
        inputs["visual_token_type_ids"] = torch.randint(0, kinds, (batch, 3), generator=generator)
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "own_gates": (
        {"ca_rope": False, "cross_gates": False, "fix_modulation": False, "time_dim_a": 24},
        {},
    ),
    "without_audio": ({"visual_token_type_num_embeddings": 0}, {"audio": False}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
