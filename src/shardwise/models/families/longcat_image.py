"""LongCat-Image: the blocks of Bria 3.2; its embedder of text is a little smaller than what is worth an all-reduce."""

from __future__ import annotations

from typing import Any

from diffusers import LongCatImageTransformer2DModel as _LongCatImageTransformer2DModel

from shardwise.models.families import bria
from shardwise.models.families.bria import example_inputs
from shardwise.models.mixin import TensorParallelMixin

__all__ = ["PLAN", "TINY_CONFIG", "LongCatImageTransformer2DModel", "example_inputs"]

PLAN = {key: style for key, style in bria.PLAN.items() if key != "context_embedder"}


class LongCatImageTransformer2DModel(TensorParallelMixin, _LongCatImageTransformer2DModel):  # type: ignore[misc]
    """The transformer of LongCat-Image, with tensor parallelism. Heads: 24; whole: embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {**bria.TINY_CONFIG, "pooled_projection_dim": 28}
