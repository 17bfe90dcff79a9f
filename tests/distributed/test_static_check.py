"""The static check as part of sharding: for every rank, before a weight is read, or on the first forward."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from shardwise import DivideAttributes, TensorParallelConfig, enable_parallelism
from shardwise.errors import PlanError
from shardwise.models import Flux2Transformer2DModel
from shardwise.plan.check import check_plan
from tests import tolerances
from tests.helpers import outputs, randomize, relative_error, save_tiny, tiny_model
from tests.pool import Pool
from tests.small_models import Glu, Transformer, small_input

FLUX2 = "Flux2Transformer2DModel"


def config(**options: Any) -> TensorParallelConfig:
    return TensorParallelConfig(tp_degree=dist.get_world_size(), **options)


class WrongPlan(Flux2Transformer2DModel):
    """The right class with gate and up cut in plain halves."""

    _tp_plan = Flux2Transformer2DModel._tp_plan | {"transformer_blocks.*.ff.linear_in": "colwise"}


def _loaded(folder: Path) -> tuple[str, bool]:
    with mock.patch("shardwise.models.parallelism.read_index") as headers:
        try:
            WrongPlan.from_pretrained(folder, parallel_config=config())
        except PlanError as error:
            return str(error), headers.called
    return "no error", headers.called


def test_E6_wrong_plan_is_refused_on_every_rank_before_a_weight_is_read(
    two_ranks: Pool, tmp_path: Path
) -> None:
    save_tiny(FLUX2, tmp_path)
    for message, opened in two_ranks.run(_loaded, tmp_path):
        assert "transformer_blocks.0.ff.linear_in" in message
        assert "transformer_flux2.py:" in message
        assert not opened


def _in_memory() -> tuple[str, bool, float]:
    model = tiny_model(FLUX2)
    before = {n: type(m) for n, m in model.named_modules()}
    try:
        enable_parallelism(model, config=config(), plan=WrongPlan._tp_plan)
    except PlanError as error:
        untouched = {n: type(m) for n, m in model.named_modules()} == before
        enable_parallelism(model, config=config())
        return str(error), untouched, model.check_report.seconds
    return "no error", False, 0.0


def test_E7_wrong_plan_in_memory_leaves_the_model_and_a_right_one_reports_its_cost(two_ranks: Pool) -> None:
    for message, untouched, seconds in two_ranks.run(_in_memory):
        assert "found by the static check" in message
        assert untouched
        assert seconds > 0


def _first_forward(right: bool, **options: Any) -> tuple[str, float, bool]:
    whole = randomize(Transformer())
    plan = Transformer._tp_plan if right else Transformer._tp_plan | {"blocks.*": DivideAttributes()}
    model = enable_parallelism(copy.deepcopy(whole), config=config(**options), plan=plan)
    inputs = small_input(Transformer)
    unchecked = model.check_report is None
    try:
        result = outputs(model, inputs)
    except PlanError as error:
        return str(error), 0.0, unchecked
    return str(model.check_report), relative_error(result, outputs(whole, inputs)), unchecked


def test_unknown_class_is_checked_on_its_first_forward(two_ranks: Pool) -> None:
    for message, _, unchecked in two_ranks.run(_first_forward, right=False):
        assert unchecked
        assert "LocalShape: blocks.0" in message
        assert "small_models.py:" in message
    for message, error, _ in two_ranks.run(_first_forward, right=True):
        assert message.startswith("the plan is right at tp_degree 2")
        assert error < tolerances.FP32


def test_check_can_be_turned_off_and_the_plan_is_then_silently_wrong(two_ranks: Pool) -> None:
    for message, error, _ in two_ranks.run(_first_forward, right=False, check=False):
        assert message == "None"
        assert error > tolerances.MISTAKE


def _refused_each_time() -> list[str]:
    plan = Transformer._tp_plan | {"blocks.*": DivideAttributes()}
    model = enable_parallelism(randomize(Transformer()), config=config(), plan=plan)
    messages = []
    for _ in range(2):
        try:
            outputs(model, small_input(Transformer))
        except PlanError as error:
            messages.append(str(error))
    return messages


def test_a_refused_first_forward_is_refused_again_when_called_again(two_ranks: Pool) -> None:
    for messages in two_ranks.run(_refused_each_time):
        assert len(messages) == 2
        assert all("LocalShape: blocks.0" in message for message in messages)


def _checked_once() -> tuple[int, int]:
    model = enable_parallelism(randomize(Glu()), config=config())
    counts = []
    for _ in range(2):
        with mock.patch("shardwise.models.checking.check_plan", wraps=check_plan) as check:
            outputs(model, small_input(Glu))
        counts.append(check.call_count)
    return counts[0], counts[1]


def test_only_the_first_forward_is_checked(two_ranks: Pool) -> None:
    assert two_ranks.run(_checked_once) == [(1, 0), (1, 0)]


def _counted_while_loading(folder: Path) -> tuple[int, int]:
    with mock.patch("shardwise.models.checking.check_plan", wraps=check_plan) as check:
        model = Flux2Transformer2DModel.from_pretrained(folder, parallel_config=config())
    return check.call_count, model.check_report.calls


def test_one_rank_checks_for_all_before_a_load(two_ranks: Pool, tmp_path: Path) -> None:
    save_tiny(FLUX2, tmp_path)
    (first, calls), (second, told) = two_ranks.run(_counted_while_loading, tmp_path)
    assert (first, second) == (1, 0)
    assert calls == told > 0
