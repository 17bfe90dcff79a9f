"""LoRA on a sharded model against one process: numbers, all-reduces, and what may be done with adapters afterwards."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft.tuners import lora
from torch import Tensor

from shardwise import TensorParallelConfig, enable_parallelism, placement
from shardwise.compose import lora_layers
from shardwise.plan.layout import Layout, Shard
from shardwise.runtime.modules import LocalLayer
from shardwise.runtime.shard import sharding_of
from tests import tolerances
from tests.helpers import cast, distance, outputs, relative_error, tiny_inputs, tiny_model
from tests.lora import FAMILIES, RANK, adapter, linears
from tests.pool import Pool

pytestmark = pytest.mark.any_device

FLUX, FLUX2, WAN = "FluxTransformer2DModel", "Flux2Transformer2DModel", "WanTransformer3DModel"
QWEN = "QwenImageTransformer2DModel"


def sharded_copy(model: Any, **options: Any) -> Any:
    config = TensorParallelConfig(tp_degree=dist.get_world_size(), **{"check": False, **options})
    return enable_parallelism(copy.deepcopy(model), config=config)


def pair(name: str, stock: bool = False) -> tuple[Any, Any]:
    """Return a tiny model, whole and sharded."""
    whole = tiny_model(name, stock=stock)
    return whole, sharded_copy(whole)


def error_of(sharded: Any, whole: Any, name: str) -> float:
    inputs = tiny_inputs(name)
    return relative_error(outputs(sharded, inputs), outputs(whole, inputs))


def sums(sharded: Any, name: str) -> int:
    """Return the all-reduces of one forward."""
    traffic = sharding_of(sharded).group.traffic
    before = traffic.all_reduces
    outputs(sharded, tiny_inputs(name))
    return traffic.all_reduces - before


# --- loaded after sharding, and before -------------------------------------------------------------------------------


def _after(name: str, stock: bool) -> dict[str, Any]:
    whole, sharded = pair(name, stock)
    inputs, state, without = tiny_inputs(name), adapter(whole), sums(sharded, name)
    base, its_base = outputs(whole, inputs), outputs(sharded, inputs)
    for model in (whole, sharded):
        model.load_lora_adapter(state, adapter_name="one")
    result = {
        "error": error_of(sharded, whole, name),
        "share": relative_error(outputs(whole, inputs), base),
        "more sums": sums(sharded, name) - without,
        "layers": sum(isinstance(m, lora.Linear) for m in sharded.modules()) - len(state) // 2,
    }
    sharded.unload_lora()
    left = [m for m in sharded.modules() if isinstance(m, lora.LoraLayer)]
    again = zip(outputs(sharded, inputs), its_base, strict=True)
    return {**result, "unloaded": not left and all(torch.equal(a, b) for a, b in again)}


@pytest.mark.parametrize("name", FAMILIES)
def test_adapter_on_every_linear_equals_one_process_and_costs_no_all_reduce(ranks: Pool, name: str) -> None:
    for result in ranks.run(_after, name, False):
        assert result["error"] < tolerances.FP32
        assert result["share"] > tolerances.MISTAKE
        assert result["more sums"] == 0
        assert result["layers"] == 0
        assert result["unloaded"]  # the base, to the last bit


def test_adapter_is_loaded_into_a_class_of_diffusers_that_was_sharded_in_memory(two_ranks: Pool) -> None:
    for result in two_ranks.run(_after, FLUX2, True):
        assert result["error"] < tolerances.FP32
        assert result["unloaded"]


def _before(name: str, stock: bool) -> dict[str, Any]:
    whole = tiny_model(name, stock=stock)
    sums_without = sums(sharded_copy(whole), name)
    first, second = adapter(whole), adapter(whole, seed=8, rank=5)
    whole.load_lora_adapter(first, adapter_name="one")
    whole.load_lora_adapter(second, adapter_name="two")
    whole.set_adapters(["one", "two"], [0.7, -0.4])
    sharded = sharded_copy(whole, check=True)
    result = {
        "error": error_of(sharded, whole, name),
        "checked": sharded.check_report.ok,
        "more sums": sums(sharded, name) - sums_without,
    }
    for model in (whole, sharded):
        model.delete_adapters("one")
    result["one left"] = error_of(sharded, whole, name)
    for model in (whole, sharded):
        model.unload_lora()
    return {**result, "none left": error_of(sharded, whole, name)}


@pytest.mark.parametrize(("name", "stock"), [*((name, False) for name in FAMILIES), (FLUX, True)])
def test_model_with_adapters_is_sharded_with_them(ranks: Pool, name: str, stock: bool) -> None:
    for result in ranks.run(_before, name, stock):
        assert result["checked"]
        assert result["more sums"] == 0
        for state in ("error", "one left", "none left"):
            assert result[state] < tolerances.FP32, state


def _half(name: str) -> tuple[float, float]:
    """Return the distances in bf16, of the sharded model and of one process, to one process in fp32: of six inputs."""
    exact = tiny_model(name)
    whole = copy.deepcopy(exact).bfloat16()
    sharded, errors = sharded_copy(whole), []
    for model in (exact, whole, sharded):
        model.load_lora_adapter(adapter(tiny_model(name)))
    for seed in range(6):
        inputs = tiny_inputs(name, seed)
        halves, results = cast(inputs, torch.bfloat16), outputs(exact, inputs)
        errors.append([distance(outputs(model, halves), results) for model in (sharded, whole)])
    mine, its = (sum(column) for column in zip(*errors, strict=True))
    return mine, its


@pytest.mark.parametrize("name", [FLUX2, WAN])
def test_adapter_in_half_precision_is_as_exact_as_one_process(ranks: Pool, name: str) -> None:
    for sharded, whole in ranks.run(_half, name):
        assert 0 < sharded < tolerances.BF16_RATIO * whole


def _rank_zero_wins() -> float:
    """Give each rank an adapter of its own before sharding."""
    whole = tiny_model(FLUX2)
    mine = copy.deepcopy(whole)
    state = adapter(whole)
    mine.load_lora_adapter(adapter(whole, seed=7 + dist.get_rank()))
    whole.load_lora_adapter(state)
    return error_of(
        enable_parallelism(mine, config=TensorParallelConfig(dist.get_world_size())), whole, FLUX2
    )


def test_adapters_of_rank_zero_win_as_its_weights_do(two_ranks: Pool) -> None:
    assert max(two_ranks.run(_rank_zero_wins)) < tolerances.FP32


# --- what may be done with adapters ----------------------------------------------------------------------------------


def _two(model: Any, states: list[dict[str, Tensor]]) -> None:
    model.load_lora_adapter(states[0], adapter_name="one")
    model.load_lora_adapter(states[1], adapter_name="two")


def _weights(model: Any, states: list[dict[str, Tensor]]) -> None:
    _two(model, states)
    model.set_adapters(["one", "two"], [0.5, -1.5])


def _switched(model: Any, states: list[dict[str, Tensor]]) -> None:
    _two(model, states)
    model.set_adapters("one", 2.0)


def _disabled(model: Any, states: list[dict[str, Tensor]]) -> None:
    _two(model, states)
    model.disable_lora()


def _enabled(model: Any, states: list[dict[str, Tensor]]) -> None:
    _disabled(model, states)
    model.enable_lora()


def _deleted(model: Any, states: list[dict[str, Tensor]]) -> None:
    _two(model, states)
    model.delete_adapters(["two"])


def _all_deleted(model: Any, states: list[dict[str, Tensor]]) -> None:
    _two(model, states)
    model.delete_adapters(["one", "two"])


def _fused(model: Any, states: list[dict[str, Tensor]]) -> None:
    _two(model, states)
    model.fuse_lora(lora_scale=0.7, adapter_names=["one", "two"])


def _fused_and_unloaded(model: Any, states: list[dict[str, Tensor]]) -> None:
    _two(model, states)
    model.fuse_lora(safe_fusing=True)
    model.unload_lora()


def _unfused(model: Any, states: list[dict[str, Tensor]]) -> None:
    _fused(model, states)
    model.unfuse_lora()


def _swapped(model: Any, states: list[dict[str, Tensor]]) -> None:
    model.load_lora_adapter(states[0], adapter_name="one")
    model.load_lora_adapter(states[2], adapter_name="one", hotswap=True)


def _swapped_for_another_rank(model: Any, states: list[dict[str, Tensor]]) -> None:
    model.enable_lora_hotswap(target_rank=9)
    model.load_lora_adapter(states[0], adapter_name="one")
    model.load_lora_adapter(states[1], adapter_name="one", hotswap=True)


def _drawn_first(model: Any, states: list[dict[str, Tensor]]) -> None:
    model.load_lora_adapter(states[0], adapter_name="one", low_cpu_mem_usage=False)


def _alphas(model: Any, states: list[dict[str, Tensor]]) -> None:
    names = sorted({key.partition(".lora_")[0] for key in states[0]})
    alphas = {f"{name}.alpha": 0.5 + i % 3 for i, name in enumerate(names)}
    model.load_lora_adapter(states[0], network_alphas=alphas)


def _with_biases(model: Any, states: list[dict[str, Tensor]]) -> None:
    state = dict(states[0])
    for key in states[0]:
        if key.endswith("lora_B.weight"):
            state[key.replace(".weight", ".bias")] = state[key].sum(1)
    model.load_lora_adapter(state)


OPERATIONS: dict[str, Callable[[Any, list[dict[str, Tensor]]], None]] = {
    f.__name__.strip("_"): f
    for f in (
        _two,
        _weights,
        _switched,
        _disabled,
        _enabled,
        _deleted,
        _all_deleted,
        _fused,
        _fused_and_unloaded,
        _unfused,
        _swapped,
        _swapped_for_another_rank,
        _drawn_first,
        _alphas,
        _with_biases,
    )
}


def _operate(name: str, operation: str) -> float:
    whole, sharded = pair(name)
    states = [adapter(whole), adapter(whole, seed=8, rank=5), adapter(whole, seed=9)]
    with warnings.catch_warnings():
        for said in ("Adapter two was active", "`lora_bias=True` was passed"):
            warnings.filterwarnings("ignore", message=said)
        for model in (whole, sharded):
            OPERATIONS[operation](model, states)
    return error_of(sharded, whole, name)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", [FLUX, FLUX2])
def test_adapters_may_be_handled_as_on_one_process(two_ranks: Pool, name: str, operation: str) -> None:
    assert max(two_ranks.run(_operate, name, operation)) < tolerances.FP32


def _scaled() -> tuple[float, float]:
    whole, sharded = pair(FLUX)
    for model in (whole, sharded):
        model.load_lora_adapter(adapter(tiny_model(FLUX)))
    inputs = tiny_inputs(FLUX)
    scaled = {**inputs, "joint_attention_kwargs": {"scale": 0.3}}
    whole_scaled = outputs(whole, scaled)
    share = relative_error(whole_scaled, outputs(whole, inputs))
    return relative_error(outputs(sharded, scaled), whole_scaled), share


def test_scale_of_one_call_is_honoured(two_ranks: Pool) -> None:
    for error, share in two_ranks.run(_scaled):
        assert error < tolerances.FP32
        assert share > tolerances.MISTAKE


def _compiled(name: str) -> float:
    torch._dynamo.reset()
    whole, sharded = pair(name)
    for model in (whole, sharded):
        model.load_lora_adapter(adapter(tiny_model(name)))
    compiled = torch.compile(sharded, fullgraph=True, backend="eager")
    return error_of(compiled, whole, name)


@pytest.mark.parametrize("name", [FLUX, FLUX2])
def test_model_with_an_adapter_compiles_to_one_graph(two_ranks: Pool, name: str) -> None:
    assert max(two_ranks.run(_compiled, name)) < tolerances.FP32


# --- what a rank holds -----------------------------------------------------------------------------------------------


def _held(name: str) -> list[tuple[Any, ...]]:
    whole, sharded = pair(name)
    sharded.load_lora_adapter(adapter(whole), adapter_name="one")
    rows = {row.name: row for row in placement(sharded).tensors}
    found = []
    for path, module in sharded.named_modules():
        if isinstance(module, lora_layers.LocalLoraLinear):
            first, second = (rows[f"{path}.{factor}.one.weight"] for factor in ("lora_A", "lora_B"))
            base = rows[f"{path}.base_layer.weight"]
            found.append((base, first, second, tuple(linears(whole)[path].weight.shape)))
    return found


@pytest.mark.any_device(False)
@pytest.mark.parametrize("name", [FLUX, FLUX2])
def test_each_rank_holds_the_slice_of_a_or_b_that_its_base_layer_has(four_ranks: Pool, name: str) -> None:
    for found in four_ranks.run(_held, name):
        assert len({base.layout.dim for base, *_ in found}) == 2
        for base, first, second, (rows, columns) in found:
            assert base.global_shape == (rows, columns)
            assert (first.global_shape, second.global_shape) == ((RANK, columns), (rows, RANK))
            assert first.local_shape == (RANK, base.local_shape[1])
            assert second.local_shape == (base.local_shape[0], RANK)
            cut = second if base.layout.dim == 0 else first
            assert cut.layout == base.layout


# --- broken on purpose -----------------------------------------------------------------------------------------------


def _plain_halves(base: LocalLayer, factor: str, name: str) -> Layout:
    layout = _RIGHT(base, factor, name)
    return layout.of(layout.size) if isinstance(layout, Shard) else layout


_RIGHT = lora_layers.factor_layout


def _cut_plainly() -> float:
    with mock.patch.object(lora_layers, "factor_layout", _plain_halves):
        return _after(FLUX2, False)["error"]


def _added_after_the_sum() -> float:
    with mock.patch.object(lora_layers.LocalLoraLinear, "forward", lora.Linear.forward):
        whole, sharded = pair(FLUX2)
        state = {k: v for k, v in adapter(whole).items() if "ff.linear_out" in k}
        for model in (whole, sharded):
            model.load_lora_adapter(state)
        return error_of(sharded, whole, FLUX2)


@pytest.mark.parametrize("broken", [_cut_plainly, _added_after_the_sum])
def test_the_comparison_sees_wrong_slices_and_terms_that_are_not_summed(two_ranks: Pool, broken: Any) -> None:
    assert min(two_ranks.run(broken)) > tolerances.MISTAKE
