"""The static check: right plans pass, and each kind of fault is found where it is."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise import DivideAttributes, PackedColwiseParallel, check, models
from shardwise.cli import main
from shardwise.errors import ConfigError, PlanError
from shardwise.models.checking import StaticCheck
from shardwise.plan.check import CheckReport, check_plan
from shardwise.plan.files import write_plan
from shardwise.plan.layout_pass import LayoutTracer
from shardwise.plan.repair import Divide, KeepWhole, PlanRowwise, RefineBlocks, SplitInput
from shardwise.plan.resolve import resolve
from shardwise.plan.rules import RULES
from shardwise.plan.styles import GatherOutput
from shardwise.runtime.shard import localized_twin, meta_twin
from tests.helpers import FAMILIES, family, tiny_inputs, tiny_model, tiny_skeleton
from tests.small_models import SMALL, CountingAttention, Glu, Mlp, Modulation, Transformer, small_input


def check_module(module: nn.Module, plan: dict[str, Any], degree: int = 2, **inputs: Tensor) -> CheckReport:
    """Check a plan on a module; inputs default to one of 3 x 7 x 16."""
    twin = meta_twin(module)
    return check_plan(
        twin, resolve(twin, plan, degree), inputs or {"x": torch.ones(3, 7, 16)}, localized_twin
    )


def only(report: CheckReport) -> Any:
    (finding,) = report.findings
    return finding


# --- right plans -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_P12_declared_plans_are_right(name: str, degree: int) -> None:
    report = check_module(tiny_skeleton(name), family(name).PLAN, degree, **tiny_inputs(name))
    assert report.ok, str(report)
    assert report.sharded_calls > 50
    assert report.all_reduces > 0


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("cls", SMALL, ids=lambda cls: cls.__name__)
def test_small_plans_are_right(cls: Any, degree: int) -> None:
    report = check_module(cls(), cls._tp_plan, degree, **small_input(cls))
    assert report.ok, str(report)


def test_released_size_is_checked_without_allocating_a_weight() -> None:
    report = check("Flux2Transformer2DModel", degree=4)  # 32 billion parameters
    assert report.ok, str(report)
    assert report.all_reduces == 8 * 4 + 48 + 7  # blocks of both kinds; lone projections


# --- each kind of finding ----------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Two Linears with whatever a test puts around them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.middle(self.a(x))))

    def middle(self, x: Tensor) -> Tensor:
        return F.gelu(x)


PAIR = {"a": "colwise", "b": "rowwise"}


def test_whole_input_needed() -> None:
    finding = only(check_module(Chain(), {"a": "colwise", "b": "colwise", "c": "rowwise"}))
    assert (finding.kind, finding.module, finding.plan_key) == ("WholeInputNeeded", "b", "b")
    assert finding.source.startswith("test_check.py:")
    assert "from a" in finding.message
    assert finding.repair == PlanRowwise("b", (32,))


def test_sharded_input_needed() -> None:
    finding = only(check_module(Chain(), {"b": "rowwise"}))
    assert (finding.kind, finding.module) == ("ShardedInputNeeded", "b")
    assert finding.repair == SplitInput("b")
    assert "rowwise_split_input" in finding.fix


def test_blocks_differ() -> None:
    finding = only(check_module(Chain(), {"a": PackedColwiseParallel([1, 3]), "b": "rowwise"}))
    assert (finding.kind, finding.module) == ("BlocksDiffer", "b")
    assert finding.repair == RefineBlocks(("b",), (32,), (8, 24))
    assert "[8, 24]" in finding.fix


def test_layout_mismatch_names_the_line_the_producer_and_the_blocks() -> None:
    finding = only(check_module(Glu(), {"gate_value": "colwise", "down": "rowwise"}, **small_input(Glu)))
    assert (finding.kind, finding.module) == ("LayoutMismatch", "")
    assert finding.source.startswith("small_models.py:")
    assert "gate_value" in finding.message
    assert "16" in finding.fix


def test_unplanned_linear_that_is_fed_a_shard() -> None:
    finding = only(check_module(Chain(), {"a": "colwise"}))
    assert (finding.kind, finding.module) == ("LayoutMismatch", "b")
    assert finding.repair == PlanRowwise("b", (32,))


class Odd(Chain):
    def middle(self, x: Tensor) -> Tensor:
        return torch.special.zeta(x.abs() + 2, x.abs() + 1)


def test_function_without_a_rule_is_named_and_not_guessed() -> None:
    finding = only(check_module(Odd(), PAIR))
    assert finding.kind == "NoRule"
    assert "torch.special.zeta" in finding.message or "special_zeta" in finding.message
    assert "rule" in finding.fix
    assert not check_module(Odd(), PAIR).wrong


class Peeking(Chain):
    def middle(self, x: Tensor) -> Tensor:
        return F.gelu(x) * self.a.weight.mean()


def test_planned_weight_that_is_read_outside_of_its_module() -> None:
    finding = only(check_module(Peeking(), PAIR))
    assert (finding.kind, finding.module, finding.plan_key) == ("PlannedWeightOutside", "a", "a")


class Open(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


def test_output_that_is_not_whole() -> None:
    finding = only(check_module(Open(), {"a": "colwise"}))
    assert (finding.kind, finding.module) == ("OutputNotWhole", "a")


class One(nn.Module):
    """One attention in a model, so that it has a path."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.attn = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x)


