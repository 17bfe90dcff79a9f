"""Allegro: the blocks of PixArt on video, with rotary positions in time, height and width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import AllegroTransformer3DModel as _AllegroTransformer3DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

from shardwise.models.families.pixart import PLAN
from shardwise.models.mixin import TensorParallelMixin


class AllegroTransformer3DModel(TensorParallelMixin, _AllegroTransformer3DModel):  # type: ignore[misc]
    """The transformer of Allegro, with tensor parallelism. Heads: 24; whole: patch embedding, tables, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "patch_size": 2,
    "num_attention_heads": 4,
    "attention_head_dim": 18,
    "in_channels": 3,
    "out_channels": 3,
    "num_layers": 2,
    "cross_attention_dim": 72,
    "sample_height": 10,
    "sample_width": 6,
    "sample_frames": 3,
    "caption_channels": 20,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 45 video tokens (3 frames of 5 x 3), 7 text tokens, some padding."""
    height, width = 5 * config["patch_size"], 3 * config["patch_size"]
    mask = torch.ones(batch, 7)
    mask[-1, 4:] = 0
    *tables, _, _, _ = get_3d_rotary_pos_embed_allegro(
        config["attention_head_dim"], ((0, 0), (5, 3)), (5, 3), 3
    )
    positions = torch.cartesian_prod(torch.arange(3), torch.arange(5), torch.arange(3)).T
    return {
        "hidden_states": torch.randn(batch, config["in_channels"], 3, height, width, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["caption_channels"], generator=generator),
        "encoder_attention_mask": mask,
        "timestep": torch.randint(0, 1000, (batch,), generator=generator),
        "image_rotary_emb": (tuple(tables), tuple(positions.unsqueeze(1))),
    }
