"""Ideogram 4: single-stream blocks over text and image packed in one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import Ideogram4Transformer2DModel as _Ideogram4Transformer2DModel

from shardwise.models.mixin import TensorParallelMixin

PLAN = {
    "layers.*.attention.to_q": "colwise",
    "layers.*.attention.to_k": "colwise",
    "layers.*.attention.to_v": "colwise",
    "layers.*.attention.to_out.0": "rowwise",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "llm_cond_proj": "rowwise_split_input",
    "t_embedding.mlp_in": "rowwise_split_input",
    "t_embedding.mlp_out": "rowwise_split_input",
    "layers.*.adaln_modulation": "rowwise_split_input",
}


class Ideogram4Transformer2DModel(TensorParallelMixin, _Ideogram4Transformer2DModel):  # type: ignore[misc]
    """The transformer of Ideogram 4, with tensor parallelism. Heads: 18; whole: input and final layer, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "in_channels": 6,
    "num_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "adaln_dim": 20,
    "llm_features_dim": 28,
    "mrope_section": (2, 2, 2),
}

_PADDING, _TEXT, _IMAGE = 0, 3, 2  # what the class calls them
_OFFSET = 65536  # of image positions, so that they never meet those of text


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 8 text tokens, some padding in front of them, 15 image tokens (5 x 3).

    As the pipeline packs them; the last sample has the shortest text.
    """
    length = 8 + 15
    positions = torch.arange(8)[:, None].expand(8, 3)
    image = torch.cartesian_prod(torch.arange(1), torch.arange(5), torch.arange(3)) + _OFFSET
    indicator = torch.full((batch, length), _TEXT)
    indicator[:, 8:] = _IMAGE
    indicator[:, 0], indicator[-1, 1:4] = _PADDING, _PADDING
    return {
        "hidden_states": torch.randn(batch, length, config["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(batch, length, config["llm_features_dim"], generator=generator),
        "position_ids": torch.cat([positions, image]).expand(batch, length, 3),
        "segment_ids": torch.where(indicator == _PADDING, -1, 1),
        "indicator": indicator,
        "timestep": torch.rand(batch, generator=generator),
    }
