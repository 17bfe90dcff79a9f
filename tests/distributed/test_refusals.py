"""What raises, where it raises, and that a refused call leaves everything as it was."""

from __future__ import annotations

import builtins
import copy
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import TensorParallelConfig, enable_parallelism
from shardwise.errors import (
    ConfigError,
    GroupError,
    PlanError,
    RankFailure,
    ShardwiseError,
    UnsupportedOperation,
    UnsupportedOption,
    UnsupportedState,
)
from shardwise.models import FluxTransformer2DModel
from shardwise.runtime.shard import sharding_of
from tests import tolerances
from tests.helpers import family, outputs, randomize, relative_error, tiny_model
from tests.pool import Pool
from tests.small_models import Glu, Mlp, Parallel, Transformer, small_input

FLUX2 = "Flux2Transformer2DModel"


def world() -> TensorParallelConfig:
    return TensorParallelConfig(tp_degree=dist.get_world_size())


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that sharding changes about a model."""
    return {
        "tensors": {n: t.clone() for n, t in [*model.named_parameters(), *model.named_buffers()]},
        "classes": {n: type(m) for n, m in model.named_modules()},
        "integers": {
            f"{n}.{k}": v for n, m in model.named_modules() for k, v in vars(m).items() if isinstance(v, int)
        },
        "marks": (sharding_of(model), getattr(model, "_parallel_config", None)),
    }


def same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    tensors = before["tensors"].keys() == after["tensors"].keys() and all(
        torch.equal(t, after["tensors"][n]) for n, t in before["tensors"].items()
    )
    return tensors and all(before[k] == after[k] for k in ("classes", "integers", "marks"))


# --- E1: options, before any file is opened ------------------------------------------------------------------


OPTIONS: list[dict[str, Any]] = [
    {"device_map": "cpu"},
    {"device_map": {"": "cpu"}},
    {"quantization_config": object()},
    {"low_cpu_mem_usage": False},
    {"use_flashpack": True},
    {"use_safetensors": False},
    {"ignore_mismatched_sizes": True},
    {"dtype": "bfloat16"},
]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: "-".join(map(str, option)))
def test_E1_refused_option_raises_before_any_file_is_opened(option: dict[str, Any]) -> None:
    # No such folder, no process group: the option is what is reported, and nothing was touched to find out.
    with (
        mock.patch.object(builtins, "open", side_effect=AssertionError("a file was opened")),
        mock.patch.object(os, "open", side_effect=AssertionError("a file was opened")),
        pytest.raises(UnsupportedOption, match=next(iter(option))),
    ):
        Mlp.from_pretrained("/no/such/folder", parallel_config=TensorParallelConfig(tp_degree=2), **option)


def test_E1_file_of_an_original_format_is_not_loaded_whole_in_silence() -> None:
    with pytest.raises(
        UnsupportedOption, match="from_single_file cannot load FluxTransformer2DModel sharded"
    ):
        FluxTransformer2DModel.from_single_file(
            "/no/such/file.safetensors", parallel_config=TensorParallelConfig(tp_degree=2)
        )


def _option(option: dict[str, Any]) -> str:
    try:
        Mlp.from_pretrained("/no/such/folder", parallel_config=world(), **option)
    except UnsupportedOption as error:
        return str(error)
    return "no error"


def test_E1_refused_option_raises_on_every_rank(two_ranks: Pool) -> None:
    assert all("device_map" in message for message in two_ranks.run(_option, {"device_map": "auto"}))


def test_E1_pickled_weights_are_refused(two_ranks: Pool, tmp_path: Path) -> None:
    randomize(Mlp()).save_pretrained(tmp_path, safe_serialization=False)
    for message in two_ranks.run(_load_error, Mlp, tmp_path):
        assert message.startswith("UnsupportedOption")
        assert "safetensors" in message


def test_E1_quantized_checkpoint_is_refused(two_ranks: Pool, tmp_path: Path) -> None:
    model = randomize(Mlp())
    model.register_to_config(quantization_config={"quant_method": "bitsandbytes"})
    model.save_pretrained(tmp_path)
    for message in two_ranks.run(_load_error, Mlp, tmp_path):
        assert message.startswith("UnsupportedOption")
        assert "quantized" in message


def _load_error(cls: type[Any], folder: Any) -> str:
    try:
        cls.from_pretrained(folder, parallel_config=world())
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --- E2: states, before and after ----------------------------------------------------------------------------


def _lora(model: Any) -> None:
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], use_dora=True))


def _offload_hooks(model: Any) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(model.transformer_blocks[0], ModelHook())


def _group_offload(model: Any) -> None:
    model.enable_group_offload(onload_device=torch.device("cpu"), offload_type="leaf_level")


def _layerwise_casting(model: Any) -> None:
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def _quantized_flag(model: Any) -> None:
    model.is_quantized = True


def _quantize(model: Any) -> None:
    class Packed(nn.Parameter):
        """A stand-in for any quantizer's own kind of parameter."""

    linear = model.transformer_blocks[0].attn.to_q
    linear._parameters["weight"] = Packed(linear.weight.data, requires_grad=False)


