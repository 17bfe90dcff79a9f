"""Each style on its own and in pairs: N ranks against one process."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import PackedColwiseParallel, PackedRowwiseParallel, TensorParallelConfig, enable_parallelism
from shardwise.errors import PlanError
from shardwise.plan.layout import Shard
from shardwise.runtime.group import TensorParallelGroup
from shardwise.runtime.shard import sharding_of
from tests import tolerances
from tests.helpers import distance, outputs, randomize, relative_error
from tests.pool import Pool
from tests.small_models import SMALL, Mlp, Modulation, Parallel, small_input


def config() -> TensorParallelConfig:
    return TensorParallelConfig(tp_degree=dist.get_world_size())


class Lone(nn.Module):
    """One Linear, whose local output is put together again by hand."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(n_in, n_out)


def _gather_colwise(blocks: tuple[int, ...], style: Any, dtype: torch.dtype) -> float:
    whole = randomize(Lone(8, sum(blocks)).to(dtype))
    x = torch.randn(3, 7, 8, dtype=dtype)
    dist.broadcast(x, 0)
    sharded = enable_parallelism(copy.deepcopy(whole), config=config(), plan={"linear": style})
    group = sharding_of(sharded).group
    with torch.no_grad():
        own, expected = sharded.linear(x), whole.linear(x)
    parts = [torch.empty_like(own) for _ in range(group.degree)]
    dist.all_gather(parts, own)
    together = torch.empty_like(expected)
    for rank, part in enumerate(parts):
        offset = 0
        for span in Shard(0, blocks).spans(rank, group.degree):
            together[..., span.start : span.stop] = part[..., offset : offset + span.length]
            offset += span.length
    return relative_error(together, expected)


@pytest.mark.parametrize(
    ("blocks", "style"),
    [
        ((24,), "colwise"),
        ((12, 12), PackedColwiseParallel([1, 1])),
        ((8, 8, 8, 24, 24), PackedColwiseParallel([1, 1, 1, 3, 3])),
    ],
    ids=["plain", "halves", "unequal"],
)
def test_P3_P8_colwise_computes_slices_of_the_output_bias_included(
    ranks: Pool, blocks: tuple[int, ...], style: Any
) -> None:
    errors = ranks.run(_gather_colwise, blocks, style, torch.float64)
    assert max(errors) < tolerances.FP64


def _rowwise(blocks: tuple[int, ...], style: Any, split: bool, bias: float) -> tuple[float, int]:
    whole = randomize(Lone(sum(blocks), 10).double())
    nn.init.constant_(whole.linear.bias, bias)
    x = torch.randn(3, 7, sum(blocks), dtype=torch.float64)
    dist.broadcast(x, 0)
    sharded = enable_parallelism(copy.deepcopy(whole), config=config(), plan={"linear": style})
    group = sharding_of(sharded).group
    spans = Shard(0, blocks).spans(group.rank, group.degree)
    own = torch.cat([x[..., span.start : span.stop] for span in spans], -1) if split else x
    with torch.no_grad():
        error = relative_error(sharded.linear(own), whole.linear(x))
    return error, group.traffic.all_reduces


@pytest.mark.parametrize(
    ("blocks", "style", "split"),
    [
        ((24,), "rowwise", True),
        ((8, 24), PackedRowwiseParallel([1, 3]), True),
        ((24,), "rowwise_split_input", False),
    ],
    ids=["plain", "packed", "split_input"],
)
def test_P4_P5_rowwise_sums_partial_results_and_adds_a_large_bias_once(
    ranks: Pool, blocks: tuple[int, ...], style: Any, split: bool
) -> None:
    for error, all_reduces in ranks.run(_rowwise, blocks, style, split, bias=100.0):
        assert error < tolerances.FP64
        assert all_reduces == 1


def _small(cls: type[Any], dtype: torch.dtype) -> float:
    whole = randomize(cls()).to(dtype)
    sharded = enable_parallelism(copy.deepcopy(whole), config=config())
    inputs = small_input(cls, dtype=dtype)
    return relative_error(outputs(sharded, inputs), outputs(whole, inputs))


