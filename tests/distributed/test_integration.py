"""A sharded model among other libraries: pipelines, transformers models, compiled and nested models."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline
from diffusers import Flux2Transformer2DModel as StockFlux2
from torch import nn

from shardwise import TensorParallelConfig, demo_model_path, enable_parallelism, placement
from shardwise.errors import ConfigError, PlanError, UnsupportedOperation, UnsupportedState
from shardwise.models import Flux2Transformer2DModel
from tests import tolerances
from tests.helpers import outputs, randomize, relative_error, tiny_inputs, tiny_model
from tests.pool import Pool
from tests.small_models import Mlp, Transformer, small_input


def world() -> TensorParallelConfig:
    return TensorParallelConfig(tp_degree=dist.get_world_size())


def test_pipeline_with_an_unsharded_shardwise_class_saves_as_the_stock_pipeline(tmp_path: Path) -> None:
    transformer = Flux2Transformer2DModel.from_pretrained(demo_model_path(), subfolder="transformer")
    pipeline = DiffusionPipeline.from_pretrained(demo_model_path(), transformer=transformer)
    pipeline.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["transformer"] == ["diffusers", "Flux2Transformer2DModel"]
    assert type(DiffusionPipeline.from_pretrained(tmp_path).transformer) is StockFlux2


def _whole_components() -> tuple[dict[str, int], dict[str, float]]:
    transformer = Flux2Transformer2DModel.from_pretrained(
        demo_model_path(), subfolder="transformer", parallel_config=world()
    )
    pipeline = DiffusionPipeline.from_pretrained(demo_model_path(), transformer=transformer)
    assert pipeline.transformer is transformer
    reports = {name: placement(getattr(pipeline, name)) for name in ("transformer", "text_encoder", "vae")}
    return {n: r.tp_degree for n, r in reports.items()}, {n: r.replicated_share for n, r in reports.items()}


def test_L6_only_the_transformer_is_sharded_and_the_stock_pipeline_takes_it(two_ranks: Pool) -> None:
    for degrees, replicated in two_ranks.run(_whole_components):
        assert degrees == {"transformer": 2, "text_encoder": 1, "vae": 1}
        assert replicated["transformer"] < 0.5
        assert replicated["text_encoder"] == replicated["vae"] == 1.0


def _clip() -> tuple[float, str]:
    from transformers import CLIPTextConfig, CLIPTextModel

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    whole = randomize(CLIPTextModel(CLIPTextConfig(vocab_size=50, **sizes)))
    layers = next(n for n, m in whole.named_modules() if isinstance(m, nn.ModuleList))
    plan: dict[str, Any] = {f"{layers}.*.self_attn.{n}_proj": "colwise" for n in "qkv"}
    plan |= {f"{layers}.*.self_attn.out_proj": "rowwise"}
    plan |= {f"{layers}.*.mlp.fc1": "colwise", f"{layers}.*.mlp.fc2": "rowwise"}
    sharded = enable_parallelism(copy.deepcopy(whole), config=world(), plan=plan)
    ids = torch.arange(1, 10)[None]
    with torch.no_grad():
        error = relative_error(sharded(ids).last_hidden_state, whole(ids).last_hidden_state)
    with pytest.raises(UnsupportedOperation) as refused:
        sharded.save_pretrained("/no/such/folder")
    return error, str(refused.value)


def test_E3_transformers_model_is_sharded_by_a_plan_and_refuses_to_save_slices(two_ranks: Pool) -> None:
    for error, message in two_ranks.run(_clip):
        assert error < tolerances.FP32
        assert "before sharding" in message


def _compiled_and_nested() -> tuple[int, list[int], str]:
    outer = nn.Module()
    outer.inner = enable_parallelism(randomize(Mlp()), config=world())
    row = next(t for t in placement(outer).tensors if t.name == "inner.up.weight")
    with pytest.raises(UnsupportedState) as refused:
        enable_parallelism(outer, config=world(), plan={"inner.up": "colwise"})
    compiled = torch.compile(outer.inner, backend="eager")
    return placement(compiled).tp_degree, [row.local_shape[0], row.global_shape[0]], str(refused.value)


def test_placement_sees_through_wrappers(two_ranks: Pool) -> None:
    for degree, rows, message in two_ranks.run(_compiled_and_nested):
        assert degree == 2
        assert rows == [8, 16]
        assert "inner is sharded already" in message


def _in_place() -> tuple[bool, bool, bool]:
    model = randomize(Mlp())
    before = dict(model.named_parameters())
    model.up.weight.marked = True
    enable_parallelism(model, config=world())
    after = dict(model.named_parameters())
    storages = all(p.untyped_storage().nbytes() == p.nbytes for p in after.values())
    return all(before[n] is after[n] for n in before), model.up.weight.marked, storages


def test_sharding_in_memory_keeps_the_parameter_objects_and_no_larger_storage(two_ranks: Pool) -> None:
    assert two_ranks.run(_in_place) == [(True, True, True)] * 2


def test_config_given_to_a_stock_class_points_at_the_right_one(tmp_path: Path) -> None:
    config = TensorParallelConfig(tp_degree=2)
    with pytest.raises(ConfigError, match=r"shardwise\.models"):
        StockFlux2.from_pretrained(demo_model_path(), subfolder="transformer", parallel_config=config)
    with pytest.raises(ConfigError, match=r"shardwise\.models"):
        tiny_model("Flux2Transformer2DModel", stock=True).enable_parallelism(config=config)


def _diffusers_config() -> float:
    """A config of diffusers' own class means the same, and so do the packed markers in its plans."""
    from diffusers import TensorParallelConfig as DiffusersConfig

    model = tiny_model("Flux2Transformer2DModel", stock=True)
    inputs = tiny_inputs("Flux2Transformer2DModel")
    want = outputs(model, inputs)
    enable_parallelism(
        model, config=DiffusersConfig(tp_degree=dist.get_world_size()), plan=StockFlux2._tp_plan
    )
    return relative_error(outputs(model, inputs), want)


