"""Tiny text encoders of transformers' classes: random, written to a folder, and what they make of tokens."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from shardwise import encoders
from tests.helpers import randomize

ENCODERS = sorted(encoders.FAMILIES)


def family(name: str) -> Any:
    """Return the module of an encoder's architecture."""
    return import_module(f"shardwise.encoders.families.{encoders.FAMILIES[name]}")


def cases() -> list[tuple[str, str]]:
    """Return (class, case) for each tiny configuration."""
    return [(name, case) for name in ENCODERS for case in family(name).TINY_CONFIGS[name]]


def tiny_encoder(name: str, case: str = "", **config: Any) -> Any:
    """Return a tiny random model of transformers' class of this name."""
    cls = getattr(transformers, name)
    return randomize(cls(cls.config_class(**{**family(name).TINY_CONFIGS[name][case], **config})))


def save_encoder(name: str, folder: Path, case: str = "", **config: Any) -> Any:
    """Write a tiny model as transformers would, and return it."""
    model = tiny_encoder(name, case, **config)
    model.save_pretrained(folder)
    return model


def tokens(model: Any, batch: int = 3, length: int = 7) -> dict[str, Tensor]:
    """Return tokens from the whole vocabulary, and a mask by which texts are shorter than the first."""
    generator = torch.Generator().manual_seed(0)
    size = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, size, (batch, length), generator=generator)
    ids[0, :4] = torch.tensor([0, size // 4, size // 2, size - 1])  # each of four ranks has one
    mask = torch.ones_like(ids)
    mask[1, 5:], mask[-1, 3:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


WITH_IMAGES = sorted(name for name in ENCODERS if "vision_config" in family(name).TINY_CONFIGS[name][""])


def with_an_image(name: str, model: Any) -> dict[str, Tensor]:
    """Return tokens of two texts, four tokens of the first of which are an image, and the image."""
    draw = torch.Generator().manual_seed(0)
    inputs = tokens(model, batch=2)
    config, own = model.config, inputs["input_ids"] % 60
    image = config.image_token_id
    own[0] = torch.tensor([1, 68, image, image, image, image, 69])
    kinds = (own == image).long()
    if name.startswith("Qwen"):
        pixels = {
            "pixel_values": torch.randn(16, 96, generator=draw),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
        }
        return {**inputs, "input_ids": own, "mm_token_type_ids": kinds, **pixels}
    inputs |= {"input_ids": own, "pixel_values": torch.randn(1, 3, 28, 28, generator=draw)}
    further = {"Gemma3": {"token_type_ids": kinds}, "Mistra": {"image_sizes": torch.tensor([[28, 28]])}}
    return inputs | further[name[:6]]


def language_of(model: nn.Module) -> int:
    """Return how many parameters a model holds outside of what looks at images."""
    found = {
        id(parameter): parameter.numel()
        for name, parameter in model.named_parameters()
        if not re.search(r"visual|vision|projector", name)
    }
    return sum(found.values())


@torch.no_grad()
def encoded(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Return all that a pipeline may read: the outputs, and every entry of `hidden_states`."""
    output = model(**inputs, output_hidden_states=True)
    found = {name: value for name, value in output.items() if isinstance(value, Tensor)}
    return found | {f"hidden_states.{i}": state for i, state in enumerate(output.hidden_states)}
