"""Queries and keys of one attention are normed over all heads by one sum: N ranks against one process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from shardwise import TensorParallelConfig, enable_parallelism
from shardwise.runtime.shard import sharding_of
from shardwise.runtime.together import Together
from tests import tolerances
from tests.gradients import Errors, assert_equal_gradients, compare_gradients
from tests.helpers import outputs, randomize, relative_error
from tests.pool import Pool

HEADS, WIDTH = 4, 24

NORMS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "torch": (lambda: nn.RMSNorm(WIDTH, eps=1e-5), 1),
    "diffusers": (lambda: DiffusersRMSNorm(WIDTH, eps=1e-5), 1),
    "layer": (lambda: nn.LayerNorm(WIDTH, eps=1e-5), 2),
}
"""Norms over all heads, and how often each sums."""


class Attention(nn.Module):
    """Attends from tokens to a context of another length; how the norms meet their inputs is `order`."""

    def __init__(self, kind: str = "torch", order: str = "together") -> None:
        super().__init__()
        self.order, self.heads = order, HEADS
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm_q, self.norm_k = NORMS[kind][0](), NORMS[kind][0]()
        self.kept: Tensor | None = None

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        query, key, value = self._projected(x, context)
        heads = [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (query, key, value)]
        return self.to_out(scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))

    def _projected(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value = self.to_v(context)
        if self.order == "one by one":
            return self.norm_q(self.to_q(x)), self.norm_k(self.to_k(context)), value
        query, key = self.to_q(x), self.to_k(context)
        if self.order == "keys first":
            key = self.norm_k(key)
            return self.norm_q(query), key, value
        if self.order == "changed":
            return self.norm_q(query), self.norm_k(key * 2), value
        return self.norm_q(query), self.norm_k(key), value


SUMS = {"together": 1, "keys first": 1, "one by one": 2, "changed": 2}
"""How many norms of an attention sum, by the order in which its code norms."""

PLAN: dict[str, object] = {f"to_{name}": "colwise" for name in "qkv"} | {
    "to_out": "rowwise",
    "norm_q": "across_head_norm",
    "norm_k": "across_head_norm",
}


def inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(3, 7, WIDTH, generator=generator),
        "context": torch.randn(3, 5, WIDTH, generator=generator),
    }


def sharded(whole: nn.Module) -> Any:
    config = TensorParallelConfig(dist.get_world_size(), plan=PLAN)
    return enable_parallelism(copy.deepcopy(whole), config=config)


def _normed(kind: str, order: str) -> tuple[float, int]:
    whole = randomize(Attention(kind, order))
    model = sharded(whole)
    outputs(model, inputs())  # what the first call leaves behind must not meet the second
    before = sharding_of(model).group.traffic.all_reduces
    error = relative_error(outputs(model, inputs()), outputs(whole, inputs()))
    return error, sharding_of(model).group.traffic.all_reduces - before


@pytest.mark.parametrize("order", SUMS)
@pytest.mark.parametrize("kind", NORMS)
def test_queries_and_keys_that_are_read_together_share_a_sum(ranks: Pool, kind: str, order: str) -> None:
    for error, all_reduces in ranks.run(_normed, kind, order):
        assert error < tolerances.FP32
        assert all_reduces == SUMS[order] * NORMS[kind][1] + 1  # and one behind the attention


def _gradients(kind: str) -> Errors:
    class Planned(Attention):
        _tp_plan = PLAN

    return compare_gradients(randomize(Planned(kind)), inputs())


@pytest.mark.parametrize("kind", NORMS)
def test_gradients_through_a_shared_sum_equal_one_process(ranks: Pool, kind: str) -> None:
    assert_equal_gradients(ranks.run(_gradients, kind))


def _copied() -> tuple[float, float, bool]:
    """Copy and pickle a model in the middle of an attention, with keys waiting."""
    whole = randomize(Attention())
    model = sharded(whole)
    model.to_k(inputs()["context"])
    twin = copy.deepcopy(model)
    pickled = pickle.loads(pickle.dumps(model))
    wanted = outputs(whole, inputs())
    error = relative_error(outputs(twin, inputs()), wanted)
    return error, relative_error(outputs(model, inputs()), wanted), isinstance(pickled, Attention)


def test_copies_wait_for_nothing(two_ranks: Pool) -> None:
    for copied, original, pickled in two_ranks.run(_copied):
        assert copied < tolerances.FP32
        assert original < tolerances.FP32
        assert pickled


# ---------------------------------------------------------------- broken on purpose


def _with_another_tensors_statistic() -> float:
    """Give each norm the statistic that was summed last, whichever tensor it is of."""
    take = Together.take

    def careless(self: Together, own: Any, statistics: Any) -> tuple[Tensor, ...]:
        self._found = [(lambda: own.tensor, found) for _, found in self._found]
        return take(self, own, statistics)

    whole = randomize(Attention(order="changed"))
    model = sharded(whole)
    with mock.patch.object(Together, "take", careless):
        return relative_error(outputs(model, inputs()), outputs(whole, inputs()))


def test_statistic_of_another_tensor_is_seen_by_the_numbers(two_ranks: Pool) -> None:
    assert all(error > 100 * tolerances.FP32 for error in two_ranks.run(_with_another_tensors_statistic))
