"""LoRA adapters for tiny models: random A and B, neither zero, on every Linear."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.loaders import Flux2LoraLoaderMixin, FluxLoraLoaderMixin, QwenImageLoraLoaderMixin
from torch import Tensor, nn

FAMILIES = [
    "FluxTransformer2DModel",
    "Flux2Transformer2DModel",
    "QwenImageTransformer2DModel",
    "MiniMaxH3Transformer3DModel",
    "WanTransformer3DModel",
    "SD3Transformer2DModel",
]
"""Classes of which everything that goes together with sharding is tested."""

RANK = 3
"""Divisible by no degree."""


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the Linears of a model that has no adapters, by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}


def adapter(
    model: nn.Module, seed: int = 7, rank: int = RANK, prefix: str = "transformer."
) -> dict[str, Tensor]:
    """Return an adapter for all Linears of a whole model without adapters, as a file would hold it."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for path, linear in linears(model).items():
        for factor, shape in (
            ("lora_A", (rank, linear.in_features)),
            ("lora_B", (linear.out_features, rank)),
        ):
            noise = torch.randn(shape, generator=generator) * shape[1] ** -0.5
            state[f"{prefix}{path}.{factor}.weight"] = noise
    return state


def config(model: nn.Module, **options: Any) -> Any:
    """Return PEFT's configuration of an adapter on all Linears."""
    from peft import LoraConfig

    return LoraConfig(**{"r": RANK, "lora_alpha": 2, "target_modules": list(linears(model)), **options})


def randomize_factors(model: nn.Module, seed: int = 9) -> None:
    """Fill A and B of a whole model with random numbers: PEFT starts with a B of zeros."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = noise * parameter.shape[-1] ** -0.5


class Pipeline:
    """What diffusers' loaders need of a pipeline."""

    text_encoder = None
    hf_device_map = None

    def __init__(self, transformer: Any) -> None:
        self.transformer, self.components = transformer, {"transformer": transformer}


class FluxPipeline(Pipeline, FluxLoraLoaderMixin):
    """Of FLUX.1."""


class Flux2Pipeline(Pipeline, Flux2LoraLoaderMixin):
    """Of FLUX.2."""


class QwenPipeline(Pipeline, QwenImageLoraLoaderMixin):
    """Of Qwen-Image."""
