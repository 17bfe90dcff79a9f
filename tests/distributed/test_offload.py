"""Offloading a sharded model against the same model without, to the last bit, and against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.runtime.shard import sharding_of
from tests import tolerances
from tests.distributed.test_lora import FAMILIES, sharded_copy
from tests.helpers import outputs, plainly, relative_error, tensors_of, tiny_inputs, tiny_model
from tests.offload import WAYS, Host, away_on, share_away
from tests.pool import Pool


@torch.no_grad()
def _called(target: Any, model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    return list(tensors_of(target(**{**inputs, **plainly(model)})))


def measure(name: str) -> dict[str, dict[str, Any]]:
    """Return, for each way of offloading, the error to one process, and what else is to be known."""
    whole = tiny_model(name)
    sharded, inputs, results = sharded_copy(whole), tiny_inputs(name), {}
    expected, own = outputs(whole, inputs), outputs(sharded, inputs)
    traffic = sharding_of(sharded).group.traffic
    before = traffic.all_reduces
    outputs(sharded, inputs)
    sums = traffic.all_reduces - before
    for way, offload in WAYS.items():
        model, host = copy.deepcopy(sharded), Host()
        with away_on(host, model):
            target = offload(model)
            first_away, before = share_away(model), traffic.all_reduces
            results[way] = {
                "errors": [relative_error(_called(target, model, inputs), expected) for _ in range(2)],
                "sums": (traffic.all_reduces - before) / 2 - sums,
                "same": all(map(torch.equal, _called(target, model, inputs), own)),
                "away": min(first_away, share_away(model)),
            }
    return results


@pytest.mark.parametrize("name", FAMILIES)
def test_offloaded_model_equals_itself_to_the_last_bit_with_the_same_sums(ranks: Pool, name: str) -> None:
    for results in ranks.run(measure, name):
        assert results.keys() == WAYS.keys()
        for way, result in results.items():
            assert result["same"], way
            assert max(result["errors"]) < tolerances.FP32, way
            assert result["sums"] == 0, way
            assert result["away"] == 1, way
