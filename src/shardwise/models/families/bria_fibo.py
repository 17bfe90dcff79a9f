"""Bria FIBO: the blocks of Bria 3.2; before each, a layer of the text encoder replaces half of the text's features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import BriaFiboTransformer2DModel as _BriaFiboTransformer2DModel

from shardwise.models.families import bria
from shardwise.models.mixin import TensorParallelMixin

PLAN = {**bria.PLAN, "caption_projection.*.linear": "rowwise_split_input"}


class BriaFiboTransformer2DModel(TensorParallelMixin, _BriaFiboTransformer2DModel):  # type: ignore[misc]
    """The transformer of Bria FIBO, with tensor parallelism. Heads: 24; whole: small embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {**bria.TINY_CONFIG, "guidance_embeds": True, "text_encoder_dim": 28}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 15 image tokens (5 x 3), 7 text tokens as each block reads them."""
    blocks = config["num_layers"] + config["num_single_layers"]
    text = (batch, 7, config["text_encoder_dim"])
    inputs: dict[str, Any] = bria.example_inputs(config, generator, batch)
    inputs["text_encoder_layers"] = [torch.randn(text, generator=generator) for _ in range(blocks)]
    if config["guidance_embeds"]:
        inputs["guidance"] = torch.rand(batch, generator=generator) * 4
    return inputs
