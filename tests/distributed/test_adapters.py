"""IP adapters that were loaded before sharding: numbers, memory, scales, gradients, and what is refused afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers.loaders.ip_adapter import FluxIPAdapterMixin
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

from shardwise import TensorParallelConfig, enable_parallelism
from shardwise.errors import UnsupportedOperation, UnsupportedState
from shardwise.models.lookup import example_inputs
from shardwise.runtime import modules
from shardwise.runtime.shard import local_slice, sharding_of
from tests import tolerances
from tests.adapters import flux_adapter, load_flux_adapters, load_sd3_adapter, scale_adapters, sd3_adapter
from tests.gradients import Errors, assert_equal_gradients, compare_gradients
from tests.helpers import outputs, relative_error, tiny_inputs, tiny_model
from tests.pool import Pool

FLUX, SD3 = "FluxTransformer2DModel", "SD3Transformer2DModel"
LOADERS: dict[str, Callable[[Any], None]] = {FLUX: load_flux_adapters, SD3: load_sd3_adapter}


def adapted(name: str, stock: bool = True) -> Any:
    """Return a tiny model with adapters: two of them in a FLUX.1, one in an SD3."""
    model = tiny_model(name, stock=stock)
    LOADERS[name](model)
    return model


def sharded_copy(model: Any, **options: Any) -> Any:
    config = TensorParallelConfig(tp_degree=dist.get_world_size(), **options)
    return enable_parallelism(copy.deepcopy(model), config=config)


def _equal(name: str, stock: bool) -> tuple[float, float, bool]:
    whole = adapted(name, stock)
    sharded = sharded_copy(whole)
    inputs = example_inputs(whole)
    results = outputs(whole, inputs)
    scale_adapters(whole, 0.0)
    share = relative_error(outputs(whole, inputs), results)
    return relative_error(outputs(sharded, inputs), results), share, sharded.check_report.ok


@pytest.mark.parametrize("stock", [True, False], ids=["diffusers_class", "shardwise_class"])
@pytest.mark.parametrize("name", LOADERS)
def test_model_with_ip_adapters_equals_one_process_and_is_checked(
    ranks: Pool, name: str, stock: bool
) -> None:
    for error, share, checked in ranks.run(_equal, name, stock):
        assert error < tolerances.FP32
        assert share > tolerances.MISTAKE  # what the adapters add to the output is not lost in the tolerance
        assert checked


def _rescaled(name: str, factor: float) -> float:
    whole = adapted(name)
    sharded = sharded_copy(whole, check=False)
    inputs = example_inputs(whole)
    for model in (whole, sharded):
        scale_adapters(model, factor)
    return relative_error(outputs(sharded, inputs), outputs(whole, inputs))


@pytest.mark.parametrize("factor", [0.0, -1.5])
@pytest.mark.parametrize("name", LOADERS)
def test_scales_of_adapters_may_change_after_sharding(two_ranks: Pool, name: str, factor: float) -> None:
    assert max(two_ranks.run(_rescaled, name, factor)) < tolerances.FP32


def _held(name: str) -> list[tuple[int, ...]]:
    sharded = sharded_copy(adapted(name), check=False)
    return [
        tuple(p.shape)
        for n, p in sharded.named_parameters()
        if ".processor.to_k_ip" in n or ".processor.to_v_ip" in n
    ]


@pytest.mark.parametrize(("name", "count", "width"), [(FLUX, 2 * 2 * 2, 20), (SD3, 4 * 2, 48)])
def test_each_rank_holds_the_adapters_keys_and_values_of_its_heads(
    four_ranks: Pool, name: str, count: int, width: int
) -> None:
    for shapes in four_ranks.run(_held, name):
        assert shapes.count((12, width)) == count
        assert set(shapes) <= {(12, width), (12,)}


def _all_reduces(name: str, with_adapter: bool) -> int:
    model = adapted(name) if with_adapter else tiny_model(name, stock=True)
    sharded = sharded_copy(model, check=False)
    outputs(sharded, example_inputs(model))
    return sharding_of(sharded).group.traffic.all_reduces


@pytest.mark.parametrize(("name", "more"), [(FLUX, 2 * 2), (SD3, 0)])
def test_adapters_of_flux_cost_two_sums_for_each_double_block(two_ranks: Pool, name: str, more: int) -> None:
    (without,) = set(two_ranks.run(_all_reduces, name, False))
    assert set(two_ranks.run(_all_reduces, name, True)) == {without + more}


def _gradients(name: str) -> Errors:
    whole = adapted(name)
    return compare_gradients(whole, example_inputs(whole))


@pytest.mark.parametrize("name", LOADERS)
def test_gradients_with_adapters_equal_one_process(ranks: Pool, name: str) -> None:
    assert_equal_gradients(ranks.run(_gradients, name))


def _compiled(name: str) -> float:
    torch._dynamo.reset()
    whole = adapted(name)
    sharded = torch.compile(sharded_copy(whole, check=False), fullgraph=True, backend="eager")
    return relative_error(outputs(sharded, example_inputs(whole)), outputs(whole, example_inputs(whole)))


@pytest.mark.parametrize("name", LOADERS)
def test_model_with_adapters_compiles_to_one_graph(two_ranks: Pool, name: str) -> None:
    assert max(two_ranks.run(_compiled, name)) < tolerances.FP32


FEED_FORWARD = {
    "transformer_blocks.*.ff.net.0.proj": "colwise",
    "transformer_blocks.*.ff.net.2": "rowwise",
}


def _whole_attention(name: str) -> tuple[float, set[str]]:
    whole = adapted(name)
    config = TensorParallelConfig(tp_degree=dist.get_world_size())
    sharded = enable_parallelism(copy.deepcopy(whole), config=config, plan=FEED_FORWARD)
    planned = {m.path for m in sharding_of(sharded).plan.modules if "attn" in m.path}
    inputs = example_inputs(whole)
    return relative_error(outputs(sharded, inputs), outputs(whole, inputs)), planned


@pytest.mark.parametrize("name", LOADERS)
def test_adapter_of_a_whole_attention_stays_whole(two_ranks: Pool, name: str) -> None:
    for error, planned in two_ranks.run(_whole_attention, name):
        assert error < tolerances.FP32
        assert planned == set()


# --- broken on purpose ---------------------------------------------------------------------------------------------


def _values_of_other_heads(name: str) -> float:
    """Give each rank the adapters' values of the next rank's heads."""
    whole = adapted(name)
    sharded = sharded_copy(whole, check=False)
    sharding = sharding_of(sharded)
    rank, degree = sharding.group.rank, sharding.group.degree
    for n, parameter in sharded.named_parameters():
        if ".to_v_ip." in n:
            others = local_slice(whole.get_parameter(n), sharding.plan.layout(n), (rank + 1) % degree, degree)
            parameter.data.copy_(others)
    inputs = example_inputs(whole)
    return relative_error(outputs(sharded, inputs), outputs(whole, inputs))


@pytest.mark.parametrize("name", LOADERS)
def test_the_comparison_sees_values_of_other_heads(two_ranks: Pool, name: str) -> None:
    assert min(two_ranks.run(_values_of_other_heads, name)) > tolerances.MISTAKE


def _norms_unsummed() -> float:
    with mock.patch.object(modules, "sum_gradients"):
        return _gradients(SD3).worst


def test_the_comparison_sees_gradients_of_norms_that_are_partial_sums(two_ranks: Pool) -> None:
    assert min(two_ranks.run(_norms_unsummed)) > tolerances.MISTAKE


# --- after sharding ------------------------------------------------------------------------------------------------


class Pipeline(FluxIPAdapterMixin):
    """What diffusers' loader of adapters needs of a pipeline."""

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer


