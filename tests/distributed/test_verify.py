"""`shardwise.verify`: right plans are equal up to rounding, wrong ones are named at the smallest module around them."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from PIL import Image

from shardwise import (
    DivideAttributes,
    TensorParallelConfig,
    demo_model_path,
    enable_parallelism,
    models,
    verify,
)
from shardwise.cli import main
from shardwise.errors import ConfigError, GroupError, PlanError, RankFailure, ShardwiseError
from shardwise.launch import run_ranks
from shardwise.models.families.flux2 import PLAN as FLUX2_PLAN
from shardwise.plan.files import write_plan
from shardwise.runtime import modules
from shardwise.runtime.group import TensorParallelGroup
from shardwise.verification import VerifyReport, checkpoint, run
from tests import tolerances
from tests.helpers import FAMILIES, family, randomize, save_tiny, tiny_inputs
from tests.pool import Pool
from tests.small_models import Mixture, Mlp, Transformer, small_input

EMBEDDED = demo_model_path() / "transformer"
PLAIN_FF = FLUX2_PLAN | {"transformer_blocks.*.ff.linear_in": "colwise"}
UNDIVIDED = Transformer._tp_plan | {"blocks.*": DivideAttributes()}


def _verify(model: Any, inputs: Any = None, plan: Any = None, **options: Any) -> VerifyReport:
    return verify(model, dist.get_world_size(), inputs, plan, **options)


def wrong(report: VerifyReport) -> list[str]:
    return [row.path for row in report.modules if not row.ok]


def on(pool: Pool, *args: Any, **options: Any) -> VerifyReport:
    """Verify on the ranks of a pool, which have to find the same."""
    first, *others = pool.run(_verify, *args, **options)
    assert all(other.modules == first.modules for other in others)
    return first


# --- right plans -----------------------------------------------------------------------------------------------


def test_embedded_model_is_equal_on_ranks(ranks: Pool) -> None:
    report = on(ranks, EMBEDDED)
    assert report.ok, report
    assert report.first is None
    paths = [row.path for row in report.modules]
    assert len(paths) == len(set(paths)) > 40
    assert paths.index("transformer_blocks.0.attn") < paths.index("transformer_blocks.0")
    assert paths.index("transformer_blocks.0") < paths.index("transformer_blocks.1.attn")
    assert paths[-1] == "proj_out"
    assert 0 < max(row.error for row in report.modules) < tolerances.FP32


@pytest.mark.parametrize("name", FAMILIES)
def test_class_name_is_enough_for_every_family(two_ranks: Pool, name: str) -> None:
    report = on(two_ranks, name)
    assert report.ok, report
    assert report.model == name
    assert report.modules[-1].path == ""
    assert max(row.error for row in report.modules) < tolerances.FP32


@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_is_judged_beside_the_distance_of_one_process(two_ranks: Pool, name: str) -> None:
    report = on(two_ranks, name, dtype=torch.bfloat16)
    assert report.ok, report
    assert report.dtype == "bfloat16"
    assert all(row.one_process is not None for row in report.modules)
    assert (
        max(row.one_process for row in report.modules) > tolerances.MISTAKE
    )  # fp32's bound would call it one


@pytest.mark.parametrize("inputs", ["keywords", "positions", "tensor"])
def test_model_in_memory_is_verified_on_its_inputs_and_left_as_it_was(two_ranks: Pool, inputs: str) -> None:
    assert two_ranks.run(_verify_in_memory, inputs) == [True, True]


def _verify_in_memory(inputs: str) -> bool:
    model = randomize(Transformer()).train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    x = small_input(Transformer)["x"]
    report = _verify(model, {"keywords": {"x": x}, "positions": [x], "tensor": x}[inputs])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(module.training for module in model.modules())
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    return report.ok and [row.path for row in report.modules][-2:] == ["blocks.1", ""]


# --- wrong plans -----------------------------------------------------------------------------------------------


def test_attention_that_reshapes_by_an_undivided_head_count_is_named_first(ranks: Pool) -> None:
    model, inputs = randomize(Transformer()), small_input(Transformer)
    report = on(ranks, model, inputs, UNDIVIDED)
    assert not report.ok
    assert report.first == "blocks.0"
    assert report.modules[[r.path for r in report.modules].index("blocks.0")].kind == "CountingAttention"
    assert "first: blocks.0" in str(report)
    assert on(ranks, model, inputs).ok  # by the declared plan


def test_error_does_not_reach_the_modules_after_it(two_ranks: Pool) -> None:
    plan = Transformer._tp_plan | {"blocks.0": DivideAttributes()}
    assert wrong(on(two_ranks, randomize(Transformer()), small_input(Transformer), plan)) == ["blocks.0", ""]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", ["Flux2Transformer2DModel", EMBEDDED], ids=["tiny", "embedded"])
def test_feed_forward_with_a_plain_cut_is_named_first(
    two_ranks: Pool, model: str | Path, dtype: torch.dtype
) -> None:
    report = on(two_ranks, model, plan=PLAIN_FF, dtype=dtype)
    assert report.first == "transformer_blocks.0.ff"
    blocks = [path for path in wrong(report) if path]
    assert blocks == [f"transformer_blocks.{i}{part}" for i in range(2) for part in (".ff", "")]


def test_module_that_raises_is_a_row_with_the_reason(two_ranks: Pool) -> None:
    report = on(two_ranks, randomize(Mlp()), small_input(Mlp), {"up": "colwise"})
    assert report.first == ""
    assert "shapes cannot be multiplied" in report.modules[-1].note
    assert report.as_dict()["modules"][-1]["error"] is None


def _without_reduction() -> VerifyReport:
    with mock.patch.object(TensorParallelGroup, "all_reduce", lambda self, tensor: tensor):
        return _verify("Flux2Transformer2DModel")


def test_missing_reduction_is_named_where_it_is_missed_first(two_ranks: Pool) -> None:
    assert {report.first for report in two_ranks.run(_without_reduction)} == {
        "time_guidance_embed.timestep_embedder.linear_2"
    }


def _on_one_rank_only() -> tuple[str | None, int]:
    """Verify with a fault on rank 1 only: its copy of an unplanned weight is another."""

    def shard(model: Any, **options: Any) -> Any:
        enable_parallelism(model, **options)
        if dist.get_rank() == 1:
            model.norm.weight.data *= 1.1
        return model

    with mock.patch.object(run, "enable_parallelism", shard):
        report = _verify(randomize(Mlp()), small_input(Mlp))
    return report.first, report.modules[0].rank


def test_fault_on_one_rank_is_told_by_all(two_ranks: Pool) -> None:
    assert two_ranks.run(_on_one_rank_only) == [("norm", 1)] * 2


# --- larger than one device --------------------------------------------------------------------------------------

WIDE = {
    "num_layers": 1,
    "num_single_layers": 16,
    "num_attention_heads": 8,
    "attention_head_dim": 48,
    "axes_dims_rope": (12, 12, 12, 12),
}
CAP = 120 * 2**20
"""Bytes; the wide model has 147 MB of weights, a rank's part 80 MB, its largest block 15 MB."""


