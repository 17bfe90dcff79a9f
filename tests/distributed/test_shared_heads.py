"""Fewer key and value heads than ranks: each rank holds the one head that its queries read."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from diffusers import Lumina2Transformer2DModel as StockLumina2

from shardwise import DivideAttributes, TensorParallelConfig, check, enable_parallelism, placement
from shardwise.models import Lumina2Transformer2DModel
from shardwise.plan.layout import Shard, Span
from shardwise.runtime import norms
from shardwise.runtime.shard import sharding_of
from tests import tolerances
from tests.gradients import Errors, assert_equal_gradients, compare_gradients
from tests.helpers import outputs, randomize, relative_error, save_tiny, tiny_inputs
from tests.pool import Pool
from tests.small_models import Grouped, small_input

NAME = "Lumina2Transformer2DModel"
KEYS = "layers.0.attn.to_k.weight"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A folder for each number of key heads."""
    folders = {heads: tmp_path_factory.mktemp(f"heads-{heads}") for heads in (1, 2)}
    for heads, folder in folders.items():
        save_tiny(NAME, folder, num_kv_heads=heads)
    return folders


def _loaded(folder: Path, heads: int) -> tuple[float, int, Any]:
    """Return the error, the all-reduces that the check foresees beside those made, and the layout of a key weight."""
    degree = dist.get_world_size()
    model = Lumina2Transformer2DModel.from_pretrained(
        folder, parallel_config=TensorParallelConfig(tp_degree=degree)
    )
    inputs = tiny_inputs(NAME)
    error = relative_error(outputs(model, inputs), outputs(StockLumina2.from_pretrained(folder), inputs))
    made = sharding_of(model).group.traffic.all_reduces - model.check_report.all_reduces
    (row,) = (row for row in placement(model).tensors if row.name == KEYS)
    return error, made, (row.layout, row.local_shape)


@pytest.mark.parametrize("heads", [1, 2])
def test_E4_fewer_key_heads_than_ranks_equal_one_process(
    ranks: Pool, checkpoints: dict[int, Path], heads: int
) -> None:
    for error, unforeseen, (layout, local) in ranks.run(_loaded, checkpoints[heads], heads):
        assert error < tolerances.FP32
        assert unforeseen == 0
        assert layout == Shard(0, (heads * 6,), max(1, ranks.size // heads))
        assert local == (max(6, heads * 6 // ranks.size), 48)  # a whole head, never a part of one


def _small(heads: int) -> tuple[float, Errors]:
    whole, sharded = (randomize(Grouped(kv_heads=heads)) for _ in range(2))
    enable_parallelism(sharded, config=TensorParallelConfig(tp_degree=dist.get_world_size()))
    inputs = small_input(Grouped)
    error = relative_error(outputs(sharded, inputs), outputs(whole, inputs))
    return error, compare_gradients(whole, inputs)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_norms_over_shared_heads_and_gradients_equal_one_process(ranks: Pool, heads: int) -> None:
    for error, gradients in ranks.run(_small, heads):
        assert error < tolerances.FP32
        assert_equal_gradients([gradients])


def test_E4_repetition_that_does_not_follow_the_ranks_own_queries_is_found_by_the_check() -> None:
    plan = {**Grouped._tp_plan, "blocks.*": DivideAttributes("num_heads", "num_key_value_heads")}
    (finding,) = check(Grouped(), plan, degree=4, example_inputs=small_input(Grouped)).findings
    assert (finding.kind, finding.module) == ("LocalShape", "blocks.0")
    assert check(Grouped(), degree=4, example_inputs=small_input(Grouped)).ok


# ---------------------------------------------------------------- broken on purpose


def _gradients_unsummed() -> float:
    with (
        mock.patch("shardwise.runtime.modules.sum_gradients_of_copies"),
        mock.patch.object(norms, "sum_gradients_of_copies"),
    ):
        return _small(1)[1].parameters


def _copies_counted_by_the_norm() -> float:
    adopt = norms.LocalNorm.adopt.__func__

    def forgetful(cls: Any, module: Any, group: Any, planned: Any) -> None:
        adopt(cls, module, group, planned)
        module.tp_copies = 1

    with mock.patch.object(norms.LocalNorm, "adopt", classmethod(forgetful)):
        return _small(1)[0]


def _heads_dealt_in_turns() -> float:
    """Ranks 0 and 2 share a head, and 1 and 3 the other: the queries of 1 and 2 read the wrong one."""

    def spans(self: Shard, rank: int, degree: int) -> tuple[Span, ...]:
        pieces = self.pieces(degree)
        (block,) = self.blocks
        return (Span(rank % pieces * (block // pieces), block // pieces),)

    with mock.patch.object(Shard, "spans", spans):
        return _small(2)[0]


def test_gradients_of_copies_that_are_not_summed_are_noticed(two_ranks: Pool) -> None:
    assert min(two_ranks.run(_gradients_unsummed)) > tolerances.MISTAKE


def test_norm_that_counts_each_copy_is_noticed(two_ranks: Pool) -> None:
    assert min(two_ranks.run(_copies_counted_by_the_norm)) > tolerances.MISTAKE


def test_head_that_other_queries_read_is_noticed(four_ranks: Pool) -> None:
    assert min(four_ranks.run(_heads_dealt_in_turns)) > tolerances.MISTAKE
