"""ChronoEdit: Wan, with positions that reach further where a clip has two frames only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import ChronoEditTransformer3DModel as _ChronoEditTransformer3DModel

from shardwise.models.families import wan
from shardwise.models.mixin import TensorParallelMixin

PLAN = wan.PLAN


class ChronoEditTransformer3DModel(TensorParallelMixin, _ChronoEditTransformer3DModel):  # type: ignore[misc]
    """The transformer of ChronoEdit, with tensor parallelism. Heads: 40; whole: patch embedding, tables, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {**wan.TINY_CONFIG, "rope_temporal_skip_len": 5}


def example_inputs(
    config: Mapping[str, Any], generator: torch.Generator, batch: int = 3, frames: int = 3
) -> dict[str, Any]:
    """Return inputs for a model of this config: those of Wan, or of a shorter clip."""
    inputs = wan.example_inputs(config, generator, batch)
    inputs["hidden_states"] = inputs["hidden_states"][:, :, : frames * config["patch_size"][0]]
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "image_to_video": wan.TINY_VARIANTS["image_to_video"],
    "two_frames": ({}, {"frames": 2}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
