"""ERNIE-Image: single-stream blocks over image and text, all of them modulated by one projection of the timestep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import ErnieImageTransformer2DModel as _ErnieImageTransformer2DModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent

PLAN = {
    "layers.*.self_attention.to_q": "colwise",
    "layers.*.self_attention.to_k": "colwise",
    "layers.*.self_attention.to_v": "colwise",
    "layers.*.self_attention.to_out.0": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.linear_fc2": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "text_proj": IfPresent("rowwise_split_input"),  # not where the text is as wide as the model
    "time_embedding.linear_1": "rowwise_split_input",
    "time_embedding.linear_2": "rowwise_split_input",
    "adaLN_modulation.1": "rowwise_split_input",
    "final_norm.linear": "rowwise_split_input",
}


class ErnieImageTransformer2DModel(TensorParallelMixin, _ErnieImageTransformer2DModel):  # type: ignore[misc]
    """The transformer of ERNIE-Image, with tensor parallelism. Heads: 24; whole: patches, output layer, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_layers": 2,
    "ffn_hidden_size": 56,
    "in_channels": 3,
    "out_channels": 5,
    "patch_size": 2,
    "text_in_dim": 20,
    "rope_axes_dim": (2, 4, 6),
}


def example_inputs(
    config: Mapping[str, Any], generator: torch.Generator, batch: int = 3
) -> dict[str, torch.Tensor]:
    """Return inputs for a model of this config: 15 image tokens (5 x 3), 7 text tokens, some of them padding."""
    height, width = 5 * config["patch_size"], 3 * config["patch_size"]
    lengths = torch.full((batch,), 7)
    lengths[-1] = 4
    return {
        "hidden_states": torch.randn(batch, config["in_channels"], height, width, generator=generator),
        "text_bth": torch.randn(batch, 7, config["text_in_dim"], generator=generator),
        "text_lens": lengths,
        "timestep": torch.randint(0, 1000, (batch,), generator=generator),
    }


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text_as_wide_as_the_model": ({"text_in_dim": 48}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
