"""OmniGen: single-stream blocks of a language model over text, images to work from, and the image that is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import OmniGenTransformer2DModel as _OmniGenTransformer2DModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import DivideAttributes, PackedColwiseParallel

PLAN = {
    # Joins its heads by the width of its output, which is that of all heads together.
    "layers.*.self_attn": DivideAttributes("heads", "out_dim"),
    "layers.*.self_attn.to_q": "colwise",
    "layers.*.self_attn.to_k": "colwise",
    "layers.*.self_attn.to_v": "colwise",
    "layers.*.self_attn.to_out.0": "rowwise",
    "layers.*.mlp.gate_up_proj": PackedColwiseParallel([1, 1]),
    "layers.*.mlp.down_proj": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "time_token.linear_2": "rowwise_split_input",
    "t_embedder.linear_2": "rowwise_split_input",
    "norm_out.linear": "rowwise_split_input",
}


class OmniGenTransformer2DModel(TensorParallelMixin, _OmniGenTransformer2DModel):  # type: ignore[misc]
    """The transformer of OmniGen, with tensor parallelism. Heads: 32; whole: embeddings, output layer, norms."""

    _tp_plan = PLAN


RELEASED_CONFIG: dict[str, Any] = {"rope_scaling": {"short_factor": [1.0] * 48, "long_factor": [1.0] * 48}}
"""What the class cannot be made without, though it has a default."""

TINY_CONFIG: dict[str, Any] = {
    "in_channels": 3,
    "patch_size": 2,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 56,
    "num_layers": 2,
    "pad_token_id": 0,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 32,
    "rope_scaling": {
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
    },
    "pos_embed_max_size": 7,
    "time_step_dim": 18,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 13 text tokens, of which an image takes 6, the time, 15 image tokens.

    Text sees what is before it, the image that is drawn sees all; the last sample begins with padding.
    """
    patch, channels = config["patch_size"], config["in_channels"]
    length = 13 + 1 + 15
    mask = torch.ones(batch, length, length).tril()
    mask[:, 14:] = 1
    mask[-1, :, :2] = 0
    mask[-1, [0, 1], [0, 1]] = 1  # a softmax over nothing but padding says nothing
    return {
        "hidden_states": torch.randn(batch, channels, 5 * patch, 3 * patch, generator=generator),
        "input_ids": torch.randint(1, config["vocab_size"], (batch, 13), generator=generator),
        "input_img_latents": [torch.randn(1, channels, 3 * patch, 2 * patch, generator=generator)],
        "input_image_sizes": {0: [[4, 10]]},
        "attention_mask": mask,
        "position_ids": torch.arange(length).expand(batch, length),
        "timestep": torch.rand(batch, generator=generator),
    }


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one_key_head": ({"num_key_value_heads": 1}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
