"""Which weights share a scale, by torchao's configuration, and which groups the border of a slice would cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8StaticActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerAxis,
    PerGroup,
    PerRow,
    PerTensor,
)

from shardwise.compose.quantize import WHOLE, block_of, check_borders
from shardwise.errors import UnsupportedOption
from shardwise.plan.layout import Shard
from shardwise.plan.resolve import PlannedModule, ResolvedPlan
from shardwise.plan.styles import ColwiseParallel


@pytest.mark.parametrize(
    ("config", "block"),
    [
        (Int8WeightOnlyConfig(), (1, WHOLE)),
        (Int8WeightOnlyConfig(granularity=PerTensor()), (WHOLE, WHOLE)),
        (Int8WeightOnlyConfig(granularity=PerGroup(32)), (1, 32)),
        (Int8DynamicActivationInt8WeightConfig(), (1, WHOLE)),
        (Int8DynamicActivationInt8WeightConfig(granularity=[PerRow(), PerTensor()]), (WHOLE, WHOLE)),
        (Float8WeightOnlyConfig(granularity=PerGroup(64)), (1, 64)),
        (IntxWeightOnlyConfig(torch.int4, PerAxis(0)), (1, WHOLE)),
        (IntxWeightOnlyConfig(torch.int4, PerGroup(16)), (1, 16)),
        (Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(16)), (1, 16)),
        (Int4WeightOnlyConfig(group_size=128), (1, 128)),
    ],
)
def test_block_of_a_configuration_is_what_shares_a_scale(config: Any, block: tuple[int, int]) -> None:
    assert block_of(config) == block


def test_configuration_that_is_not_known_is_refused() -> None:
    config = Int8StaticActivationInt8WeightConfig(torch.tensor(1.0), granularity=PerTensor())
    with pytest.raises(UnsupportedOption, match=r"Int8StaticActivationInt8WeightConfig.*has not been proved"):
        block_of(config)


def plan(shard: Shard, degree: int = 2) -> ResolvedPlan:
    module = PlannedModule("layer", "layer", ColwiseParallel(), {"weight": shard}, {})
    return ResolvedPlan(degree, (module,), {"layer.weight": shard})


def in_groups(size: int) -> dict[str, Any]:
    return {"layer": Int8WeightOnlyConfig(granularity=PerGroup(size)), "other": Int8WeightOnlyConfig()}


@pytest.mark.parametrize(
    ("shard", "size"),
    [
        (Shard(1, (64,)), 32),
        (Shard(1, (64,)), 16),
        (Shard(1, (64, 32)), 16),
        (Shard(0, (62,)), 64),  # rows: a group of inputs is on one rank, whatever the rows
        (Shard(1, (30,), units=5), 6),  # uneven: 3 and 2 of 5 heads of 6
        (Shard(1, (60,)), 16),  # not for one process either: torchao says so, or leaves the layer as it is
    ],
)
def test_groups_that_lie_on_one_rank_pass(shard: Shard, size: int) -> None:
    check_borders(plan(shard), in_groups(size))


@pytest.mark.parametrize(
    ("shard", "size", "line", "fit"),
    [
        (Shard(1, (64,)), 64, "layer: groups of 64, slices of 32 of 64 input features", 32),
        (Shard(1, (48,)), 16, "layer: groups of 16, slices of 24 of 48 input features", 24),
        (Shard(1, (16, 32)), 12, "layer: groups of 12, slices of 24 of 48 input features", 8),
        (Shard(1, (30,), units=5), 5, "layer: groups of 5, slices of 12 and 18 of 30 input features", 6),
    ],
)
def test_groups_that_a_border_would_cut_are_named(shard: Shard, size: int, line: str, fit: int) -> None:
    with pytest.raises(UnsupportedOption) as error:
        check_borders(plan(shard), in_groups(size))
    assert line in str(error.value)
    assert f"divisor of {fit}," in str(error.value)
    assert "degree 2" in str(error.value)


def test_layer_that_is_not_quantized_may_be_cut_anywhere() -> None:
    check_borders(plan(Shard(1, (64,))), {"other": in_groups(64)["layer"]})
