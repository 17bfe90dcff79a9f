"""AnyFlow: the blocks of Wan, told two noise levels: the one a step starts from and the one it goes to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import AnyFlowTransformer3DModel as _AnyFlowTransformer3DModel

from shardwise.models.families import wan
from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent

PLAN = {
    # An image joins the text: there are no keys and values of its own.
    **{key: style for key, style in wan.PLAN.items() if not isinstance(style, IfPresent)},
    "condition_embedder.delta_embedder.linear_2": "rowwise_split_input",
}


class AnyFlowTransformer3DModel(TensorParallelMixin, _AnyFlowTransformer3DModel):  # type: ignore[misc]
    """The transformer of AnyFlow, with tensor parallelism. Heads: 12 or 40; whole: patch embedding, tables, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 3,
    "out_channels": 5,
    "text_dim": 20,
    "freq_dim": 18,
    "ffn_dim": 56,
    "num_layers": 2,
    "rope_max_seq_len": 16,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 45 video tokens (3 frames of 5 x 3), 7 text tokens."""
    _, height, width = (n * patch for n, patch in zip((3, 5, 3), config["patch_size"], strict=True))
    video = (3, config["in_channels"], height, width)
    inputs = {
        "hidden_states": torch.randn(batch, *video, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["text_dim"], generator=generator),
        "timestep": torch.randint(500, 1000, (batch, 3), generator=generator),
        "r_timestep": torch.randint(0, 500, (batch, 3), generator=generator),
    }
    if config.get("image_dim") is not None:
        image = torch.randn(batch, 9, config["image_dim"], generator=generator)
        inputs["encoder_hidden_states_image"] = image
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "image_and_interval": ({"image_dim": 28, "deltatime_type": "t-r"}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
