"""Ovis-Image: the blocks of FLUX.1 with gated feed-forwards, whose gate and value are fused."""

from __future__ import annotations

from typing import Any

from diffusers import OvisImageTransformer2DModel as _OvisImageTransformer2DModel

from shardwise.models.families import longcat_image
from shardwise.models.families.bria import TINY_CONFIG as BRIA
from shardwise.models.families.bria import example_inputs
from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import DivideAttributes, PackedColwiseParallel

__all__ = ["PLAN", "TINY_CONFIG", "OvisImageTransformer2DModel", "example_inputs"]

PLAN = {
    **longcat_image.PLAN,
    "transformer_blocks.*.ff.net.0.proj": PackedColwiseParallel([1, 1]),  # value, gate
    "transformer_blocks.*.ff_context.net.0.proj": PackedColwiseParallel([1, 1]),
    "single_transformer_blocks.*.proj_mlp": PackedColwiseParallel([1, 1]),
    "single_transformer_blocks.*": DivideAttributes("mlp_hidden_dim"),  # by which it splits them
    "timestep_embedder.linear_2": "rowwise_split_input",
}


class OvisImageTransformer2DModel(TensorParallelMixin, _OvisImageTransformer2DModel):  # type: ignore[misc]
    """The transformer of Ovis-Image, with tensor parallelism. Heads: 24; whole: small embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {**BRIA, "out_channels": 5}
