"""Heads that the degree does not divide: each rank holds whole heads, not all ranks as many."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import ZImageTransformer2DModel as StockZImage

from shardwise import TensorParallelConfig, check, enable_parallelism, verify
from shardwise.errors import PlanError
from shardwise.models import ZImageTransformer2DModel
from shardwise.plan.layout import Shard, Span
from shardwise.plan.resolve import resolve
from shardwise.runtime.shard import sharding_of
from tests import tolerances
from tests.gradients import Errors, assert_equal_gradients, compare_gradients
from tests.helpers import family, outputs, relative_error, save_tiny, tiny_model
from tests.pool import Pool

SIX: dict[str, dict[str, Any]] = {
    "ZImageTransformer2DModel": {"dim": 72, "n_heads": 6, "n_kv_heads": 6},
    "CogVideoXTransformer3DModel": {"num_attention_heads": 6},
    "SD3Transformer2DModel": {"num_attention_heads": 6, "caption_projection_dim": 72},
    "HunyuanImageTransformer2DModel": {"num_attention_heads": 6},
    # One layer for attention and feed-forward; two key heads that six query heads read; norms over all heads;
    # a rotary table over all heads; a parameter with a number for each head.
    "FluxTransformer2DModel": {"num_attention_heads": 6},
    "Flux2Transformer2DModel": {"num_attention_heads": 6},
    "Lumina2Transformer2DModel": {"hidden_size": 72, "num_attention_heads": 12, "num_kv_heads": 6},
    "WanTransformer3DModel": {"num_attention_heads": 6},
    "LTXVideoTransformer3DModel": {"num_attention_heads": 6, "cross_attention_dim": 60},
    "MochiTransformer3DModel": {"num_attention_heads": 6},
}
"""Classes with six heads (or six key heads), and what that changes in their tiny configurations."""


def inputs_of(name: str) -> dict[str, Any]:
    config = {**family(name).TINY_CONFIG, **SIX[name]}
    return family(name).example_inputs(config, torch.Generator().manual_seed(0))


def uneven(**options: Any) -> TensorParallelConfig:
    return TensorParallelConfig(dist.get_world_size(), uneven=True, **options)


def _equals(name: str) -> tuple[float, bool, int]:
    whole = tiny_model(name, **SIX[name])
    sharded = enable_parallelism(copy.deepcopy(whole), config=uneven())
    result = outputs(sharded, inputs_of(name))
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, result)
    equal = all(torch.equal(a, b) for other in others for a, b in zip(other, result, strict=True))
    made = sharding_of(sharded).group.traffic.all_reduces - sharded.check_report.all_reduces
    return relative_error(result, outputs(whole, inputs_of(name))), equal, made


@pytest.mark.parametrize("name", SIX)
def test_E4_six_heads_on_four_ranks_equal_one_process(four_ranks: Pool, name: str) -> None:
    for error, bit_equal, unforeseen in four_ranks.run(_equals, name):
        assert error < tolerances.FP32
        assert bit_equal
        assert unforeseen == 0


def _gradients(name: str) -> Errors:
    return compare_gradients(tiny_model(name, **SIX[name]), inputs_of(name), uneven=True)


@pytest.mark.parametrize("name", ["ZImageTransformer2DModel", "WanTransformer3DModel"])
def test_gradients_of_unequal_numbers_of_heads_equal_one_process(four_ranks: Pool, name: str) -> None:
    assert_equal_gradients(four_ranks.run(_gradients, name))


# ---------------------------------------------------------------- what a rank holds, and reads

NAME = "ZImageTransformer2DModel"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a model with six heads."""
    folder = tmp_path_factory.mktemp("six-heads")
    save_tiny(NAME, folder, **SIX[NAME])
    return folder


