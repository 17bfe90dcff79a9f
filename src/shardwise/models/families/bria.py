"""Bria 3.2: the blocks of FLUX.1, without pooled text; the model does not store what its single blocks pack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import BriaTransformer2DModel as _BriaTransformer2DModel

from shardwise.models.families import flux
from shardwise.models.families.hunyuan_video import attention_and_mlp
from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import PackedRowwiseParallel

PLAN = {**flux.PLAN, "single_transformer_blocks.*.proj_out": PackedRowwiseParallel(attention_and_mlp)}


class BriaTransformer2DModel(TensorParallelMixin, _BriaTransformer2DModel):  # type: ignore[misc]
    """The transformer of Bria 3.2, with tensor parallelism. Heads: 24; whole: small embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "in_channels": 8,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "joint_attention_dim": 20,
    "axes_dims_rope": [2, 4, 6],
}


def example_inputs(
    config: Mapping[str, Any], generator: torch.Generator, batch: int = 3
) -> dict[str, torch.Tensor]:
    """Return inputs for a model of this config: 15 image tokens (5 x 3) and 7 text tokens."""
    return {
        "hidden_states": torch.randn(batch, 15, config["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["joint_attention_dim"], generator=generator),
        "timestep": torch.randint(0, 1000, (batch,), generator=generator),
        "img_ids": torch.cartesian_prod(torch.arange(1.0), torch.arange(5.0), torch.arange(3.0)),
        "txt_ids": torch.zeros(7, 3),
    }
