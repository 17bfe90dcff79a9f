"""Helios: the blocks of Wan over a video and what came before it, the more compressed the older it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import HeliosTransformer3DModel as _HeliosTransformer3DModel

from shardwise.models.families import wan
from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent

# There are no images, and keys and values for them that a config may ask for are not used.
PLAN = {key: style for key, style in wan.PLAN.items() if not isinstance(style, IfPresent)}


class HeliosTransformer3DModel(TensorParallelMixin, _HeliosTransformer3DModel):  # type: ignore[misc]
    """The transformer of Helios, with tensor parallelism. Heads: 40; whole: patch embeddings, tables, norms."""

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
    "rope_dim": (2, 4, 6),
    "has_multi_term_memory_patch": True,
}

_HISTORY = {"long": range(5), "mid": range(5, 8), "short": range(8, 10)}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 45 video tokens (3 frames of 5 x 3), 10 frames before, 7 of text."""
    height, width = 5 * config["patch_size"][1], 3 * config["patch_size"][2]

    def latents(frames: int) -> torch.Tensor:
        size = (frames * config["patch_size"][0], height, width)
        return torch.randn(batch, config["in_channels"], *size, generator=generator)

    inputs = {
        "hidden_states": latents(3),
        "encoder_hidden_states": torch.randn(batch, 7, config["text_dim"], generator=generator),
        "timestep": torch.randint(0, 1000, (batch,), generator=generator),
        "indices_hidden_states": torch.arange(10, 13).repeat(batch, 1),
    }
    for name, frames in _HISTORY.items() if config["has_multi_term_memory_patch"] else ():
        inputs[f"latents_history_{name}"] = latents(len(frames))
        inputs[f"indices_latents_history_{name}"] = torch.tensor(frames).repeat(batch, 1)
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "without_history": ({"has_multi_term_memory_patch": False, "guidance_cross_attn": False}, {}),
    "history_at_the_same_time": ({"zero_history_timestep": False}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
