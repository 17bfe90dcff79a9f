"""The tensor parallel text encoders: each is the transformers class of its name, with a plan and sharded loading.

One file per architecture holds the plan, the classes, and tiny configurations to prove the plan on. Adding a model is
adding such a file and a line here. Classes are imported when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.encoders.families.gemma import Gemma2Model, Gemma3ForConditionalGeneration, Gemma3TextModel
    from shardwise.encoders.families.glm import GlmModel
    from shardwise.encoders.families.llama import (
        LlamaForCausalLM,
        LlamaModel,
        Ministral3ForCausalLM,
        MistralForCausalLM,
        MistralModel,
    )
    from shardwise.encoders.families.mistral3 import Mistral3ForConditionalGeneration, Mistral3Model
    from shardwise.encoders.families.qwen import Qwen2ForCausalLM, Qwen2Model, Qwen3ForCausalLM, Qwen3Model
    from shardwise.encoders.families.qwen_vl import (
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLTextModel,
        Qwen3VLForConditionalGeneration,
        Qwen3VLModel,
    )
    from shardwise.encoders.families.t5 import T5EncoderModel, UMT5EncoderModel

FAMILIES = {
    "Gemma2Model": "gemma",
    "Gemma3ForConditionalGeneration": "gemma",
    "Gemma3TextModel": "gemma",
    "GlmModel": "glm",
    "LlamaForCausalLM": "llama",
    "LlamaModel": "llama",
    "Ministral3ForCausalLM": "llama",
    "Mistral3ForConditionalGeneration": "mistral3",
    "Mistral3Model": "mistral3",
    "MistralForCausalLM": "llama",
    "MistralModel": "llama",
    "Qwen2ForCausalLM": "qwen",
    "Qwen2Model": "qwen",
    "Qwen2_5_VLForConditionalGeneration": "qwen_vl",
    "Qwen2_5_VLTextModel": "qwen_vl",
    "Qwen3ForCausalLM": "qwen",
    "Qwen3Model": "qwen",
    "Qwen3VLForConditionalGeneration": "qwen_vl",
    "Qwen3VLModel": "qwen_vl",
    "T5EncoderModel": "t5",
    "UMT5EncoderModel": "t5",
}
"""Class name -> the module of `shardwise.encoders.families` that holds it."""

__all__ = [
    "FAMILIES",
    "Gemma2Model",
    "Gemma3ForConditionalGeneration",
    "Gemma3TextModel",
    "GlmModel",
    "LlamaForCausalLM",
    "LlamaModel",
    "Ministral3ForCausalLM",
    "Mistral3ForConditionalGeneration",
    "Mistral3Model",
    "MistralForCausalLM",
    "MistralModel",
    "Qwen2ForCausalLM",
    "Qwen2Model",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen2_5_VLTextModel",
    "Qwen3ForCausalLM",
    "Qwen3Model",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLModel",
    "T5EncoderModel",
    "UMT5EncoderModel",
    "sharded_class",
]


def sharded_class(name: str) -> type[Any] | None:
    """Return the class that stands in for transformers' class of this name, or None where none does.

    None also for text encoders that are small and stay whole, such as `CLIPTextModel`.
    """
    return __getattr__(name) if name in FAMILIES else None


def __getattr__(name: str) -> Any:
    """Import a model class when it is first asked for."""
    if name not in FAMILIES:
        raise AttributeError(f"shardwise.encoders has no {name}; it has {', '.join(FAMILIES)}")
    return getattr(import_module(f"{__name__}.families.{FAMILIES[name]}"), name)


def __dir__() -> list[str]:
    """List the model classes."""
    return sorted(__all__)