def _device_map(model: Any) -> None:
    model.hf_device_map = {"": "cpu"}


def _meta(model: Any) -> None:
    model.to("meta")


STATES = {
    f.__name__.strip("_"): f
    for f in (
        _lora,
        _offload_hooks,
        _group_offload,
        _layerwise_casting,
        _quantized_flag,
        _quantize,
        _device_map,
        _meta,
    )
}


def _shard_in_state(prepare: str, only_rank: int | None) -> str:
    model = tiny_model(FLUX2)
    if only_rank is None or dist.get_rank() == only_rank:
        STATES[prepare](model)
    before = {n: type(m) for n, m in model.named_modules()}
    try:
        model.enable_parallelism(config=world())
    except ShardwiseError as error:
        assert {n: type(m) for n, m in model.named_modules()} == before
        assert sharding_of(model) is None
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("prepare", STATES)
def test_E2_model_in_this_state_is_refused_before_it_is_sharded(two_ranks: Pool, prepare: str) -> None:
    for message in two_ranks.run(_shard_in_state, prepare, None):
        assert message.startswith("UnsupportedState"), message


def test_E2_state_of_one_rank_is_an_error_on_all(two_ranks: Pool) -> None:
    first, second = two_ranks.run(_shard_in_state, "lora", 1)
    assert first.startswith("RankFailure")
    assert "LoRA" in first
    assert "rank 1 of 2" in first
    assert second.startswith("UnsupportedState")


