"""AnyFlow-FAR: AnyFlow chunk by chunk, with FlexAttention to earlier chunks, or a cache of their keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import AnyFlowFARTransformer3DModel as _AnyFlowFARTransformer3DModel

from shardwise.models.families import anyflow
from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import SliceInput

PLAN = {
    **anyflow.PLAN,
    # [key and value, batch, heads, tokens, features]: the pipeline makes room for all heads, a rank uses its own.
    "blocks.*": SliceInput("kv_cache", dim=2),
}


class AnyFlowFARTransformer3DModel(TensorParallelMixin, _AnyFlowFARTransformer3DModel):  # type: ignore[misc]
    """The transformer of AnyFlow-FAR, with tensor parallelism. Heads: 12 or 40; whole: patches, tables, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    **anyflow.TINY_CONFIG,
    "compressed_patch_size": (1, 4, 4),
    "full_chunk_limit": 2,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: as many chunks as are kept in full, and one before them.

    Chunks are of two frames and one: of 6 x 4 tokens in full, of 3 x 2 where they are compressed.
    """
    chunks = [1 + i % 2 for i in range(config["full_chunk_limit"] + 1)]
    _, height, width = (n * patch for n, patch in zip((1, 6, 4), config["patch_size"], strict=True))
    inputs = anyflow.example_inputs(config, generator, batch)
    return inputs | {
        "hidden_states": torch.randn(
            batch, sum(chunks), config["in_channels"], height, width, generator=generator
        ),
        "timestep": torch.randint(500, 1000, (batch, sum(chunks)), generator=generator),
        "r_timestep": torch.randint(0, 500, (batch, sum(chunks)), generator=generator),
        "chunk_partition": chunks,
    }
