"""Sharded loading of text encoders: every number is that of transformers' own loading, whatever the files look like."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise import TensorParallelConfig, encoders
from shardwise.errors import ShardwiseError
from shardwise.runtime.shard import local_slice, sharding_of
from tests.encoders import ENCODERS, cases, encoded, save_encoder, tiny_encoder, tokens
from tests.helpers import randomize, relative_error
from tests.pool import Pool
from tests.tolerances import FP32, MISTAKE

WEIGHTS = "model.safetensors"


def load(name: str, folder: Path, check: bool = True, plan: Any = None, **kwargs: Any) -> Any:
    config = TensorParallelConfig(dist.get_world_size(), check=check, plan=plan)
    return getattr(encoders, name).from_pretrained(folder, parallel_config=config, **kwargs)


def attempt(name: str, folder: Path, **kwargs: Any) -> str:
    """Return the error of a load, as a user would see it, or an empty text."""
    try:
        load(name, folder, **kwargs)
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change the tensors of a checkpoint, as files of another age have them."""
    tensors = change(load_file(folder / WEIGHTS))
    save_file({key: t.clone() for key, t in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})


def _differences(name: str, folder: Path, **kwargs: Any) -> tuple[list[str], list[str], int, int]:
    """Return what is not as in a whole load: numbers and dtypes, ties; and the bytes read and those to be read."""
    sharded, rank, degree = load(name, folder, check=False, **kwargs), dist.get_rank(), dist.get_world_size()
    whole = getattr(transformers, name).from_pretrained(folder, **kwargs)
    plan, wrong, ties = sharding_of(sharded).plan, [], []
    mine, theirs = (
        dict([*m.named_parameters(remove_duplicate=False), *m.named_buffers()]) for m in (sharded, whole)
    )
    for key, tensor in theirs.items():
        want = local_slice(tensor, plan.layout(key), rank, degree)
        if key not in mine or mine[key].dtype != want.dtype or not torch.equal(mine[key], want):
            wrong.append(key)
    for key, tensor in theirs.items():
        ties += [
            f"{key} {other}" for other in theirs if (mine[key] is mine[other]) != (tensor is theirs[other])
        ]
    slices = {
        id(theirs[key]): local_slice(theirs[key], plan.layout(key), rank, degree)
        for key in whole.state_dict()
    }
    stored = next(iter(load_file(folder / WEIGHTS).values())).dtype.itemsize
    return wrong, ties, sharded.load_report.bytes_read, stored * sum(t.numel() for t in slices.values())


CAST = [
    "T5EncoderModel",
    "Qwen3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
]
"""One class of each way to compute buffers, or to keep weights in fp32."""


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, None) for name in ENCODERS), *((name, dtype) for name in CAST for dtype in ("float32", torch.float16))],
    ids=str,
)  # fmt: skip
def test_slices_and_buffers_are_bit_equal_to_those_of_a_whole_load(
    two_ranks: Pool, tmp_path: Path, name: str, dtype: Any
) -> None:
    tiny_encoder(name).to(torch.bfloat16).save_pretrained(tmp_path)
    asked = {} if dtype is None else {"dtype": dtype}
    for wrong, ties, read, planned in two_ranks.run(_differences, name, tmp_path, **asked):
        assert (wrong, ties, read) == ([], [], planned)


# --- what files of other ages look like ---------------------------------------------------------------------


