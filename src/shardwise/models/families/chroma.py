"""Chroma: the blocks of FLUX.1, whose modulations all come from one network that is shared by the blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import ChromaTransformer2DModel as _ChromaTransformer2DModel

from shardwise.models.families import bria
from shardwise.models.mixin import TensorParallelMixin

PLAN = {
    **{key: style for key, style in bria.PLAN.items() if "norm" not in key},
    "distilled_guidance_layer.layers.*.linear_1": "colwise",
    "distilled_guidance_layer.layers.*.linear_2": "rowwise",
    "distilled_guidance_layer.out_proj": "rowwise_split_input",
}


class ChromaTransformer2DModel(TensorParallelMixin, _ChromaTransformer2DModel):  # type: ignore[misc]
    """The transformer of Chroma, with tensor parallelism. Heads: 24; whole: small embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    **bria.TINY_CONFIG,
    "out_channels": 5,
    "approximator_num_channels": 32,
    "approximator_hidden_dim": 40,
    "approximator_layers": 2,
}


def example_inputs(
    config: Mapping[str, Any], generator: torch.Generator, batch: int = 3
) -> dict[str, torch.Tensor]:
    """Return inputs for a model of this config: 15 image tokens (5 x 3) and 7 text tokens, some of them padding."""
    mask = torch.ones(batch, 7 + 15)
    mask[-1, 4:7] = 0
    inputs = bria.example_inputs(config, generator, batch)
    return {**inputs, "timestep": torch.rand(batch, generator=generator), "attention_mask": mask}
