"""Layerwise casting of a sharded model against one process: each rank stores its slices in 8 bits."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from shardwise import TensorParallelConfig, enable_parallelism
from tests import tolerances
from tests.helpers import outputs, relative_error, tiny_inputs, tiny_model
from tests.pool import Pool
from tests.quantized import FAMILIES


def cast_error(name: str, stored: torch.dtype = torch.float8_e4m3fn) -> tuple[float, float, bool]:
    """Return the error of a cast sharded model to a cast whole one, and of that to one that is not cast."""
    exact = tiny_model(name)
    whole, sharded = copy.deepcopy(exact), copy.deepcopy(exact)
    enable_parallelism(sharded, config=TensorParallelConfig(dist.get_world_size(), check=False))
    for model in (whole, sharded):
        model.enable_layerwise_casting(storage_dtype=stored, compute_dtype=torch.float32)
    inputs = tiny_inputs(name)
    error = relative_error(outputs(sharded, inputs), outputs(whole, inputs))
    share = relative_error(outputs(whole, inputs), outputs(exact, inputs))
    return error, share, any(p.dtype == stored for p in sharded.parameters())


@pytest.mark.parametrize("name", FAMILIES)
def test_layerwise_casting_equals_one_process(ranks: Pool, name: str) -> None:
    for error, share, stored in ranks.run(cast_error, name):
        assert error < tolerances.FP32
        assert share > tolerances.MISTAKE  # weights in 8 bits are other weights: the casts took place
        assert stored


def _rounded_once_more(name: str) -> float:
    """Store the slices of one rank in another 8-bit dtype: what casts that differ between ranks would do."""
    other = torch.float8_e5m2 if dist.get_rank() else torch.float8_e4m3fn
    whole = tiny_model(name)
    sharded = copy.deepcopy(whole)
    enable_parallelism(sharded, config=TensorParallelConfig(dist.get_world_size(), check=False))
    whole.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    sharded.enable_layerwise_casting(storage_dtype=other, compute_dtype=torch.float32)
    inputs = tiny_inputs(name)
    return relative_error(outputs(sharded, inputs), outputs(whole, inputs))


def test_slices_that_are_stored_otherwise_are_seen(two_ranks: Pool) -> None:
    for error in two_ranks.run(_rounded_once_more, FAMILIES[0]):
        assert error > tolerances.MISTAKE
