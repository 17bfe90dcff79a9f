"""What a plan saves and costs: counted on models without weights, and held against the tensors of small ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from shardwise import TensorParallelConfig, estimate
from shardwise.cli import main
from shardwise.errors import PlanError
from shardwise.models import planning
from shardwise.models.planning import choose_plan, without_modulations
from shardwise.plan.resolve import resolve
from shardwise.plan.styles import as_style
from shardwise.runtime.shard import localized_twin
from tests.helpers import tiny_inputs, tiny_model
from tests.small_models import SMALL, Gated, Mlp, small_input

QWEN, FLUX2 = "QwenImageTransformer2DModel", "Flux2Transformer2DModel"


@pytest.mark.parametrize("cls", SMALL, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("degree", [2, 4])
def test_rank_holds_what_the_estimate_says(cls: type, degree: int) -> None:
    share = estimate(cls, [degree], example_inputs=small_input(cls)).degrees[degree]
    twin, _ = localized_twin(cls(), resolve(cls(), cls._tp_plan, degree))
    assert share.parameters_per_rank == sum(p.numel() for p in twin.parameters())
    assert share.weight_bytes_per_rank == 2 * share.parameters_per_rank


def test_traffic_is_counted_for_the_shapes_that_are_stated() -> None:
    model, inputs = tiny_model(FLUX2), tiny_inputs(FLUX2)
    found = estimate(model, [1, 2, 4], example_inputs=inputs, dtype=torch.float32)
    assert found.degrees[1].all_reduces == 0
    assert found.degrees[2].all_reduces == found.degrees[4].all_reduces == 2 * 4 + 2 + 7
    assert found.inputs["hidden_states"] == tuple(inputs["hidden_states"].shape)
    half = estimate(model, [2], example_inputs=inputs).degrees[2]
    assert 2 * half.all_reduce_bytes == found.degrees[2].all_reduce_bytes > 0


def test_bytes_of_one_sum_are_those_of_its_output() -> None:
    share = estimate(Mlp, [2], example_inputs=small_input(Mlp)).degrees[2]
    assert (share.all_reduces, share.all_reduce_bytes) == (1, 3 * 7 * 8 * 2)


def test_without_example_inputs_no_traffic_is_claimed() -> None:
    found = estimate(Mlp, [2])
    assert found.degrees[2].all_reduces is None
    assert "traffic is not known" in str(found)


def test_impossible_degree_is_answered_with_its_reason_beside_the_others() -> None:
    found = estimate(Gated, [2, 3])
    assert set(found.degrees) == {2}
    assert "not divisible by tp_degree 3" in found.impossible[3]
    assert found.possible_degrees == (1, 2, 4)
    assert "tp_degree 3 is impossible" in str(found)


def test_everything_is_sharded_or_whole_with_a_reason() -> None:
    found = estimate(QWEN, [2])
    sharded = sum(share.parameters for share in found.patterns.values())
    assert sharded + sum(group.parameters for group in found.whole) == found.parameters
    assert all(group.reason for group in found.whole)
    assert all(group.share < 0.001 for group in found.whole if group.reason.startswith("small"))


@pytest.mark.parametrize(
    ("name", "most"),
    [
        (QWEN, 2.8e9),
        ("FluxTransformer2DModel", 1.8e9),
        (FLUX2, 4.3e9),
        ("MiniMaxH3Transformer3DModel", 4.3e9),
    ],
)
def test_P10_rank_of_eight_holds_little_more_than_an_eighth(name: str, most: float) -> None:
    command = ["plan", name, "--tp", "8", "--json"]
    report = json.loads(CliRunner().invoke(main, command).output)
    share = report["degrees"]["8"]
    assert share["parameters_per_rank"] <= most
    assert share["weight_bytes_per_rank"] == 2 * share["parameters_per_rank"]
    assert share["parameters_per_rank"] < 1.03 * report["parameters"] / 8
    assert 8 in report["possible_degrees"]


def test_modulations_may_be_left_whole_for_fewer_sums() -> None:
    model = tiny_model(QWEN)
    everything = choose_plan(model, TensorParallelConfig(2))
    fewer = choose_plan(model, TensorParallelConfig(2, shard_modulation=False))
    assert set(everything) - set(fewer) == {
        "transformer_blocks.*.img_mod.1",
        "transformer_blocks.*.txt_mod.1",
    }
    both = [estimate(model, [2], plan, tiny_inputs(QWEN)).degrees[2] for plan in (everything, fewer)]
    assert both[0].all_reduces == both[1].all_reduces + 2 * 2
    assert both[0].parameters_per_rank < both[1].parameters_per_rank


def test_plan_of_the_users_own_is_taken_as_it_is() -> None:
    own = {"linear": "rowwise_split_input"}
    config = TensorParallelConfig(2, plan=own, shard_modulation=False)
    assert choose_plan(tiny_model(QWEN), config) is own
    given = {"other": "colwise"}
    assert choose_plan(tiny_model(QWEN), config, given) is given


def test_lone_projections_are_known_in_every_spelling() -> None:
    plan = {"a": "colwise", "b": "rowwise_split_input", "c": as_style("rowwise_split_input"), "d": "nonsense"}
    assert set(without_modulations(plan)) == {"a", "d"}


def test_model_whose_names_tell_nothing_has_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "declared_plan", lambda cls: None)
    with pytest.raises(PlanError, match="declares no _tp_plan, and its names do not tell one"):
        choose_plan(Mlp(), TensorParallelConfig(2))


# ---------------------------------------------------------------- the command


def test_command_prints_plan_bytes_and_reasons() -> None:
    result = CliRunner().invoke(main, ["plan", "HunyuanVideoTransformer3DModel", "--tp", "2,5"])
    assert result.exit_code == 0, result.output
    assert 'transformer_blocks.*.attn.to_q: "colwise", 20 modules' in result.output
    assert "tp_degree 5 is impossible" in result.output
    assert "possible degrees up to 64: 1, 2, 3, 4, 6, 8, 12, 24" in result.output


def test_command_draws_bytes_by_degree(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        main, ["plan", "embedded", "--tp", "1,2,4", "--plot", str(tmp_path / "plan.png")]
    )
    assert result.exit_code == 0, result.output
    with Image.open(tmp_path / "plan.png") as picture:
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 50


def test_command_prints_a_declared_plan_as_python() -> None:
    result = CliRunner().invoke(main, ["plan", QWEN, "--python", "--tp", "2"])
    assert result.output.startswith("_tp_plan = {\n")
    assert '"transformer_blocks.*.img_mod.1": "rowwise_split_input",' in result.output


def test_command_says_that_a_plan_from_names_is_unproved() -> None:
    result = CliRunner().invoke(main, ["plan", "FluxControlNetModel", "--tp", "2"])
    assert "derived from names and unproved" in result.output


@pytest.mark.parametrize("degrees", ["two", "2,,4", "0", "-2", ""])
def test_command_refuses_what_is_no_list_of_degrees(degrees: str) -> None:
    result = CliRunner().invoke(main, ["plan", "embedded", "--tp", degrees])
    assert result.exit_code == 2
    assert "not a list of numbers of ranks" in result.output
