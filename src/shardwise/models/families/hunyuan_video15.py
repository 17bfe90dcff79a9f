"""HunyuanVideo 1.5: the double-stream blocks of HunyuanVideo alone, over video, two texts and an image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel as _HunyuanVideo15Transformer3DModel

from shardwise.models.families import hunyuan_video
from shardwise.models.mixin import TensorParallelMixin

PLAN = {key: style for key, style in hunyuan_video.PLAN.items() if not key.startswith("single_")}


class HunyuanVideo15Transformer3DModel(TensorParallelMixin, _HunyuanVideo15Transformer3DModel):  # type: ignore[misc]
    """The transformer of HunyuanVideo 1.5, with tensor parallelism. Heads: 16; whole: embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 5,
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_refiner_layers": 2,
    "mlp_ratio": 2.5,
    "patch_size": 2,
    "patch_size_t": 1,
    "text_embed_dim": 20,
    "text_embed_2_dim": 28,
    "image_embed_dim": 14,
    "rope_axes_dim": (2, 4, 6),
    "use_meanflow": True,
}


def example_inputs(
    config: Mapping[str, Any], generator: torch.Generator, batch: int = 3, with_image: bool = True
) -> dict[str, Any]:
    """Return inputs for a model of this config: 45 video tokens (3 frames of 5 x 3), 7 and 9 of text, 3 of an image.

    Some of the text is padding. Without an image its features are zero, and the model leaves them out.
    """
    patch = config["patch_size"]
    video = (config["in_channels"], 3 * config["patch_size_t"], 5 * patch, 3 * patch)
    masks = torch.ones(batch, 7, dtype=torch.long), torch.ones(batch, 9, dtype=torch.long)
    masks[0][-1, 4:], masks[1][0, 5:] = 0, 0
    inputs = {
        "hidden_states": torch.randn(batch, *video, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["text_embed_dim"], generator=generator),
        "encoder_attention_mask": masks[0],
        "encoder_hidden_states_2": torch.randn(batch, 9, config["text_embed_2_dim"], generator=generator),
        "encoder_attention_mask_2": masks[1],
        "image_embeds": torch.randn(batch, 3, config["image_embed_dim"], generator=generator) * with_image,
        "timestep": torch.rand(batch, generator=generator) * 1000,
    }
    if config["use_meanflow"]:
        inputs["timestep_r"] = torch.rand(batch, generator=generator) * 1000
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text_to_video": ({"use_meanflow": False}, {"with_image": False}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
