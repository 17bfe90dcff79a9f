"""The right plans that mutants are made of: the tiny model of each family, and variants of some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise import models
from shardwise.models.lookup import family_of, tiny_case


@dataclass(frozen=True)
class Case:
    """One model with its plan and inputs."""

    name: str
    model: nn.Module
    plan: Mapping[str, Any]
    inputs: dict[str, Any]


VARIANTS = {
    "Flux2Transformer2DModel": [""],
    "FluxTransformer2DModel": [""],
    "QwenImageTransformer2DModel": [""],
    "MiniMaxH3Transformer3DModel": [""],
    "WanTransformer3DModel": ["", "image_to_video"],
    "SD3Transformer2DModel": ["", "without_norms_and_second_attention"],
    "LTXVideoTransformer3DModel": [""],
    "HunyuanVideoTransformer3DModel": [""],
    "ZImageTransformer2DModel": [""],
    "CogVideoXTransformer3DModel": [""],
    "Lumina2Transformer2DModel": [""],
}
"""Class -> names of its tiny configurations; the empty name is `TINY_CONFIG`."""


def case_names() -> list[str]:
    """Return the names of all cases: `Class` or `Class:variant`."""
    return [f"{name}:{variant}".rstrip(":") for name, variants in VARIANTS.items() for variant in variants]


def case(name: str) -> Case:
    """Build a case: its model has random parameters, none of them zero."""
    class_name, _, variant = name.partition(":")
    cls = getattr(models, class_name)
    family: Any = family_of(cls)
    config, inputs = tiny_case(family, variant)
    return Case(name, _randomized(cls(**config)), family.PLAN, inputs)


@torch.no_grad()
def _randomized(model: nn.Module) -> nn.Module:
    """Fill every parameter with random numbers: zero-initialised gates would make harmful faults look harmless."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() >= 2 else 0.2
        offset = 1.0 if parameter.dim() < 2 and name.endswith("weight") else 0.0
        parameter.copy_(noise * scale + offset)
    return model.eval()