def test_config_and_plan_of_diffusers_are_understood(two_ranks: Pool) -> None:
    assert max(two_ranks.run(_diffusers_config)) < tolerances.FP32


class NoPlan(Mlp):
    _tp_plan = None


class Inherits(Transformer):
    """A subclass that says nothing about its plan."""


def test_L3_class_without_a_plan_is_refused() -> None:
    with pytest.raises(PlanError, match="declares no _tp_plan"):
        enable_parallelism(NoPlan(), config=TensorParallelConfig(tp_degree=2))


def _inherits() -> float:
    whole = randomize(Inherits())
    sharded = enable_parallelism(copy.deepcopy(whole), config=world())
    return relative_error(
        outputs(sharded, small_input(Transformer)), outputs(whole, small_input(Transformer))
    )


def test_P1_subclass_inherits_the_plan(two_ranks: Pool) -> None:
    assert max(two_ranks.run(_inherits)) < tolerances.FP32


def _plan_argument() -> tuple[float, int]:
    """Shard the feed-forward only: the plan of the call replaces the declared one."""
    whole = randomize(Mlp())
    sharded = enable_parallelism(copy.deepcopy(whole), config=world(), plan={"down": "rowwise_split_input"})
    error = relative_error(outputs(sharded, small_input(Mlp)), outputs(whole, small_input(Mlp)))
    return error, sharded.up.out_features


def test_plan_of_the_call_replaces_the_declared_one(two_ranks: Pool) -> None:
    for error, up in two_ranks.run(_plan_argument):
        assert error < tolerances.FP32
        assert up == 16


def test_E2_model_whose_weights_the_plan_does_not_cover_is_refused() -> None:
    model = tiny_model("FluxTransformer2DModel")
    model.fuse_qkv_projections()
    with pytest.raises(UnsupportedState, match=r"transformer_blocks\.0\.attn"):
        model.enable_parallelism(config=TensorParallelConfig(tp_degree=2))
