"""CogView4: the blocks of CogView3-Plus, with rotary positions of the image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import CogView4Transformer2DModel as _CogView4Transformer2DModel

from shardwise.models.families import cogview3
from shardwise.models.families.cogview3 import PLAN
from shardwise.models.mixin import TensorParallelMixin


class CogView4Transformer2DModel(TensorParallelMixin, _CogView4Transformer2DModel):  # type: ignore[misc]
    """The transformer of CogView4, with tensor parallelism. Heads: 32; whole: image and size embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {**cogview3.TINY_CONFIG, "rope_axes_dim": (16, 8)}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: those of CogView3-Plus, with some of the text as padding."""
    mask = torch.ones(batch, 7)
    mask[-1, 4:] = 0
    return {**cogview3.example_inputs(config, generator, batch), "attention_mask": mask}
