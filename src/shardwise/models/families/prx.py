"""PRX: the image attends to itself and to the text at once; a quarter of the weights modulates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import PRXTransformer2DModel as _PRXTransformer2DModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent, PackedColwiseParallel

PLAN = {
    "blocks.*.attention.img_qkv_proj": PackedColwiseParallel([1, 1, 1]),
    "blocks.*.attention.txt_kv_proj": PackedColwiseParallel([1, 1]),
    "blocks.*.attention.to_out.0": "rowwise",
    "blocks.*.gate_proj": "colwise",
    "blocks.*.up_proj": "colwise",
    "blocks.*.down_proj": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "time_in.out_layer": "rowwise_split_input",
    "txt_in": "rowwise_split_input",
    "resolution_embedder.mlp.out_layer": IfPresent("rowwise_split_input"),  # PRX-7B
    "blocks.*.modulation.lin": "rowwise_split_input",
    "final_layer.adaLN_modulation.1": "rowwise_split_input",
}


class PRXTransformer2DModel(TensorParallelMixin, _PRXTransformer2DModel):  # type: ignore[misc]
    """The transformer of PRX, with tensor parallelism. Heads: 28; whole: image embedding, output layer, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "in_channels": 3,
    "patch_size": 2,
    "context_in_dim": 20,
    "hidden_size": 48,
    "mlp_ratio": 1.5,
    "num_heads": 4,
    "depth": 2,
    "axes_dim": [4, 8],
}


def example_inputs(
    config: Mapping[str, Any], generator: torch.Generator, batch: int = 3
) -> dict[str, torch.Tensor]:
    """Return inputs for a model of this config: 15 image tokens (5 x 3), 7 text tokens, some of them padding."""
    height, width = 5 * config["patch_size"], 3 * config["patch_size"]
    mask = torch.ones(batch, 7, dtype=torch.bool)
    mask[-1, 4:] = False
    return {
        "hidden_states": torch.randn(batch, config["in_channels"], height, width, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["context_in_dim"], generator=generator),
        "attention_mask": mask,
        "timestep": torch.rand(batch, generator=generator),
    }


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "with_bottleneck_and_resolution": ({"bottleneck_size": 10, "resolution_embeds": True}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
