"""Wan VACE: blocks like those of Wan, and a second list of them that turns a control video into hints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import WanVACETransformer3DModel as _WanVACETransformer3DModel

from shardwise.models.families import wan
from shardwise.models.mixin import TensorParallelMixin

PLAN = {
    **wan.PLAN,
    **{f"vace_{key}": style for key, style in wan.PLAN.items() if key.startswith("blocks.")},
    "vace_blocks.*.proj_in": "rowwise_split_input",  # in the first one
    "vace_blocks.*.proj_out": "rowwise_split_input",
}


class WanVACETransformer3DModel(TensorParallelMixin, _WanVACETransformer3DModel):  # type: ignore[misc]
    """The transformer of Wan VACE, with tensor parallelism. Heads: 12 or 40; whole: patch embeddings, tables, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {**wan.TINY_CONFIG, "vace_layers": [0, 1], "vace_in_channels": 6}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: those of Wan, and a control video without the last frame."""
    inputs = wan.example_inputs(config, generator, batch)
    batch, _, frames, height, width = inputs["hidden_states"].shape
    control = (config["vace_in_channels"], frames - config["patch_size"][0], height, width)
    inputs["control_hidden_states"] = torch.randn(batch, *control, generator=generator)
    inputs["control_hidden_states_scale"] = torch.rand(len(config["vace_layers"]), generator=generator)
    return inputs


TINY_VARIANTS = {"image_to_video": wan.TINY_VARIANTS["image_to_video"]}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