def _under_a_cap(folder: Path, inputs: dict[str, Any]) -> tuple[str, str]:
    """Verify with `CAP` more memory than the process has by now: block by block, and with all weights at once."""
    torch.set_num_threads(1)
    _verify("Flux2Transformer2DModel")  # threads, buffers and imports are there
    held = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (held + CAP, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    by_block = _verify(folder, inputs)
    assert len([row for row in by_block.modules if row.path.startswith("single_transformer_blocks.15")]) > 1
    with mock.patch.object(checkpoint, "blocks", return_value=[""]):
        try:
            at_once = str(_verify(folder, inputs))
        except (RuntimeError, MemoryError) as error:
            at_once = str(error)
    return str(by_block), at_once


def test_reference_runs_block_by_block_in_memory_that_the_whole_model_exceeds(tmp_path: Path) -> None:
    model = save_tiny("Flux2Transformer2DModel", tmp_path, max_shard_size="40MB", **WIDE)
    size = sum(p.nbytes for p in model.parameters())
    assert size > CAP
    del model
    for by_block, at_once in run_ranks(_under_a_cap, 2, tmp_path, tiny_inputs("Flux2Transformer2DModel")):
        assert "equal up to rounding" in by_block
        assert "allocate memory" in at_once


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_hold_every_weight_once_except_those_of_the_model_itself(name: str) -> None:
    model = getattr(family(name), name)(**family(name).TINY_CONFIG)
    inside = [p for path in checkpoint.blocks(model) for p in model.get_submodule(path).parameters()]
    assert len(inside) == len({id(p) for p in inside})
    assert len(inside) + len(list(model.parameters(recurse=False))) == len(list(model.parameters()))


# --- ranks of its own, and the command ----------------------------------------------------------------------------


def test_verify_starts_its_own_ranks_for_a_model_in_memory() -> None:
    report = verify(randomize(Transformer()), 2, small_input(Transformer), UNDIVIDED)
    assert (report.degree, report.first) == (2, "blocks.0")


def _outcome_of_a_wrong_plan() -> Any:
    return run._outcome(
        run.Job(models.Flux2Transformer2DModel, 2, None, {"no_such_module": "colwise"}, None, 0)
    )


def test_error_of_the_ranks_comes_out_as_itself(two_ranks: Pool) -> None:
    outcomes = two_ranks.run(_outcome_of_a_wrong_plan)
    assert [type(outcome) for outcome in outcomes] == [PlanError, PlanError]
    told = [RankFailure("rank 1 failed"), outcomes[1]]
    with (
        mock.patch.object(run, "run_ranks", return_value=told),
        pytest.raises(PlanError) as caught,
    ):
        verify("Flux2Transformer2DModel")
    assert caught.value.findings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Flux2Transformer2DModel", 1), "2 or more"),
        (("AutoencoderKL", 2), "no tiny configuration"),
        ((Mlp, 2), "no tiny configuration"),
        ((Mlp(), 2), "no inputs are known"),
        ((3, 2), "got int"),
        ((Path("/nowhere"), 2), "cannot be read"),
    ],
)
def test_what_cannot_be_verified_is_refused_before_any_rank_starts(arguments: Any, message: str) -> None:
    with mock.patch.object(run, "run_ranks") as started, pytest.raises(ShardwiseError, match=message):
        verify(*arguments)
    started.assert_not_called()


