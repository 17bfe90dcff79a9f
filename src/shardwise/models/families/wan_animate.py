"""Wan Animate: blocks like those of Wan, and adapters between them that attend to the motion of a face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import WanAnimateTransformer3DModel as _WanAnimateTransformer3DModel

from shardwise.models.families import wan
from shardwise.models.mixin import TensorParallelMixin

PLAN = {
    **wan.PLAN,
    # Their query and key norms are over one head.
    "face_adapter.*.to_q": "colwise",
    "face_adapter.*.to_k": "colwise",
    "face_adapter.*.to_v": "colwise",
    "face_adapter.*.to_out": "rowwise",
}


class WanAnimateTransformer3DModel(TensorParallelMixin, _WanAnimateTransformer3DModel):  # type: ignore[misc]
    """The transformer of Wan Animate, with tensor parallelism. Heads: 40; whole: patches, face encoder, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    **wan.TINY_CONFIG,
    "in_channels": 10,
    "latent_channels": 3,
    "image_dim": 28,
    "motion_encoder_channel_sizes": {"4": 9, "8": 7, "16": 6},
    "motion_encoder_size": 16,
    "motion_style_dim": 10,
    "motion_dim": 5,
    "motion_encoder_dim": 14,
    "face_encoder_hidden_dim": 22,
    "face_encoder_num_heads": 3,
    "inject_face_latents_blocks": 1,
    "motion_encoder_batch_size": 8,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: those of Wan, a pose for two frames, and 5 pictures of a face."""
    inputs = wan.example_inputs(config, generator, batch)
    batch, _, frames, height, width = inputs["hidden_states"].shape
    pose, face = (config["latent_channels"], frames - 1, height, width), config["motion_encoder_size"]
    inputs["pose_hidden_states"] = torch.randn(batch, *pose, generator=generator)
    inputs["face_pixel_values"] = torch.rand(batch, 3, 5, face, face, generator=generator) * 2 - 1
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "image_keys": ({"added_kv_proj_dim": 48}, {"batch": 1}),
    "without_image": ({"image_dim": None}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
