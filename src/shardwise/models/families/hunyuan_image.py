"""HunyuanImage 2.1: the blocks of HunyuanVideo over one image, or over frames where its patches have three dims."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import HunyuanImageTransformer2DModel as _HunyuanImageTransformer2DModel

from shardwise.models.families.hunyuan_video import PLAN
from shardwise.models.mixin import TensorParallelMixin

__all__ = ["PLAN", "TINY_CONFIG", "TINY_VARIANTS", "HunyuanImageTransformer2DModel", "example_inputs"]


class HunyuanImageTransformer2DModel(TensorParallelMixin, _HunyuanImageTransformer2DModel):  # type: ignore[misc]
    """The transformer of HunyuanImage 2.1, with tensor parallelism. Heads: 28; whole: embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 5,
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 2,
    "mlp_ratio": 2.5,
    "patch_size": (2, 2),
    "guidance_embeds": True,
    "text_embed_dim": 20,
    "text_embed_2_dim": 28,
    "rope_axes_dim": (4, 8),
    "use_meanflow": True,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 15 image tokens (5 x 3), 7 and 9 text tokens, some padding.

    Where patches have a third dim, there are three frames.
    """
    patch = config["patch_size"]
    sizes = [n * side for n, side in zip((3, 5, 3)[-len(patch) :], patch, strict=True)]
    mask = torch.ones(batch, 7, dtype=torch.long)
    mask[-1, 4:] = 0
    inputs = {
        "hidden_states": torch.randn(batch, config["in_channels"], *sizes, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["text_embed_dim"], generator=generator),
        "encoder_attention_mask": mask,
        "timestep": torch.rand(batch, generator=generator) * 1000,
    }
    if config["text_embed_2_dim"] is not None:
        text = torch.randn(batch, 9, config["text_embed_2_dim"], generator=generator)
        mask = torch.ones(batch, 9, dtype=torch.long)
        mask[0, 5:] = 0
        inputs |= {"encoder_hidden_states_2": text, "encoder_attention_mask_2": mask}
    if config["guidance_embeds"]:
        inputs["guidance"] = torch.rand(batch, generator=generator) * 4000
    if config["use_meanflow"]:
        inputs["timestep_r"] = torch.rand(batch, generator=generator) * 1000
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "frames_and_one_text": (
        {
            "patch_size": (1, 2, 2),
            "rope_axes_dim": (2, 4, 6),
            "text_embed_2_dim": None,
            "use_meanflow": False,
        },
        {},
    ),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
