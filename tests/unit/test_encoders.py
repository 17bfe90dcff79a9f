"""Text encoders without ranks: the registry, their plans, and that of transformers."""

import ast
from pathlib import Path

import pytest
import transformers

from shardwise import encoders
from shardwise.models.planning import declared_plan
from tests.encoders import ENCODERS, family

FOLDER = Path(encoders.__file__).parent / "families"


def test_every_class_is_public_and_every_family_is_listed() -> None:
    files = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert set(encoders.FAMILIES.values()) == files
    assert encoders.__all__ == ["FAMILIES", *sorted(encoders.FAMILIES)]
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