def _after(stock: bool) -> dict[str, str]:
    """Try on a sharded model what it does not support yet."""
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging

    from shardwise import demo_model_path

    logging.disable_progress_bar()
    pipeline = DiffusionPipeline.from_pretrained(demo_model_path())
    model = pipeline.transformer
    if stock:
        enable_parallelism(model, config=world())
    else:
        model = getattr(family(FLUX2), FLUX2).from_pretrained(
            demo_model_path(), subfolder="transformer", parallel_config=world()
        )
        pipeline.transformer = model
    calls: dict[str, Any] = {
        "push_to_hub": lambda: model.push_to_hub("someone/tiny"),
        "save_lora_adapter": lambda: model.save_lora_adapter("/no/such/folder"),
        "enable_parallelism": lambda: enable_parallelism(model, config=world()),
        "fuse_qkv_projections": lambda: model.fuse_qkv_projections(),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
            messages[name] = "no error"
        except (
            UnsupportedOperation,
            UnsupportedState,
            ValueError,
            NotImplementedError,
            RuntimeError,
        ) as error:
            messages[name] = str(error)
    return messages


@pytest.mark.parametrize("stock", [False, True], ids=["loaded_sharded", "diffusers_class_sharded_in_memory"])
def test_E2_E3_sharded_model_refuses_what_it_cannot_do(two_ranks: Pool, stock: bool) -> None:
    for messages in two_ranks.run(_after, stock):
        for name, message in messages.items():
            assert (
                "tensor parallel" in message
                or "sharded already" in message
                or "is already applied" in message
            ), (
                name,
                message,
            )


def test_E3_push_to_hub_says_to_save_and_upload(two_ranks: Pool) -> None:
    for messages in two_ranks.run(_after, False):
        assert "save the model with save_pretrained, and upload the folder" in messages["push_to_hub"]


class Foreign(nn.Module):
    """A model that diffusers does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def save_pretrained(self, folder: str) -> None:
        raise AssertionError("called")


def _save_foreign() -> str:
    model = enable_parallelism(Foreign(), config=world(), plan={"up": "colwise", "down": "rowwise"})
    try:
        model.save_pretrained("/no/such/folder")
    except UnsupportedOperation as error:
        return str(error)
    return "no error"


def test_E3_save_of_another_library_s_model_says_to_save_before_sharding(two_ranks: Pool) -> None:
    for message in two_ranks.run(_save_foreign):
        assert "before sharding" in message


# --- E4, E5, E6: heads and blocks ------------------------------------------------------------------------------


def _divisibility(cls: type[Any], kwargs: dict[str, Any], folder: Path | None) -> str:
    opened: list[str] = []
    real_open = os.open

    def spy(path: Any, *args: Any, **rest: Any) -> int:
        opened.append(str(path))
        return real_open(path, *args, **rest)

    with mock.patch.object(os, "open", spy), mock.patch("shardwise.models.parallelism.read_index") as headers:
        try:
            if folder is None:
                randomize(cls(**kwargs)).enable_parallelism(config=world())
            else:
                cls.from_pretrained(folder, parallel_config=world())
        except PlanError as error:
            assert not headers.called
            assert not [path for path in opened if path.endswith(".safetensors")]
            return str(error)
    return "no error"


@pytest.mark.parametrize("loaded", [True, False], ids=["from_pretrained", "enable_parallelism"])
@pytest.mark.parametrize(
    ("cls", "kwargs", "texts"),
    [
        (
            Transformer,
            {"width": 24, "num_attention_heads": 6},
            [
                "num_attention_heads is 6",
                "not divisible by tp_degree 4",
                "1, 2, 3, 6",
                "the whole plan: 1, 2, 3, 6\n",
            ],
        ),
        (
            Transformer,
            {"width": 48, "num_attention_heads": 12, "kv_heads": 3},
            ["blocks.0", "kv_heads is 3", "tp_degree 4", "the whole plan: 1, 3, 6, 12\n"],
        ),
        (Glu, {"hidden": 10}, ["gate_value", "block 1 of 2 has 10 rows", "block 2 of 2", "1, 2, 5, 10"]),
        (
            Parallel,
            {"mlp": 30},
            ["blocks.0.proj_in", "block 4 of 5 has 30 rows", "block 2 of 2 has 30 columns", "tp_degree 4"],
        ),
        (Mlp, {"hidden": 10}, ["up", "block 1 of 1 has 10 rows", "down", "has 10 columns"]),
    ],
    ids=["heads", "kv_heads", "packed_halves", "one_packed_block", "plain"],
)
def test_E4_E5_E6_indivisible_sizes_are_refused_before_weights_are_read(
    four_ranks: Pool, tmp_path: Path, cls: type[Any], kwargs: dict[str, Any], texts: list[str], loaded: bool
) -> None:
    if loaded:
        randomize(cls(**kwargs)).save_pretrained(tmp_path)
    messages = four_ranks.run(_divisibility, cls, kwargs, tmp_path if loaded else None)
    assert len(set(messages)) == 1
    for text in texts:
        assert text in messages[0] + "\n"


# --- E7: after a refusal ----------------------------------------------------------------------------------------


def _refuse_then_work() -> tuple[list[str], bool, float, str]:
    whole = randomize(Transformer(width=24, num_attention_heads=6))
    model = copy.deepcopy(whole)
    before = state(model)
    refusals = []
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    good = TensorParallelConfig(mesh=mesh)
    bad_plans: list[tuple[Any, dict[str, Any]]] = [
        (world(), {}),  # 6 heads on 4 ranks
        (good, {"blocks.*.to_q": "colwise", "blocks.*.to_x": "colwise"}),
        (good, {"blocks.*.to_q": PackedOdd()}),
    ]
    for config, plan in bad_plans:
        try:
            enable_parallelism(model, config=config, plan=plan or None)
        except PlanError as error:
            refusals.append(error.findings[0].kind)
    untouched = same(before, state(model))
    enable_parallelism(model, config=good)
    error = relative_error(
        outputs(model, {"x": torch.ones(1, 5, 24)}), outputs(whole, {"x": torch.ones(1, 5, 24)})
    )
    try:
        enable_parallelism(model, config=good)
        third = "no error"
    except UnsupportedState as refused:
        third = str(refused)
    return refusals, untouched, error, third


class PackedOdd:
    """Not a style."""


def test_E7_refused_calls_leave_the_model_as_it_was_and_a_right_one_works(four_ranks: Pool) -> None:
    for refusals, untouched, error, third in four_ranks.run(_refuse_then_work):
        assert refusals == ["IndivisibleHeads", "UnmatchedKey", "UnknownStyle"]
        assert untouched
        assert error < tolerances.FP32
        assert "sharded already" in third


def _different_plans() -> str:
    plan = {"up": "colwise", "down": "rowwise"} if dist.get_rank() == 0 else {"down": "rowwise_split_input"}
    model = randomize(Mlp())
    before = state(model)
    try:
        enable_parallelism(model, config=world(), plan=plan)
    except RankFailure as error:
        assert same(before, state(model))
        return str(error)
    return "no error"


def test_E7_plans_that_differ_between_the_ranks_are_refused_on_all(two_ranks: Pool) -> None:
    assert all("the ranks differ" in message for message in two_ranks.run(_different_plans))


# --- the group ---------------------------------------------------------------------------------------------------


def test_without_a_process_group_the_error_says_how_to_launch() -> None:
    with pytest.raises(GroupError, match="torchrun"):
        enable_parallelism(Mlp(), config=TensorParallelConfig(tp_degree=2))


def test_a_bad_plan_is_reported_even_without_a_process_group() -> None:
    with pytest.raises(PlanError, match="3"):
        enable_parallelism(Transformer(), config=TensorParallelConfig(tp_degree=3))


def test_environment_variables_alone_change_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    randomize(Mlp()).save_pretrained(tmp_path)
    for name, value in {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    model = Mlp.from_pretrained(tmp_path)
    assert sharding_of(model) is None
    assert type(model.up) is nn.Linear


@pytest.mark.parametrize("entry", ["from_pretrained", "enable_parallelism", "method"])
def test_degree_one_returns_the_ordinary_model_without_a_process_group(tmp_path: Path, entry: str) -> None:
    whole = randomize(Mlp())
    whole.save_pretrained(tmp_path)
    config = TensorParallelConfig(tp_degree=1)
    if entry == "from_pretrained":
        model = Mlp.from_pretrained(tmp_path, parallel_config=config)
    else:
        model = copy.deepcopy(whole)
        if entry == "method":
            model.enable_parallelism(config=config)
        else:
            assert enable_parallelism(model, config=config) is model
    assert sharding_of(model) is None
    assert all(type(m) is nn.Linear for m in (model.up, model.down))
    assert relative_error(outputs(model, small_input(Mlp)), outputs(whole, small_input(Mlp))) == 0


def test_a_config_of_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="TensorParallelConfig"):
        enable_parallelism(Mlp(), config={"tp_degree": 2})


def _wrong_world() -> str:
    try:
        enable_parallelism(randomize(Mlp()), config=TensorParallelConfig(tp_degree=2))
    except GroupError as error:
        return str(error)
    return "no error"


def test_degree_smaller_than_the_world_asks_for_a_mesh(four_ranks: Pool) -> None:
    for message in four_ranks.run(_wrong_world):
        assert "4 ranks" in message
        assert "mesh=" in message