def test_slices_that_cannot_be_put_together() -> None:
    gathered = {"attn": GatherOutput(32)}
    assert check_module(One(Open()), {"attn.a": "colwise"} | gathered).ok
    finding = only(check_module(One(Open()), {"attn.a": PackedColwiseParallel([1, 1])} | gathered))
    assert (finding.kind, finding.module, finding.plan_key) == ("LayoutMismatch", "attn", "attn")
    assert finding.source.startswith("test_check.py:")
    assert "blocks 16+16" in finding.message
    assert "from attn.a" in finding.message
    assert finding.repair == KeepWhole(("attn.a",), "output")


ATTENTION = {
    "attn.to_q": "colwise",
    "attn.to_k": "colwise",
    "attn.to_v": "colwise",
    "attn.to_out.0": "rowwise",
}


def test_local_shape_finds_an_undivided_head_count() -> None:
    assert check_module(One(CountingAttention(16, 4)), ATTENTION).ok
    finding = only(check_module(One(CountingAttention(16, 4)), ATTENTION | {"attn": DivideAttributes()}))
    assert (finding.kind, finding.module) == ("LocalShape", "attn")
    assert finding.source.startswith("small_models.py:")
    assert isinstance(finding.repair, Divide)
    assert "[3, 7, 4, 2] on a rank, the layouts say [3, 7, 2, 4]" in finding.message