def _load_after(name: str, again: bool) -> tuple[str, bool, float]:
    whole = adapted(name) if again else tiny_model(name, stock=True)
    sharded = sharded_copy(whole, check=False)
    before = {n: id(p) for n, p in sharded.named_parameters()}
    try:
        if name == FLUX:
            Pipeline(sharded).load_ip_adapter(flux_adapter(sharded, 14, 0), weight_name="adapter.safetensors")
        else:
            sharded._load_ip_adapter_weights(sd3_adapter(whole))
        message = "no error"
    except UnsupportedOperation as error:
        message = str(error)
    untouched = {n: id(p) for n, p in sharded.named_parameters()} == before
    inputs = example_inputs(whole)
    return message, untouched, relative_error(outputs(sharded, inputs), outputs(whole, inputs))


@pytest.mark.parametrize("again", [False, True], ids=["first", "another"])
@pytest.mark.parametrize("name", LOADERS)
def test_E2_adapter_loaded_after_sharding_is_refused_on_every_rank(
    two_ranks: Pool, name: str, again: bool
) -> None:
    for message, untouched, error in two_ranks.run(_load_after, name, again):
        assert name in message
        assert "before sharding" in message
        assert "enable_parallelism" in message
        assert untouched
        assert error < tolerances.FP32


def _unloaded() -> tuple[float, int]:
    whole = adapted(FLUX)
    sharded = sharded_copy(whole, check=False)
    for model in (whole, sharded):
        Pipeline(model).unload_ip_adapter()
    inputs = tiny_inputs(FLUX)
    left = sum(".processor." in n for n, _ in sharded.named_parameters())
    return relative_error(outputs(sharded, inputs), outputs(whole, inputs)), left


def test_adapters_may_be_unloaded_after_sharding(two_ranks: Pool) -> None:
    for error, left in two_ranks.run(_unloaded):
        assert error < tolerances.FP32
        assert left == 0


class Rewritten(FluxIPAdapterAttnProcessor):
    """A processor of someone's own, whose code may do anything."""


def test_E2_adapter_of_an_unknown_kind_is_refused_by_name() -> None:
    model = tiny_model(FLUX)
    processor = Rewritten(hidden_size=48, cross_attention_dim=20)
    model.transformer_blocks[0].attn.set_processor(processor)
    with pytest.raises(
        UnsupportedState, match=r"transformer_blocks\.0\.attn has a Rewritten for its processor"
    ):
        model.enable_parallelism(config=TensorParallelConfig(tp_degree=2))