def _renamed(pattern: str, name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {re.sub(pattern, name, key): t for key, t in tensors.items()}


def _with_both(key: str, other: str, factor: float) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {**tensors, other: tensors[key] * factor}


OLD = {
    "one name of two": ("T5EncoderModel", "", _renamed(r"^shared\.", "encoder.embed_tokens.")),
    "both names": ("T5EncoderModel", "", _with_both("shared.weight", "encoder.embed_tokens.weight", 1.0)),
    "two weights": ("UMT5EncoderModel", "", _with_both("shared.weight", "encoder.embed_tokens.weight", 2.0)),
    "decoder beside it": ("T5EncoderModel", "", _with_both("shared.weight", "decoder.embed.weight", 1.0)),
    "of a model with scores": ("Qwen3Model", "", _renamed("^", "model.")),
    "names of a decoder in itself": (
        "Mistral3ForConditionalGeneration",
        "",
        _renamed(r"^language_model\.model\.", "model.language_model."),
    ),
    "without its prefix": ("LlamaForCausalLM", "", _renamed(r"^model\.", "")),
    "scores that are tied": (
        "Qwen2ForCausalLM",
        "tied",
        _with_both("model.embed_tokens.weight", "lm_head.weight", 1.0),
    ),
}


@pytest.mark.parametrize("layout", OLD)
def test_files_of_another_age_are_loaded_as_one_process_loads_them(
    two_ranks: Pool, tmp_path: Path, layout: str
) -> None:
    name, case, change = OLD[layout]
    save_encoder(name, tmp_path, case)
    rewrite(tmp_path, change)
    assert all(wrong == ties == [] for wrong, ties, *_ in two_ranks.run(_differences, name, tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: {k: t for k, t in tensors.items() if "layers.1.mlp.up" not in k}, "missing: layers.1.mlp.up"),
        (lambda tensors: {k: t[:-2] for k, t in tensors.items()}, "embed_tokens.weight is [70, 40]"),
        (_with_both("norm.weight", "model.norm.weight", 1.0), "both mean norm.weight"),
    ],
    ids=["missing", "other shapes", "twice"],
)  # fmt: skip
def test_files_that_do_not_fit_are_an_error_on_every_rank(
    two_ranks: Pool, tmp_path: Path, change: Any, message: str
) -> None:
    save_encoder("Qwen3Model", tmp_path)
    rewrite(tmp_path, change)
    for error in two_ranks.run(attempt, "Qwen3Model", tmp_path):
        assert error.startswith("CheckpointError")
        assert message in error


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"device_map": "auto"}, "device_map='auto' cannot be combined"),
        ({"tp_plan": "auto"}, "tp_plan='auto' cannot be combined"),
        ({"dtype": torch.int8}, "dtype must be 'auto' or a floating"),
        ({"nonsense": 1}, "Qwen3Model knows no option nonsense"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_option_that_cannot_be_honoured_is_refused_on_every_rank(
    two_ranks: Pool, tmp_path: Path, option: dict[str, Any], message: str
) -> None:
    save_encoder("Qwen3Model", tmp_path)
    for error in two_ranks.run(attempt, "Qwen3Model", tmp_path, **option):
        assert error.startswith("UnsupportedOption")
        assert message in error


def test_dtype_that_nothing_says_is_asked_for(two_ranks: Pool, tmp_path: Path) -> None:
    save_encoder("Qwen3Model", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert all("pass dtype=" in error for error in two_ranks.run(attempt, "Qwen3Model", tmp_path))
    assert two_ranks.run(attempt, "Qwen3Model", tmp_path, dtype=torch.float32) == ["", ""]


def test_degree_one_returns_the_ordinary_model_without_a_process_group(tmp_path: Path) -> None:
    whole = save_encoder("T5EncoderModel", tmp_path)
    model = encoders.T5EncoderModel.from_pretrained(tmp_path, parallel_config=TensorParallelConfig(1))
    assert isinstance(model, transformers.T5EncoderModel)
    assert relative_error(model.shared.weight, whole.shared.weight) == 0
    assert model.__module__.startswith("transformers.")


# --- in memory, gradients, refusals -------------------------------------------------------------------------


def _shard_in_memory(name: str, case: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    model = randomize(
        getattr(encoders, name)(tiny_encoder(name, case).config), seed=1 if dist.get_rank() == 0 else 2
    )
    model.enable_parallelism(config=TensorParallelConfig(dist.get_world_size()))
    return encoded(model, inputs)


@pytest.mark.parametrize(("name", "case"), [("T5EncoderModel", ""), ("Qwen3ForCausalLM", "tied")])
def test_model_in_memory_is_sharded_with_the_values_of_the_first_rank(
    two_ranks: Pool, name: str, case: str
) -> None:
    whole = tiny_encoder(name, case)
    inputs = tokens(whole)
    expected = encoded(whole, inputs)
    for found in two_ranks.run(_shard_in_memory, name, case, inputs):
        assert max(relative_error(found[key], expected[key]) for key in expected) < FP32


def _gradients(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    output = model(**inputs)
    output[0].square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _gradient_error(name: str, case: str, folder: Path) -> float:
    sharded = load(name, folder)
    whole = getattr(transformers, name).from_pretrained(folder).eval()
    inputs = tokens(whole)
    found, expected = _gradients(sharded, inputs), _gradients(whole, inputs)
    plan, rank, degree = sharding_of(sharded).plan, dist.get_rank(), dist.get_world_size()
    mine = {key: local_slice(grad, plan.layout(key), rank, degree) for key, grad in expected.items()}
    assert found.keys() == mine.keys()
    return max(((found[key] - mine[key]).abs().max() / expected[key].abs().max()).item() for key in expected)


@pytest.mark.parametrize(
    ("name", "case"), [("T5EncoderModel", ""), ("Qwen3ForCausalLM", "tied"), ("Qwen3Model", "two key heads")]
)
def test_gradients_are_those_of_one_process(two_ranks: Pool, tmp_path: Path, name: str, case: str) -> None:
    save_encoder(name, tmp_path, case)
    assert max(two_ranks.run(_gradient_error, name, case, tmp_path)) < FP32


def _ask_for_a_token(folder: Path, token: int) -> str:
    model = load("Qwen3Model", folder)
    try:
        model(input_ids=torch.tensor([[1, token]]))
    except IndexError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("token", [72, -1, 10**6])
def test_token_that_no_rank_has_is_an_error_on_each(two_ranks: Pool, tmp_path: Path, token: int) -> None:
    save_encoder("Qwen3Model", tmp_path)
    assert all("out of range" in message for message in two_ranks.run(_ask_for_a_token, tmp_path, token))


def _refusal(folder: Path) -> str:
    try:
        load("T5EncoderModel", folder).resize_token_embeddings(80)
    except ShardwiseError as error:
        return str(error)
    return ""


def test_sharded_encoder_refuses_to_change_its_vocabulary(two_ranks: Pool, tmp_path: Path) -> None:
    save_encoder("T5EncoderModel", tmp_path)
    assert all("resize it before sharding" in error for error in two_ranks.run(_refusal, tmp_path))


# --- broken on purpose --------------------------------------------------------------------------------------

T5 = encoders.T5EncoderModel.sharding_plan
BIAS = "encoder.block.*.layer.0.SelfAttention.relative_attention_bias"


def test_relative_bias_left_whole_is_refused_before_weights_are_read(two_ranks: Pool, tmp_path: Path) -> None:
    save_encoder("T5EncoderModel", tmp_path)
    plan = {key: style for key, style in T5.items() if key != BIAS}
    for message in two_ranks.run(attempt, "T5EncoderModel", tmp_path, plan=plan):
        assert message.startswith("PlanError")
        assert "SelfAttention" in message


def _without_a_sum(name: str, folder: Path, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    model = load(name, folder)
    for module in model.modules():
        if type(module).__name__.startswith("Vocabulary"):
            module.forward = lambda ids, own=module: torch.nn.functional.embedding(
                (ids - own.tp_span.start).clamp(0, own.tp_span.length - 1), own.weight
            )
    return encoded(model, inputs)


def test_vocabulary_without_mask_and_sum_is_noticed(two_ranks: Pool, tmp_path: Path) -> None:
    whole = save_encoder("Qwen3Model", tmp_path)
    inputs = tokens(whole)
    expected = encoded(whole, inputs)["last_hidden_state"]
    for found in two_ranks.run(_without_a_sum, "Qwen3Model", tmp_path, inputs):
        assert relative_error(found["last_hidden_state"], expected) > MISTAKE


def test_every_case_is_drawn() -> None:
    assert {name for name, _ in cases()} == set(encoders.FAMILIES)
