"""SkyReels-V2: Wan, with a noise level for each frame, attention to earlier frames only, and a frame rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import SkyReelsV2Transformer3DModel as _SkyReelsV2Transformer3DModel

from shardwise.models.families import wan
from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent

PLAN = {
    **wan.PLAN,
    # In the models that are told the frame rate.
    "fps_projection.net.0.proj": IfPresent("colwise"),
    "fps_projection.net.2": IfPresent("rowwise"),
}


class SkyReelsV2Transformer3DModel(TensorParallelMixin, _SkyReelsV2Transformer3DModel):  # type: ignore[misc]
    """The transformer of SkyReels-V2, with tensor parallelism. Heads: 12, 16 or 40; whole: patches, tables, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {**wan.TINY_CONFIG, "inject_sample_info": False, "num_frame_per_block": 1}


def example_inputs(
    config: Mapping[str, Any], generator: torch.Generator, batch: int = 3, per_frame: bool = False
) -> dict[str, Any]:
    """Return inputs for a model of this config: those of Wan, of which frames come in blocks if the config has any.

    With `per_frame` each frame has a noise level of its own (diffusion forcing).
    """
    inputs = wan.example_inputs(config, generator, batch)
    batch = inputs["hidden_states"].shape[0]
    inputs["hidden_states"] = inputs["hidden_states"].repeat(1, 1, config["num_frame_per_block"], 1, 1)
    if per_frame:
        frames = inputs["hidden_states"].shape[2] // config["patch_size"][0]
        inputs["timestep"] = torch.randint(0, 1000, (batch, frames), generator=generator)
        inputs["enable_diffusion_forcing"] = True
    if config["inject_sample_info"]:
        inputs["fps"] = [i % 2 for i in range(batch)]
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "image_to_video": wan.TINY_VARIANTS["image_to_video"],
    "frames_in_blocks": ({"num_frame_per_block": 2}, {}),
    "frame_rate": ({"inject_sample_info": True}, {}),
    # With a frame rate, noise levels for each frame are those of one sample.
    "diffusion_forcing": ({"inject_sample_info": True}, {"batch": 1, "per_frame": True}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
