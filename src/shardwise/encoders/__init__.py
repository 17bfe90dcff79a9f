"""The tensor parallel text encoders: each is the transformers class of its name, with a plan and sharded loading.

One file per architecture holds the plan, the classes, and tiny configurations to prove the plan on. Adding a model is
adding such a file and a line here. Classes are imported when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.encoders.families.llama import (
        LlamaForCausalLM,
        LlamaModel,
        Ministral3ForCausalLM,
        MistralForCausalLM,
        MistralModel,
    )
    from shardwise.encoders.families.qwen import Qwen2ForCausalLM, Qwen2Model, Qwen3ForCausalLM, Qwen3Model
    from shardwise.encoders.families.t5 import T5EncoderModel, UMT5EncoderModel

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "LlamaModel": "llama",
    "Ministral3ForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MistralModel": "llama",
    "Qwen2ForCausalLM": "qwen",
    "Qwen2Model": "qwen",
    "Qwen3ForCausalLM": "qwen",
    "Qwen3Model": "qwen",
    "T5EncoderModel": "t5",
    "UMT5EncoderModel": "t5",
}
"""Class name -> the module of `shardwise.encoders.families` that holds it."""

__all__ = [
    "FAMILIES",
    "LlamaForCausalLM",
    "LlamaModel",
    "Ministral3ForCausalLM",
    "MistralForCausalLM",
    "MistralModel",
    "Qwen2ForCausalLM",
    "Qwen2Model",
    "Qwen3ForCausalLM",
    "Qwen3Model",
    "T5EncoderModel",
    "UMT5EncoderModel",
]


def __getattr__(name: str) -> Any:
    """Import a model class when it is first asked for."""
    if name not in FAMILIES:
        raise AttributeError(f"shardwise.encoders has no {name}; it has {', '.join(FAMILIES)}")
    return getattr(import_module(f"{__name__}.families.{FAMILIES[name]}"), name)


def __dir__() -> list[str]:
    """List the model classes."""
    return sorted(__all__)
