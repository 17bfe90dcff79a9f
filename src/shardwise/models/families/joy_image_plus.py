"""JoyImage-Edit Plus: the blocks of JoyImage-Edit over images of several sizes, padded to one length."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from diffusers import JoyImageEditPlusTransformer3DModel as _JoyImageEditPlusTransformer3DModel

from shardwise.models.families.joy_image import PLAN, TINY_CONFIG
from shardwise.models.mixin import TensorParallelMixin

__all__ = ["PLAN", "TINY_CONFIG", "JoyImageEditPlusTransformer3DModel", "example_inputs"]


class JoyImageEditPlusTransformer3DModel(TensorParallelMixin, _JoyImageEditPlusTransformer3DModel):  # type: ignore[misc]
    """The transformer of JoyImage-Edit Plus, with tensor parallelism. Heads: 24; whole: as in JoyImage-Edit."""

    _tp_plan = PLAN


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: an image of 5 x 3 tokens with one of 3 x 2 to work from, 7 of text.

    The last sample has a smaller one and a shorter text, and is padded.
    """
    shapes = [[(1, 5, 3), (1, 3, 2)] for _ in range(batch - 1)] + [[(1, 5, 3), (1, 2, 2)]]
    tokens = max(sum(map(prod, images)) for images in shapes)
    patches = (tokens, config["in_channels"], *config["patch_size"])
    mask = torch.ones(batch, 7)
    mask[-1, 4:] = 0
    return {
        "hidden_states": torch.randn(batch, *patches, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["text_dim"], generator=generator),
        "encoder_hidden_states_mask": mask,
        "shape_list": shapes,
        "timestep": torch.randint(0, 1000, (batch,), generator=generator),
    }