@pytest.mark.parametrize("cls", SMALL, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_P6_small_models_equal_one_process(ranks: Pool, cls: type[Any], dtype: torch.dtype) -> None:
    bound = {torch.float32: tolerances.FP32, torch.float64: tolerances.FP64}[dtype]
    assert max(ranks.run(_small, cls, dtype)) < bound


def _all_reduces(cls: type[Any]) -> int:
    sharded = enable_parallelism(randomize(cls()), config=config())
    outputs(sharded, small_input(cls))
    return sharding_of(sharded).group.traffic.all_reduces


def test_P6_a_pair_costs_one_all_reduce_and_no_gather(ranks: Pool) -> None:
    assert set(ranks.run(_all_reduces, Mlp)) == {1}


def _bf16(cls: type[Any]) -> tuple[float, float]:
    inputs = small_input(cls)
    half_inputs = small_input(cls, dtype=torch.bfloat16)
    whole = randomize(cls())
    exact = outputs(whole, inputs)
    sharded = enable_parallelism(copy.deepcopy(whole).bfloat16(), config=config())
    return (
        distance(outputs(sharded, half_inputs), exact),
        distance(outputs(whole.bfloat16(), half_inputs), exact),
    )


def _bf16_of_coarser_sums(cls: type[Any]) -> tuple[float, float]:
    """Round the terms of each sum over the ranks to 8 bits."""
    plain = TensorParallelGroup.all_reduce

    def all_reduce(group: TensorParallelGroup, tensor: Tensor) -> Tensor:
        return plain(group, tensor.to(torch.float8_e4m3fn).to(tensor.dtype))

    with mock.patch.object(TensorParallelGroup, "all_reduce", all_reduce):
        return _bf16(cls)


@pytest.mark.parametrize("cls", [Mlp, Parallel], ids=lambda cls: cls.__name__)
def test_the_comparison_in_bf16_sees_sums_of_coarser_terms(ranks: Pool, cls: type[Any]) -> None:
    for sharded, whole in ranks.run(_bf16_of_coarser_sums, cls):
        assert sharded > 2 * tolerances.BF16_RATIO * whole


@pytest.mark.parametrize("cls", [Mlp, Parallel], ids=lambda cls: cls.__name__)
def test_bf16_is_as_far_from_fp32_as_one_process_is(ranks: Pool, cls: type[Any]) -> None:
    for sharded, whole in ranks.run(_bf16, cls):
        assert sharded <= tolerances.BF16_RATIO * whole


def _modulation_with(style: str) -> float | str:
    whole = randomize(Modulation())
    sharded = enable_parallelism(copy.deepcopy(whole), config=config(), plan={"linear": style})
    try:
        return relative_error(
            outputs(sharded, small_input(Modulation)), outputs(whole, small_input(Modulation))
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_P5_plain_rowwise_on_a_whole_input_names_the_layer_and_the_right_style(ranks: Pool) -> None:
    for message in ranks.run(_modulation_with, "rowwise"):
        assert "linear" in message
        assert "rowwise_split_input" in message
    assert max(ranks.run(_modulation_with, "rowwise_split_input")) < tolerances.FP32


def _split_input_on_a_slice() -> str:
    plan = {"up": "colwise", "down": "rowwise_split_input"}
    options = TensorParallelConfig(tp_degree=dist.get_world_size(), check=False)
    model = enable_parallelism(randomize(Mlp()), config=options, plan=plan)
    try:
        outputs(model, small_input(Mlp))
    except PlanError as error:
        return str(error)
    return "no error"


def test_P5_split_input_on_a_slice_raises_on_every_rank_and_none_waits(ranks: Pool) -> None:
    # Slicing the slice again would work on the first rank, which would then wait for the others in the sum.
    for message in ranks.run(_split_input_on_a_slice):
        assert "WholeInputNeeded: down" in message
        assert 'use "rowwise"' in message
