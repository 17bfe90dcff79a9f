"""torch.compile without graph breaks, and copies and pickles of sharded models."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import TensorParallelConfig, enable_parallelism
from shardwise.errors import GroupError
from shardwise.runtime.shard import sharding_of
from tests import tolerances
from tests.helpers import outputs, randomize, relative_error, tiny_inputs, tiny_model
from tests.pool import Pool
from tests.small_models import SMALL, Mlp, small_input


def sharded_copy(model: Any) -> Any:
    return enable_parallelism(copy.deepcopy(model), config=TensorParallelConfig(dist.get_world_size()))


def _compiled(whole: nn.Module, inputs: dict[str, Any], backend: str) -> float:
    torch._dynamo.reset()
    sharded = torch.compile(sharded_copy(whole), fullgraph=True, backend=backend)
    return relative_error(outputs(sharded, inputs), outputs(whole, inputs))


def _compiled_small(cls: type[Any]) -> float:
    return _compiled(randomize(cls()), small_input(cls), "aot_eager")


@pytest.mark.parametrize("cls", SMALL, ids=lambda cls: cls.__name__)
def test_each_style_compiles_to_one_graph(two_ranks: Pool, cls: type[Any]) -> None:
    assert max(two_ranks.run(_compiled_small, cls)) < tolerances.FP32


def _compiled_family(name: str) -> float:
    return _compiled(tiny_model(name, num_layers=1, num_single_layers=1), tiny_inputs(name), "eager")


def test_flux2_compiles_to_one_graph(two_ranks: Pool) -> None:
    assert max(two_ranks.run(_compiled_family, "Flux2Transformer2DModel")) < tolerances.FP32


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