def _loaded(folder: Path) -> tuple[float, int, tuple[int, ...], tuple[int, ...], int]:
    model = ZImageTransformer2DModel.from_pretrained(folder, parallel_config=uneven())
    error = relative_error(
        outputs(model, inputs_of(NAME)), outputs(StockZImage.from_pretrained(folder), inputs_of(NAME))
    )
    layer = model.layers[0]
    held = sum(p.nbytes for p in model.parameters())
    return (
        error,
        layer.attention.heads,
        tuple(layer.attention.to_q.weight.shape),
        tuple(layer.feed_forward.w1.weight.shape),
        model.load_report.bytes_read - held,
    )


def test_L4_unequal_slices_are_read_and_the_feed_forward_stays_even(
    four_ranks: Pool, checkpoint: Path
) -> None:
    hidden = StockZImage.from_pretrained(checkpoint).layers[0].feed_forward.w1.out_features
    found = four_ranks.run(_loaded, checkpoint)
    assert [heads for _, heads, *_ in found] == [2, 2, 1, 1]
    for error, heads, queries, feed_forward, beside in found:
        assert error < tolerances.FP32
        assert queries == (heads * 12, 72)
        assert feed_forward == (hidden // 4, 72)
        assert beside <= 0  # but for buffers, a rank reads what it holds


def _verified() -> bool:
    return verify(tiny_model(NAME, **SIX[NAME]), dist.get_world_size(), inputs_of(NAME), uneven=True).ok


def test_verify_takes_unequal_numbers_of_heads(four_ranks: Pool) -> None:
    assert all(four_ranks.run(_verified))


# ---------------------------------------------------------------- refused


def _refused() -> str:
    model = tiny_model(NAME, **SIX[NAME])
    try:
        enable_parallelism(model, config=TensorParallelConfig(dist.get_world_size()))
    except PlanError as error:
        outputs(model, inputs_of(NAME))  # it is as it was
        return str(error)
    return ""


def test_E4_without_asking_for_it_uneven_heads_are_refused(four_ranks: Pool) -> None:
    for message in four_ranks.run(_refused):
        assert "6 is not divisible by tp_degree 4" in message
        assert "TensorParallelConfig(uneven=True)" in message


def test_more_ranks_than_heads_are_refused() -> None:
    report = check(tiny_model(NAME, **SIX[NAME]), degree=8, example_inputs=inputs_of(NAME), uneven=True)
    assert {finding.kind for finding in report.findings} == {"IndivisibleHeads"}


def test_degrees_that_divide_are_cut_as_without() -> None:
    model = tiny_model(NAME, **SIX[NAME])
    plan = type(model)._tp_plan
    assert resolve(model, plan, 2, uneven=True) == resolve(model, plan, 2)


# ---------------------------------------------------------------- broken on purpose


SHARE = Shard.share


def _with_a_head_held_twice() -> float:
    """Let the last rank hold the head before its own, on every layer alike."""

    def shifted(shard: Shard, rank: int, degree: int) -> Span:
        share = SHARE(shard, rank, degree)
        return Span(share.start - (shard.units > 0 and rank == degree - 1), share.length)

    whole = tiny_model(NAME, **SIX[NAME])
    with mock.patch.object(Shard, "share", shifted):
        sharded = enable_parallelism(copy.deepcopy(whole), config=uneven(check=False))
        return relative_error(outputs(sharded, inputs_of(NAME)), outputs(whole, inputs_of(NAME)))


def test_head_that_two_ranks_hold_is_seen_by_the_numbers(four_ranks: Pool) -> None:
    assert all(error > 100 * tolerances.FP32 for error in four_ranks.run(_with_a_head_held_twice))


def test_feed_forward_fused_with_uneven_heads_that_is_cut_evenly_is_found_by_the_check() -> None:
    name = "FluxTransformer2DModel"
    model = tiny_model(name, **SIX[name])
    with mock.patch("shardwise.plan.uneven._beside", return_value=[]):
        report = check(model, degree=4, example_inputs=inputs_of(name), uneven=True)
    assert {finding.kind for finding in report.findings} == {"LayoutMismatch"}
