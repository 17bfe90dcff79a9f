"""MiniMax-H3: video and audio in one sequence; its AdaLN projections are two fifths of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel as _MiniMaxH3Transformer3DModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import PackedColwiseParallel

PLAN = {
    "token_refiner.refiner_blocks.*.attn.to_q": "colwise",
    "token_refiner.refiner_blocks.*.attn.to_k": "colwise",
    "token_refiner.refiner_blocks.*.attn.to_v": "colwise",
    "token_refiner.refiner_blocks.*.attn.to_out.0": "rowwise",
    "token_refiner.refiner_blocks.*.ff.net.0.proj": PackedColwiseParallel([1, 1]),  # up, gate
    "token_refiner.refiner_blocks.*.ff.net.2": "rowwise",
    "transformer_blocks.*.attn.to_q": "colwise",
    "transformer_blocks.*.attn.to_k": "colwise",
    "transformer_blocks.*.attn.to_v": "colwise",
    "transformer_blocks.*.attn.to_out.0": "rowwise",
    "transformer_blocks.*.ff.net.0.proj": PackedColwiseParallel([1, 1]),
    "transformer_blocks.*.ff.net.2": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "transformer_blocks.*.adaln_proj.linear": "rowwise_split_input",
}


class MiniMaxH3Transformer3DModel(TensorParallelMixin, _MiniMaxH3Transformer3DModel):  # type: ignore[misc]
    """The transformer of MiniMax-H3, with tensor parallelism. Heads: 56; whole: embeddings, heads, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "hidden_size": 40,
    "num_layers": 2,
    "num_refiner_layers": 2,
    "ffn_dim": 56,
    "in_channels": 3,
    "audio_in_channels": 5,
    "patch_size": (1, 2, 2),
    "text_dim": 28,
    "freq_dim": 18,
    "time_embed_hidden_dim": 22,
    "time_embed_dim": 20,
    "rope_freq_dim": 2,
}


def example_inputs(
    config: Mapping[str, Any], generator: torch.Generator, batch: int = 1
) -> dict[str, torch.Tensor]:
    """Return inputs for a model of this config: 7 text, 12 video and 5 audio rows at two noise levels."""
    text, video, audio = torch.arange(7), torch.arange(7, 19), torch.arange(19, 24)
    tags = torch.ones(24, dtype=torch.long)
    tags[video], tags[audio] = 0, 2
    timestep_indices = torch.zeros(24, dtype=torch.long)
    timestep_indices[10:] = 1
    video_width = config["in_channels"] * prod(config["patch_size"])
    return {
        "hidden_states": torch.randn(batch, 12, video_width, generator=generator),
        "audio_hidden_states": torch.randn(batch, 5, config["audio_in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["text_dim"], generator=generator),
        "timestep": torch.rand(2, generator=generator),
        "timestep_indices": timestep_indices,
        "token_tags": tags,
        "position_ids": torch.randint(0, 9, (24, 3), generator=generator),
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
    }
