"""Mixtures of experts: what a plan for one means, what it refuses, and what the check finds in a wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import IfPresent, PackedColwiseParallel, SliceExperts, SumOnce, check
from shardwise.errors import ConfigError, PlanError
from shardwise.models.lookup import skeleton
from shardwise.plan.check import CheckReport
from shardwise.plan.files import read_plan, write_plan
from shardwise.plan.layout import Replicated, Shard
from shardwise.plan.resolve import resolve
from shardwise.plan.styles import PerHead, as_style
from tests.small_models import Experts, Glued, Mixture, small_input

INSIDE: dict[str, Any] = {
    "listed.*.0": "colwise",
    "listed.*.2": "rowwise",
    "glued": SliceExperts("up", "down", [1, 1]),
}


def report_of(inside: dict[str, Any], model: type[nn.Module] = Mixture) -> CheckReport:
    return check(model(), {"experts": SumOnce(inside)}, example_inputs=small_input(Mixture))


def refusal(inside: dict[str, Any], degree: int = 2) -> set[tuple[str, str]]:
    """Return (kind, place) of what is refused."""
    with pytest.raises(PlanError) as caught:
        resolve(Mixture(), {"experts": SumOnce(inside)}, degree)
    return {(finding.kind, finding.module) for finding in caught.value.findings}


# ---------------------------------------------------------------- what it means


def test_experts_are_cut_by_the_plan_inside_and_the_router_is_whole() -> None:
    resolved = resolve(Mixture(), Mixture._tp_plan, 2)
    assert resolved.layouts["experts.listed.1.0.weight"] == Shard(0, (16,))
    assert resolved.layouts["experts.listed.1.2.weight"] == Shard(1, (16,))
    assert resolved.layouts["experts.glued.up"] == Shard(2, (12, 12))
    assert resolved.layouts["experts.glued.down"] == Shard(1, (12,))
    assert resolved.layout("experts.router.weight") == Replicated()
    assert {m.plan_key for m in resolved.modules} == {"experts"}


def test_gradients_of_what_is_whole_inside_are_summed_and_of_nothing_outside() -> None:
    summed = {m.path for m in resolve(Mixture(), Mixture._tp_plan, 2).modules if isinstance(m.style, PerHead)}
    assert summed == {"experts.router"}


def test_all_experts_together_make_one_sum() -> None:
    report = report_of(INSIDE)
    assert report.ok, str(report)
    assert report.all_reduces == 1
    apart = {"experts.listed.*.0": "colwise", "experts.listed.*.2": "rowwise"}
    assert check(Mixture(), apart, example_inputs=small_input(Mixture)).all_reduces == 3


def test_optional_part_inside_may_match_nothing() -> None:
    more = {**INSIDE, "other": IfPresent("colwise"), "others.*.0": IfPresent("colwise")}
    assert (
        resolve(Mixture(), {"experts": SumOnce(more)}, 2).layouts
        == resolve(Mixture(), Mixture._tp_plan, 2).layouts
    )


def test_plan_with_experts_is_written_to_a_file_and_read_again(tmp_path: Path) -> None:
    plan = {"experts": SumOnce({**INSIDE, "other": IfPresent(PackedColwiseParallel([1, 1]))})}
    write_plan(plan, tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json")
    assert as_style(read["experts"]).label == plan["experts"].label
    assert resolve(Mixture(), read, 2).layouts == resolve(Mixture(), plan, 2).layouts


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("value", [{}, None, "colwise", ["listed.*.0"]])
def test_sum_of_nothing_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^SumOnce: a plan of what is inside is needed"):
        SumOnce(value)


@pytest.mark.parametrize("blocks", [[], [0], [-1, 2], [1.0]])
def test_blocks_of_experts_are_positive_integers(blocks: Any) -> None:
    with pytest.raises(ConfigError, match=r"^SliceExperts: blocks"):
        SliceExperts("up", "down", blocks)


@pytest.mark.parametrize("style", ["rowwise_split_input", "across_head_norm", SumOnce({"0": "colwise"})])
def test_what_sums_by_itself_cannot_stand_inside(style: Any) -> None:
    assert refusal({**INSIDE, "router": style}) == {("NotInside", "experts.router")}


def test_bias_inside_is_refused_because_each_rank_would_add_it() -> None:
    assert refusal({"listed.*.0": "rowwise"}) == {("BiasInside", "experts.listed.0.0")}


def test_typo_inside_is_named_with_its_place() -> None:
    assert refusal({**INSIDE, "listed.*.1.up": "colwise"}) == {("UnmatchedKey", "experts.listed.*.1.up")}


def test_module_planned_inside_and_outside_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        resolve(Mixture(), {**Mixture._tp_plan, "experts.glued": SliceExperts("up", "down")}, 2)
    assert "MatchedTwice" in {finding.kind for finding in caught.value.findings}


def test_E5_each_block_of_experts_must_be_divisible() -> None:
    assert refusal(INSIDE, 3) >= {("IndivisibleBlock", "experts.listed.0.0")}
    assert ("IndivisibleBlock", "experts.glued") in refusal(INSIDE, 8)


@pytest.mark.parametrize(("up", "down"), [("gate", "down"), ("up", "weight")])
def test_experts_that_are_not_there_name_those_that_are(up: str, down: str) -> None:
    with pytest.raises(PlanError, match=r"up \[2, 8, 24\], down \[2, 12, 8\]"):
        resolve(Mixture(), {"experts": SumOnce({"glued": SliceExperts(up, down)})}, 2)


def test_experts_that_nothing_sums_are_refused() -> None:
    with pytest.raises(PlanError, match="NothingSums"):
        resolve(Glued(), {"": SliceExperts("up", "down", [1, 1])}, 2)


# ---------------------------------------------------------------- what the check finds


@pytest.mark.parametrize("left_out", ["listed.*.0", "listed.*.2", "glued"])
def test_expert_left_out_is_found(left_out: str) -> None:
    assert not report_of({key: style for key, style in INSIDE.items() if key != left_out}).ok


def test_gate_and_value_cut_as_one_are_found() -> None:
    assert not report_of({**INSIDE, "glued": SliceExperts("up", "down")}).ok


def test_module_that_returns_whole_values_is_not_summed() -> None:
    (finding,) = check(
        Mixture(),
        {"norm": SumOnce({"gone": IfPresent("colwise")}), **Mixture._tp_plan},
        example_inputs=small_input(Mixture),
    ).findings
    assert (finding.kind, finding.module) == ("LayoutMismatch", "norm")
    assert "partial sum is needed" in finding.message


class Squashed(Experts):
    """Not linear in what the experts give."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class Shifted(Experts):
    """Adds its input, which would be added on each rank."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


@pytest.mark.parametrize("kind", [Squashed, Shifted])
def test_experts_put_together_in_a_way_that_is_not_a_sum_are_found(kind: type[Experts]) -> None:
    model = Mixture()
    model.experts = kind()
    report = check(model, Mixture._tp_plan, example_inputs=small_input(Mixture))
    assert {finding.kind for finding in report.findings} == {"LayoutMismatch"}
    assert report.findings[0].module == "experts"


def test_whole_tensor_that_is_not_zero_cannot_be_filled_with_partial_sums() -> None:
    class Filled(Experts):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones_like(x).index_add(0, torch.arange(len(x)), self.listed[0](x))

    model = Mixture()
    model.experts = Filled()
    report = check(model, Mixture._tp_plan, example_inputs=small_input(Mixture))
    assert "count once on each rank" in report.findings[0].message


def test_experts_of_released_size_are_checked_by_the_name_of_their_class() -> None:
    assert not skeleton("HiDreamImageTransformer2DModel").training  # in training its experts choose otherwise
    report = check("HiDreamImageTransformer2DModel", degree=4)
    assert report.ok, str(report)
