"""torch.compile without graph breaks, and copies and pickles of sharded models."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import inject_adapter_in_model
from torch import nn
from torch._dynamo.testing import CompileCounter
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from shardwise import TensorParallelConfig, enable_parallelism
from shardwise.errors import GroupError
from shardwise.runtime.shard import sharding_of
from tests import lora, tolerances
from tests.helpers import outputs, randomize, relative_error, tiny_inputs, tiny_model
from tests.pool import Pool
from tests.small_models import SMALL, Convolutions, Mlp, small_input


def sharded_copy(model: Any) -> Any:
    return enable_parallelism(copy.deepcopy(model), config=TensorParallelConfig(dist.get_world_size()))


def _as_it_is(whole: nn.Module) -> nn.Module:
    return sharded_copy(whole)


def _with_lora(whole: nn.Module) -> nn.Module:
    inject_adapter_in_model(lora.config(whole), whole)
    lora.randomize_factors(whole)
    return sharded_copy(whole)


def _with_int8(whole: nn.Module) -> nn.Module:
    sharded = sharded_copy(whole)
    quantize_(sharded, Int8WeightOnlyConfig(set_inductor_config=False))
    return sharded


def _compiled_small(cls: type[Any], make: Callable[[nn.Module], nn.Module]) -> tuple[float, float]:
    """Return how far a compiled model is from itself, and what was made of it from one process without."""
    torch._dynamo.reset()
    whole, inputs = randomize(cls()), small_input(cls)
    base, sharded = outputs(whole, inputs), make(whole)
    expected = outputs(sharded, inputs)
    found = outputs(torch.compile(sharded, fullgraph=True, backend="aot_eager"), inputs)
    return relative_error(found, expected), relative_error(expected, base)


LINEARS = [cls for cls in SMALL if cls is not Convolutions]
"""Those that have Linears, which is what int8 and adapters on a sharded model are for."""


@pytest.mark.parametrize(
    ("cls", "make"),
    [(cls, _as_it_is) for cls in SMALL]
    + [(cls, make) for cls in LINEARS for make in (_with_lora, _with_int8)],
)
def test_each_style_compiles_to_one_graph(
    two_ranks: Pool, cls: type[Any], make: Callable[[nn.Module], nn.Module]
) -> None:
    for error, made in two_ranks.run(_compiled_small, cls, make):
        assert error < tolerances.FP32
        assert made < tolerances.FP32 if make is _as_it_is else made > tolerances.MISTAKE


def _compiled_family(name: str, way: str) -> tuple[float, int]:
    """Return the error of a compiled model with an adapter and int8 weights below it, to itself, and its graphs."""
    torch._dynamo.reset()
    sharded = _with_int8(tiny_model(name, num_layers=1, num_single_layers=1))
    with warnings.catch_warnings(action="ignore"):  # such an adapter cannot be fused
        sharded.load_lora_adapter(lora.adapter(tiny_model(name, num_layers=1, num_single_layers=1)))
    expected = outputs(sharded, tiny_inputs(name))
    counted = CompileCounter()
    getattr(sharded, way)(fullgraph=True, backend=counted)
    return relative_error(outputs(sharded, tiny_inputs(name)), expected), counted.frame_count


@pytest.mark.parametrize(("way", "graphs"), [("compile", 1), ("compile_repeated_blocks", 2)])
def test_flux2_with_lora_on_int8_compiles_to_whole_graphs(two_ranks: Pool, way: str, graphs: int) -> None:
    for error, count in two_ranks.run(_compiled_family, "Flux2Transformer2DModel", way):
        assert error < tolerances.FP32
        assert count == graphs


def _broken() -> str:
    torch._dynamo.reset()
    sharded = sharded_copy(randomize(Mlp()))
    sharded.up.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    try:
        outputs(torch.compile(sharded, fullgraph=True, backend="eager"), small_input(Mlp))
    except torch._dynamo.exc.Unsupported as error:
        return str(error)
    return ""


def test_graph_break_would_be_seen(two_ranks: Pool) -> None:
    assert all("graph_break" in message for message in two_ranks.run(_broken))


def _copied() -> tuple[float, bool, str]:
    whole = randomize(Mlp())
    sharded = sharded_copy(whole)
    twin = copy.deepcopy(sharded)
    error = relative_error(outputs(twin, small_input(Mlp)), outputs(whole, small_input(Mlp)))
    own_weights = twin.up.weight.data_ptr() != sharded.up.weight.data_ptr()
    loaded = pickle.loads(pickle.dumps(sharded))
    assert torch.equal(loaded.up.weight, sharded.up.weight)
    try:
        outputs(loaded, small_input(Mlp))
    except GroupError as refused:
        return error, own_weights, str(refused)
    return error, own_weights, "no error"


def test_deepcopy_keeps_the_group_and_a_pickle_says_that_it_has_none(two_ranks: Pool) -> None:
    for rank, (error, own_weights, message) in enumerate(two_ranks.run(_copied)):
        assert error < tolerances.FP32
        assert own_weights
        assert f"rank {rank} of 2" in message


def _state_dict_keys() -> tuple[bool, str]:
    whole = randomize(Mlp())
    sharded = sharded_copy(whole)
    assert all(isinstance(m, nn.Linear) for m in (sharded.up, sharded.down))
    assert sharding_of(whole) is None
    return list(sharded.state_dict()) == list(whole.state_dict()), repr(sharded)


def test_state_dict_keys_stay_and_printing_shows_what_is_sharded(two_ranks: Pool) -> None:
    for rank, (same_keys, text) in enumerate(two_ranks.run(_state_dict_keys)):
        assert same_keys
        assert (
            f"ColwiseLinear(in_features=8, out_features=8, bias=True, shard(dim 0), rank {rank} of 2)" in text
        )
        assert "RowwiseLinear(in_features=8, out_features=8, bias=True, shard(dim 1)" in text