class JoinedByView(CountingAttention):
    """Joins the heads by a view, which the strides of the fused kernels allow."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for proj in (self.to_q, self.to_k, self.to_v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.to_out(mixed.transpose(1, 2).view(*x.shape[:2], -1))


def test_heads_may_be_joined_by_a_view_as_on_a_real_device() -> None:
    model = One(JoinedByView(16, 4))
    assert model(torch.ones(3, 7, 16)).shape == (3, 7, 16)
    assert check_module(model, ATTENTION).ok


class Scaled(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 4

    def middle(self, x: Tensor) -> Tensor:
        return x * (self.heads**-0.5)


def test_local_scalar_finds_a_constant_of_a_divided_size() -> None:
    plan = PAIR | {"": DivideAttributes("heads")}
    finding = only(check_module(Scaled(), plan))
    assert finding.kind == "LocalScalar"
    assert "0.5" in finding.message


class BakedSlice(nn.Module):
    """Takes the second half of a packed projection by a bound of the whole width, which fits by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.a(x)
        start = 16 if fused.shape[-1] == 64 else 12  # block borders at 16, 32, 48 of 64; at 8, 16, 24 of 32
        return self.b(F.gelu(fused[..., start : start + fused.shape[-1] // 4]))


def test_local_slice_finds_a_bound_that_is_baked_into_code() -> None:
    plan = {"a": PackedColwiseParallel([1, 1, 1, 1]), "b": "rowwise"}
    finding = only(check_module(BakedSlice(), plan))
    assert finding.kind == "LocalSlice"
    assert "is 12 on a rank, the layouts say 8" in finding.message


class Branching(Chain):
    def middle(self, x: Tensor) -> Tensor:
        return F.gelu(x) if x.shape[-1] == 32 else F.silu(x)


def test_trace_differs_finds_a_branch_on_a_local_size() -> None:
    finding = only(check_module(Branching(), PAIR))
    assert finding.kind == "TraceDiffers"
    assert "gelu" in finding.message
    assert "silu" in finding.message


class Viewing(Chain):
    def middle(self, x: Tensor) -> Tensor:
        return x.view(3, 7, 4, 8).flatten(2)


def test_local_forward_that_fails_is_found_where_it_fails() -> None:
    finding = only(check_module(Viewing(), PAIR))
    assert finding.kind == "LocalForwardFailed"
    assert "view" in finding.message


class Failing(Chain):
    def middle(self, x: Tensor) -> Tensor:
        raise ValueError("needs a weight")


def test_forward_that_fails_without_weights_is_not_called_a_wrong_plan() -> None:
    report = check_module(Failing(), PAIR)
    assert only(report).kind == "ForwardFailed"
    assert not report.wrong
    assert not report.ok


# --- how findings come -------------------------------------------------------------------------------------------


def test_one_fault_in_every_block_is_one_finding_with_a_count() -> None:
    plan = family("Flux2Transformer2DModel").PLAN | {"transformer_blocks.*.ff.linear_in": "colwise"}
    report = check_module(
        tiny_model("Flux2Transformer2DModel"), plan, **tiny_inputs("Flux2Transformer2DModel")
    )
    assert {finding.count for finding in report.findings} == {2}
    assert all("ff.linear_in" in finding.message for finding in report.findings)


def test_independent_faults_are_all_reported() -> None:
    plan = family("Flux2Transformer2DModel").PLAN | {
        "transformer_blocks.*.ff.linear_in": "colwise",
        "transformer_blocks.*.attn.to_add_out": "rowwise_split_input",
    }
    report = check_module(
        tiny_model("Flux2Transformer2DModel"), plan, **tiny_inputs("Flux2Transformer2DModel")
    )
    text = str(report)
    assert "ff.linear_in" in text
    assert "to_add_out" in text


def test_the_check_leaves_the_model_as_it_was() -> None:
    model = tiny_model("FluxTransformer2DModel")
    before = {n: p.clone() for n, p in model.named_parameters()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert check(model).ok
    assert all(torch.equal(p, before[n]) and not p.is_meta for n, p in model.named_parameters())
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks


def test_a_rule_that_is_wrong_lets_a_fault_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {"gate_value": "colwise", "down": "rowwise"}
    assert not check_module(Glu(), plan, **small_input(Glu)).ok
    monkeypatch.setitem(RULES, "chunk", lambda call: [call.layout(call.args[0])] * len(call.output))
    assert not any(f.kind == "LayoutMismatch" for f in check_module(Glu(), plan, **small_input(Glu)).findings)


def test_tags_do_not_outlive_a_run() -> None:
    model = meta_twin(tiny_model("QwenImageTransformer2DModel"))  # keeps rotary tables on the module
    plan = resolve(model, family("QwenImageTransformer2DModel").PLAN, 2)
    first, second = LayoutTracer(model, plan), LayoutTracer(model, plan)
    assert not first._tags
    for tracer in (first, second):
        with torch.no_grad(), tracer:
            model(**tiny_inputs("QwenImageTransformer2DModel"))
        assert not tracer.findings


# --- the call and the command ------------------------------------------------------------------------------------


def test_check_takes_a_model_a_class_a_name_and_a_folder(tmp_path: Path) -> None:
    model = tiny_model("QwenImageTransformer2DModel")
    model.save_config(tmp_path)
    for target in (model, str(tmp_path), tmp_path):
        assert check(target, degree=4).ok


@pytest.mark.parametrize("name", ["NoSuchTransformer", "/no/such/folder", "DDPMScheduler"])
def test_check_of_something_unknown_is_a_clear_error(name: str) -> None:
    with pytest.raises(ConfigError, match=name.strip("/").split("/")[0]):
        check(name)


def test_check_without_example_inputs_asks_for_them() -> None:
    with pytest.raises(ConfigError, match="example_inputs"):
        check(Mlp())
    assert check(Mlp(), example_inputs=small_input(Mlp)).ok


def test_indivisible_degree_is_a_report_like_any_other() -> None:
    report = check(Transformer(), degree=3, example_inputs=small_input(Transformer))
    assert not report.ok
    assert {finding.kind for finding in report.findings} >= {"IndivisibleHeads"}


def test_command_passes_a_right_plan() -> None:
    result = CliRunner().invoke(main, ["check", "Flux2Transformer2DModel", "--tp", "4"])
    assert result.exit_code == 0, result.output
    assert "the plan is right at tp_degree 4" in result.output


def test_command_names_layer_line_and_fix_of_a_wrong_plan(tmp_path: Path) -> None:
    plan = models.Flux2Transformer2DModel._tp_plan | {"transformer_blocks.*.ff.linear_in": "colwise"}
    write_plan(plan, tmp_path / "plan.json")
    command = ["check", "Flux2Transformer2DModel", "--tp", "4", "--plan", str(tmp_path / "plan.json")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert "transformer_blocks.0.ff.linear_in" in result.output
    assert "transformer_flux2.py:297" in result.output
    assert "blocks" in result.output
    report = json.loads(CliRunner().invoke(main, [*command, "--json"]).output)
    assert report["ok"] is False
    assert {"kind", "module", "plan_key", "source", "message", "fix"} <= report["findings"][0].keys()


def test_command_of_an_unknown_model_exits_with_two() -> None:
    result = CliRunner().invoke(main, ["check", "NoSuchTransformer"])
    assert result.exit_code == 2
    assert "NoSuchTransformer" in result.output


# --- as part of sharding -----------------------------------------------------------------------------------------


def test_wrong_plan_of_a_known_class_is_refused_before_sharding() -> None:
    from shardwise import TensorParallelConfig, enable_parallelism

    plan = family("Flux2Transformer2DModel").PLAN | {"transformer_blocks.*.ff.linear_in": "colwise"}
    model = tiny_model("Flux2Transformer2DModel")
    static = StaticCheck(TensorParallelConfig(tp_degree=2))
    with pytest.raises(PlanError, match=r"ff\.linear_in"):
        static.before(model, resolve(model, plan, 2))
    off = StaticCheck(TensorParallelConfig(tp_degree=2, check=False))
    off.before(model, resolve(model, plan, 2))
    assert off.report is None
    del enable_parallelism


def test_modulation_with_a_plain_row_style_is_found_without_a_forward() -> None:
    finding = only(check_module(Modulation(), {"linear": "rowwise"}, **small_input(Modulation)))
    assert finding.kind == "ShardedInputNeeded"


class Looking(Chain):
    """Takes a mask to the device of its input, and looks into it."""

    def middle(self, x: Tensor) -> Tensor:
        mask = torch.tensor([True, False]).to(x.device)
        return F.gelu(x) if torch.any(mask) else x


def test_mask_that_code_takes_to_the_weights_device_can_be_looked_into() -> None:
    assert check_module(Looking(), PAIR).ok


class Spreading(Chain):
    """Repeats tokens as often as a tensor says, or features."""

    dim = 1

    def middle(self, x: Tensor) -> Tensor:
        size = x.shape[self.dim]
        return F.gelu(x.repeat_interleave(torch.arange(size), self.dim).narrow(self.dim, 0, size))


class SpreadingFeatures(Spreading):
    dim = 2


def test_tokens_may_be_repeated_unequally_and_sharded_features_may_not() -> None:
    assert check_module(Spreading(), PAIR).ok
    finding = check_module(SpreadingFeatures(), PAIR).findings[0]
    assert finding.kind == "LayoutMismatch"
    assert "repeats unequally" in finding.message


class Warned(Chain):
    """Warns in its forward."""

    def middle(self, x: Tensor) -> Tensor:
        warnings.warn("slow", UserWarning, stacklevel=1)
        return F.gelu(x)


def test_warnings_of_a_model_are_left_to_its_own_run() -> None:
    assert check_module(Warned(), PAIR).ok  # a warning is an error in these tests
    with pytest.warns(UserWarning, match="slow"):
        Warned()(torch.ones(3, 7, 16))
