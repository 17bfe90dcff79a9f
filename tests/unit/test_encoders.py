"""Text encoders without ranks: the registry, their plans, and that of transformers."""

import ast
import inspect
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers.utils.typing_utils import _is_valid_type

from shardwise import encoders
from shardwise.encoders import saving
from shardwise.models.planning import declared_plan
from tests.encoders import ENCODERS, family

FOLDER = Path(encoders.__file__).parent / "families"


def test_every_class_is_public_and_every_family_is_listed() -> None:
    files = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert set(encoders.FAMILIES.values()) == files
    assert encoders.__all__ == ["FAMILIES", *sorted(encoders.FAMILIES), "sharded_class"]
    found = {
        node.name
        for path in FOLDER.glob("*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    assert found == set(encoders.FAMILIES)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_is_the_class_of_transformers_with_a_plan_and_a_tiny_case(name: str) -> None:
    cls = getattr(encoders, name)
    assert issubclass(cls, getattr(transformers, name))
    assert "" in family(name).TINY_CONFIGS[name]
    assert declared_plan(cls) is cls.sharding_plan


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "LlamaModel", "T5EncoderModel"])
def test_plan_that_transformers_has_for_itself_is_not_taken(name: str) -> None:
    assert declared_plan(getattr(transformers, name)) is None


def test_name_that_is_no_encoder_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no CLIPTextModel"):
        _ = encoders.CLIPTextModel


@pytest.mark.parametrize(
    "name", ["Gemma2Model", "LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "GlmModel"]
)
def test_plan_covers_what_transformers_own_plan_covers(name: str) -> None:
    theirs = getattr(transformers, name).config_class.base_model_tp_plan
    cut = {key for key, style in theirs.items() if not style.startswith("replicated")}
    assert cut <= getattr(encoders, name).sharding_plan.keys()


@pytest.mark.parametrize("name", ["CLIPTextModel", "CLIPTextModelWithProjection", "FAMILIES", "nonsense"])
def test_class_that_nothing_stands_in_for_is_none(name: str) -> None:
    assert encoders.sharded_class(name) is None


PIPELINES = {
    "Gemma2Model": ("SanaPipeline", "text_encoder"),
    "Gemma3ForConditionalGeneration": ("LTX2Pipeline", "text_encoder"),
    "GlmModel": ("CogView4Pipeline", "text_encoder"),
    "LlamaForCausalLM": ("HiDreamImagePipeline", "text_encoder_4"),
    "LlamaModel": ("HunyuanVideoPipeline", "text_encoder"),
    "Mistral3ForConditionalGeneration": ("Flux2Pipeline", "text_encoder"),
    "Qwen2_5_VLForConditionalGeneration": ("QwenImagePipeline", "text_encoder"),
    "Qwen3ForCausalLM": ("Flux2KleinPipeline", "text_encoder"),
    "Qwen3Model": ("OvisImagePipeline", "text_encoder"),
    "Qwen3VLForConditionalGeneration": ("NucleusMoEImagePipeline", "text_encoder"),
    "Qwen3VLModel": ("Krea2Pipeline", "text_encoder"),
    "T5EncoderModel": ("FluxPipeline", "text_encoder_2"),
    "UMT5EncoderModel": ("WanPipeline", "text_encoder"),
}
"""Class -> a pipeline that asks for it, and by which name."""


@pytest.mark.parametrize("name", PIPELINES)
def test_pipeline_of_diffusers_takes_the_encoder(name: str) -> None:
    pipeline, component = PIPELINES[name]
    wanted = getattr(diffusers, pipeline)._get_signature_types()[component]
    assert _is_valid_type(tiny_sharded(name), wanted)
    assert not _is_valid_type(torch.nn.Identity(), wanted)


class OneEncoder(diffusers.DiffusionPipeline):  # type: ignore[misc]
    """A pipeline of nothing but a text encoder."""

    def __init__(self, text_encoder: transformers.PreTrainedModel) -> None:
        super().__init__()
        self.register_modules(text_encoder=text_encoder)


def tiny_sharded(name: str) -> Any:
    """Return a tiny model of the class of ours of this name, at degree 1."""
    cls = encoders.sharded_class(name)
    assert cls is not None
    return cls(cls.config_class(**family(name).TINY_CONFIGS[name][""]))


@pytest.mark.parametrize("name", ENCODERS)
def test_pipeline_that_holds_an_encoder_names_the_class_of_transformers(name: str) -> None:
    assert OneEncoder(tiny_sharded(name)).config["text_encoder"] == ("transformers", name)


def test_options_with_which_transformers_saves_are_known() -> None:
    theirs = inspect.signature(transformers.PreTrainedModel.save_pretrained).parameters.keys()
    ours = inspect.signature(saving.save_encoder).parameters.keys()
    assert theirs - {"self", "kwargs"} <= ours | saving.EncoderSaveOptions.refused.keys()
