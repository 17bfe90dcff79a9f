"""Saved text encoders: the files of a sharded one are those of the whole one, and stock libraries load them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
import torch.distributed as dist
import transformers

import shardwise
from shardwise import TensorParallelConfig, encoders
from shardwise.encoders import saving
from tests.distributed.test_encoder_loading import OLD, load, rewrite
from tests.distributed.test_saving import attempt, differences
from tests.encoders import save_encoder, tiny_encoder
from tests.pool import Pool


def saved(name: str, source: Path, target: Path, **options: Any) -> None:
    """Load a checkpoint sharded, and save it again; the plans are checked elsewhere."""
    load(name, source, check=False).save_pretrained(target, **options)


def saved_whole(name: str, source: Path, target: Path, **options: Any) -> None:
    """Load a checkpoint as one process does, and save it again."""
    getattr(transformers, name).from_pretrained(source).save_pretrained(target, **options)


CASES = [
    ("T5EncoderModel", ""),  # two names of one vocabulary, columns of a bias
    ("Qwen3Model", "two key heads"),
    ("Qwen3ForCausalLM", "odd vocabulary, tied"),  # which stays whole
    ("LlamaForCausalLM", "tied"),
    ("GlmModel", ""),  # a fused projection
    ("Gemma3ForConditionalGeneration", ""),
    ("Qwen2_5_VLForConditionalGeneration", ""),  # keys go back to older ones, here and in the next
    ("Mistral3ForConditionalGeneration", "tied"),
]
AT_FOUR = CASES[1:2] + CASES[-1:]


@pytest.mark.parametrize(
    ("ranks", "name", "case"),
    [*((2, *case) for case in CASES), *((4, *case) for case in AT_FOUR)],
    indirect=["ranks"],
)
def test_E3_saved_files_are_those_of_the_whole_model(
    ranks: Pool, tmp_path: Path, name: str, case: str
) -> None:
    source, whole, target = (tmp_path / name for name in "swt")
    save_encoder(name, source, case)
    saved_whole(name, source, whole)
    ranks.run(saved, name, source, target)
    assert differences(whole, target) == []


def test_E3_options_give_the_files_of_the_whole_model(two_ranks: Pool, tmp_path: Path) -> None:
    name, (source, whole, target) = "Qwen3ForCausalLM", (tmp_path / name for name in "swt")
    model = tiny_encoder(name, "tied").to(torch.bfloat16)
    model.generation_config.max_new_tokens = 7  # which is not in config.json
    model.save_pretrained(source)
    options = {"variant": "fp16", "max_shard_size": "20KB"}
    saved_whole(name, source, whole, **options)
    two_ranks.run(saved, name, source, target, **options)
    assert len(list(target.glob("model.fp16-*-of-*.safetensors"))) > 1
    assert differences(whole, target) == []


@pytest.mark.parametrize("layout", ["two weights", "of a model with scores"])
def test_E3_files_of_another_age_are_saved_as_one_process_saves_them(
    two_ranks: Pool, tmp_path: Path, layout: str
) -> None:
    (name, case, change), (source, whole, target) = OLD[layout], (tmp_path / name for name in "swt")
    save_encoder(name, source, case)
    rewrite(source, change)
    saved_whole(name, source, whole)
    two_ranks.run(saved, name, source, target)
    assert differences(whole, target) == []


def test_E3_transformers_loads_what_a_sharded_model_saved(two_ranks: Pool, tmp_path: Path) -> None:
    whole = save_encoder("T5EncoderModel", tmp_path / "source")
    two_ranks.run(saved, "T5EncoderModel", tmp_path / "source", tmp_path / "target")
    again = transformers.AutoModelForTextEncoding.from_pretrained(tmp_path / "target")
    assert type(again) is transformers.T5EncoderModel
    assert again.config.architectures == ["T5EncoderModel"]
    assert again.shared.weight is again.encoder.embed_tokens.weight
    expected = whole.state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in again.state_dict().items())


def _in_memory(name: str, folder: Path, by_method: bool) -> None:
    model = getattr(encoders, name).from_pretrained(folder)
    config = TensorParallelConfig(dist.get_world_size(), check=False)
    if by_method:
        model.enable_parallelism(config=config)
    else:
        shardwise.enable_parallelism(model, config=config)
    model.save_pretrained(folder.with_name("target"))


@pytest.mark.parametrize("by_method", [True, False])
def test_E3_model_sharded_in_memory_is_saved(two_ranks: Pool, tmp_path: Path, by_method: bool) -> None:
    save_encoder("LlamaForCausalLM", tmp_path / "source", "tied")
    two_ranks.run(_in_memory, "LlamaForCausalLM", tmp_path / "source", by_method)
    assert differences(tmp_path / "source", tmp_path / "target") == []


def _attempt(*arguments: Any, **options: Any) -> str:
    return attempt(partial(saved, *arguments, **options))


@pytest.mark.parametrize(
    ("option", "message"),
    [({"sharded": True}, "a file for each rank"), ({"save_original_format": False}, "leave it out")],
)
def test_E3_option_that_cannot_be_honoured_is_refused_on_every_rank(
    two_ranks: Pool, tmp_path: Path, option: dict[str, Any], message: str
) -> None:
    save_encoder("Qwen3Model", tmp_path / "source")
    arguments = ("Qwen3Model", tmp_path / "source", tmp_path / "target")
    for error in two_ranks.run(_attempt, *arguments, **option):
        assert error.startswith("UnsupportedOption")
        assert message in error
    assert not (tmp_path / "target").exists()


def _saved_under_its_own_names(*arguments: Any) -> None:
    with mock.patch.object(saving, "stored_names", lambda model, tensors: {name: name for name in tensors}):
        saved(*arguments)


def test_keys_that_are_not_renamed_are_noticed(two_ranks: Pool, tmp_path: Path) -> None:
    name, (source, whole, target) = "Qwen2_5_VLForConditionalGeneration", (tmp_path / name for name in "swt")
    save_encoder(name, source)
    saved_whole(name, source, whole)
    two_ranks.run(_saved_under_its_own_names, name, source, target)
    assert differences(whole, target) == ["model.safetensors"]


# --- in a pipeline ---------------------------------------------------------------------------------------------------

REST = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "tokenizer_2", "transformer"))


def _in_a_pipeline(source: Path, folder: Path) -> tuple[str, str]:
    encoder = load("T5EncoderModel", source, check=False)
    pipeline = diffusers.FluxPipeline(text_encoder_2=encoder, **REST)
    pipeline.save_pretrained(folder)
    again = diffusers.FluxPipeline.from_pretrained(folder, text_encoder_2=encoder, **REST)
    assert again.text_encoder_2 is encoder
    return pipeline.config["text_encoder_2"]


def test_pipeline_takes_a_sharded_encoder_and_saves_what_diffusers_loads(
    two_ranks: Pool, tmp_path: Path
) -> None:
    whole = save_encoder("T5EncoderModel", tmp_path / "source")
    for named in two_ranks.run(_in_a_pipeline, tmp_path / "source", tmp_path / "pipeline"):
        assert named == ("transformers", "T5EncoderModel")
    again = diffusers.FluxPipeline.from_pretrained(tmp_path / "pipeline", **REST).text_encoder_2
    assert type(again) is transformers.T5EncoderModel
    expected = whole.state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in again.state_dict().items())
