"""FLUX.3: blocks of each mode of tokens, then joint blocks; attention and feed-forward read the same input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import Flux3Transformer2DModel as _Flux3Transformer2DModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent, PackedColwiseParallel

BLOCKS = (
    "mode_blocks.image.*",
    "mode_blocks.image_cond.*",
    "txt_mode_blocks.*",
    "single_transformer_blocks.*",
)
MODES = ("image", "image_cond", "txt")

BLOCK: dict[str, object] = {
    "attn.to_q": "colwise",
    "attn.to_k": "colwise",
    "attn.to_v": "colwise",
    "attn.to_out.0": "rowwise",
    "ff.linear_in": PackedColwiseParallel([1, 1]),  # gate, up
    "ff.linear_out": "rowwise",
}

PLAN = {
    **{f"{block}.{key}": style for block in BLOCKS for key, style in BLOCK.items()},
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "timestep_embedder.linear_2": "rowwise_split_input",
    "target_timestep_embedder.linear_2": IfPresent("rowwise_split_input"),
    **{f"early_stream_modulations.{mode}.linear": "rowwise_split_input" for mode in MODES},
    **{f"single_stream_modulations.{mode}.linear": "rowwise_split_input" for mode in MODES},
    "context_embedder": "rowwise_split_input",
    "norm_out.linear": "rowwise_split_input",
}


class Flux3Transformer2DModel(TensorParallelMixin, _Flux3Transformer2DModel):  # type: ignore[misc]
    """The transformer of FLUX.3, with tensor parallelism. Heads: 24; whole: small embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "in_channels": 8,
    "cond_in_channels": 10,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "joint_attention_dim": 20,
    "timestep_channels": 28,
    "mlp_ratio": 2.5,
    "axes_dims_rope": (2, 4, 4, 2),
    "flow_map": True,
}


def example_inputs(
    config: Mapping[str, Any], generator: torch.Generator, batch: int = 3, references: bool = True
) -> dict[str, torch.Tensor]:
    """Return inputs for a model of this config: 15 image tokens (5 x 3), 7 text tokens, 6 of a reference image."""
    one = torch.arange(1)
    inputs = {
        "hidden_states": torch.randn(batch, 15, config["in_channels"], generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["joint_attention_dim"], generator=generator),
        "timestep": torch.rand(batch, generator=generator),
        "img_ids": torch.cartesian_prod(one, torch.arange(5), torch.arange(3), one),
        "txt_ids": torch.cartesian_prod(one, one, one, torch.arange(7)),
    }
    if references:
        condition = torch.randn(batch, 6, config["cond_in_channels"], generator=generator)
        inputs["image_cond_hidden_states"] = condition
        inputs["image_cond_ids"] = torch.cartesian_prod(one + 1, torch.arange(2), torch.arange(3), one)
    if config["flow_map"]:
        inputs["target_timestep"] = torch.rand(batch, generator=generator)
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text_to_image": ({"flow_map": False}, {"references": False}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