def test_cuda_is_refused_where_there_are_too_few_devices() -> None:
    with (
        mock.patch("torch.cuda.is_available", return_value=False),
        pytest.raises(ConfigError, match="this machine has 0"),
    ):
        verify("Flux2Transformer2DModel", device="cuda")


def _other_degree() -> str:
    try:
        verify("Flux2Transformer2DModel", 8)
    except GroupError as error:
        return str(error)
    return ""


def test_other_degree_than_the_running_group_is_refused(two_ranks: Pool) -> None:
    assert all("2 ranks" in message for message in two_ranks.run(_other_degree))


@pytest.fixture
def on_the_pool(two_ranks: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `verify` find its ranks running; that it starts its own is tested above."""

    def run_ranks(function: Any, degree: int, job: run.Job, device: str | None) -> list[Any]:
        assert degree == two_ranks.size
        return two_ranks.run(function, job)

    monkeypatch.setattr(run, "run_ranks", run_ranks)


@pytest.mark.usefixtures("on_the_pool")
def test_command_exits_0_and_prints_json_for_the_embedded_model() -> None:
    result = CliRunner().invoke(main, ["verify", "embedded", "--tp", "2", "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert (printed["ok"], printed["first"], printed["tp_degree"]) == (True, None, 2)
    assert {"path", "error", "bound"} <= set(printed["modules"][0])


@pytest.mark.usefixtures("on_the_pool")
def test_command_exits_1_names_the_module_and_draws_the_strip(tmp_path: Path) -> None:
    write_plan(PLAIN_FF, tmp_path / "plan.json")
    plan, plot = ["--plan", str(tmp_path / "plan.json")], ["--plot", str(tmp_path / "strip.png")]
    result = CliRunner().invoke(main, ["verify", "Flux2Transformer2DModel", *plan, *plot])
    assert result.exit_code == 1, result.output
    assert "first: transformer_blocks.0.ff\n" in result.stdout
    with Image.open(tmp_path / "strip.png") as picture:
        assert picture.format == "PNG"
        assert picture.size[0] > 1000


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["NoSuchModel"], 2, "no tiny configuration"),
        (["Flux2Transformer2DModel", "--tp", "1"], 2, "--tp"),
        (["Flux2Transformer2DModel", "--plan", "PLAN"], 1, "not the name of a style"),
    ],
)
def test_command_shows_an_error_as_one(tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"proj_out": "sideways"}')
    result = CliRunner().invoke(main, ["verify", *(str(plan) if a == "PLAN" else a for a in arguments)])
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr


def test_command_says_what_is_missing_for_a_plot() -> None:
    with mock.patch("shardwise.verification.plot.find_spec", return_value=None):
        result = CliRunner().invoke(main, ["verify", "embedded", "--plot", "strip.png"])
    assert result.exit_code == 2
    assert "shardwise[plot]" in result.stderr


def test_debugging_is_on_while_verifying(two_ranks: Pool) -> None:
    assert all("encoder_hidden_states" in message for message in two_ranks.run(_unequal_inputs))


def _unequal_inputs() -> str:
    inputs = tiny_inputs("Flux2Transformer2DModel")
    inputs["encoder_hidden_states"] += dist.get_rank()
    assert TensorParallelConfig().debug is False
    try:
        _verify("Flux2Transformer2DModel", inputs)
    except ShardwiseError as error:
        return str(error)
    return ""


# --- experts whose terms are summed once ----------------------------------------------------------------------------


def _experts(broken: bool) -> VerifyReport:
    if not broken:
        return _verify(randomize(Mixture()), small_input(Mixture))
    with mock.patch.object(modules.OutputSum, "__call__", lambda self, module, args, output: output):
        return _verify(randomize(Mixture()), small_input(Mixture))


def test_experts_are_judged_together_because_each_leaves_a_term_of_their_sum(two_ranks: Pool) -> None:
    for report in two_ranks.run(_experts, False):
        assert report.ok, report
        assert [row.path for row in report.modules if "experts" in row.path] == ["experts"]


def test_experts_that_are_not_summed_are_named(two_ranks: Pool) -> None:
    for report in two_ranks.run(_experts, True):
        assert not report.ok
        assert report.first == "experts"
