"""Styles beside those of Linears, without ranks: norms over all heads, sliced outputs, optional entries, own blocks."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm
from torch import nn

from shardwise import (
    IfPresent,
    PackedColwiseParallel,
    PackedRowwiseParallel,
    SliceOutput,
    SliceParameter,
    check,
)
from shardwise.errors import ConfigError, PlanError
from shardwise.models.families.hunyuan_video import attention_and_mlp
from shardwise.plan.layout import Replicated, Shard
from shardwise.plan.resolve import resolve
from shardwise.plan.styles import AcrossHeadNorm, ColwiseParallel, GatherOutput, Style, StyleFault, as_style
from shardwise.runtime.group import CountingGroup
from shardwise.runtime.modules import LOCAL_CLASSES, OutputGather, OutputSlice
from shardwise.runtime.norms import LocalNorm
from tests.small_models import Gated, small_input
from tests.unit.test_heads import QKV, Attention

# ---------------------------------------------------------------- norms over all heads


class RMSNorm(nn.Module):
    """Of the right name, and of a formula that is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps, self.dim = nn.Parameter(nn.Linear(1, 12).weight[:, 0]), 1e-5, (12,)


class OwnForward(nn.RMSNorm):
    def forward(self, x):
        return super().forward(x) * 2


class Renamed(nn.RMSNorm):
    pass


KNOWN = {
    "torch": nn.RMSNorm(12),
    "renamed": Renamed(12),
    "torch_without_weight": nn.RMSNorm(12, elementwise_affine=False),
    "torch_layer": nn.LayerNorm(12),
    "diffusers": DiffusersRMSNorm(12, 1e-5),
    "diffusers_with_bias": DiffusersRMSNorm(12, 1e-5, bias=True),
    "diffusers_without_weight": DiffusersRMSNorm(12, 1e-5, elementwise_affine=False),
}


@pytest.mark.parametrize("norm", KNOWN.values(), ids=list(KNOWN))
def test_norm_over_all_heads_cuts_whatever_parameters_there_are(norm: nn.Module) -> None:
    expected = {name: Shard(0, (12,)) for name, _ in norm.named_parameters()}
    assert AcrossHeadNorm().layouts(norm) == expected


@pytest.mark.parametrize("norm", KNOWN.values(), ids=list(KNOWN))
def test_norm_over_all_heads_needs_and_leaves_sharded_features(norm: nn.Module) -> None:
    style = AcrossHeadNorm()
    assert style.needs(norm, 3) == Shard(2, (12,))
    assert style.leaves(norm, (5, 7, 12)) == Shard(2, (12,))
    assert style.leaves_shard
    assert not style.attributes(norm, 2)


@pytest.mark.parametrize("norm", KNOWN.values(), ids=list(KNOWN))
def test_E5_norm_whose_width_the_degree_does_not_divide_names_those_that_do(norm: nn.Module) -> None:
    assert not list(AcrossHeadNorm().faults(norm, 4))
    (fault,) = AcrossHeadNorm().faults(norm, 5)
    assert fault.kind == "IndivisibleNorm"
    assert "12 is not divisible by tp_degree 5" in str(fault)
    assert fault.fix.endswith(": 1, 2, 3, 4, 6, 12")


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm((3, 12)),
        nn.Linear(12, 12),
        nn.RMSNorm((3, 12)),
        DiffusersRMSNorm((3, 12), 1e-5),
        RMSNorm(),
        OwnForward(12),
    ],
    ids=lambda module: type(module).__name__,
)
def test_norm_over_all_heads_refuses_what_has_no_known_formula(module: nn.Module) -> None:
    with pytest.raises(StyleFault) as caught:
        AcrossHeadNorm().layouts(module)
    assert caught.value.kind == "NotAKnownNorm"
    assert type(module).__name__ in str(caught.value)
    assert '"across_head_norm"' in str(caught.value)


def test_norm_over_all_heads_is_known_by_its_name() -> None:
    assert as_style("across_head_norm") == AcrossHeadNorm()
    assert LOCAL_CLASSES[AcrossHeadNorm] is LocalNorm


# ---------------------------------------------------------------- sliced parameters


GATED, GATED_INPUT = Gated._tp_plan, small_input(Gated)


def test_sliced_parameter_is_cut_like_any_other_tensor() -> None:
    resolved = resolve(Gated(), GATED, 2)
    assert resolved.layouts["gate"] == Shard(0, (4,))
    assert check(Gated(), GATED, example_inputs=GATED_INPUT).ok


def test_parameter_that_meets_heads_uncut_is_found() -> None:
    rest = {key: style for key, style in GATED.items() if key}
    (finding,) = check(Gated(), rest, example_inputs=GATED_INPUT).findings
    assert (finding.kind, finding.source.partition(":")[0]) == ("LayoutMismatch", "small_models.py")


def test_parameter_that_is_cut_and_meets_whole_heads_is_found() -> None:
    (finding,) = check(Gated(), {"": GATED[""]}, example_inputs=GATED_INPUT).findings
    assert finding.kind == "LayoutMismatch"


@pytest.mark.parametrize(("name", "dim"), [("gates", 0), ("gate", 1), ("gate", -2)])
def test_slice_of_a_parameter_that_is_not_there_names_those_that_are(name: str, dim: int) -> None:
    with pytest.raises(StyleFault) as caught:
        SliceParameter(name, dim).layouts(Gated())
    assert caught.value.kind == "NoSuchParameter"
    assert "gate [4]" in caught.value.fix


def test_E5_parameter_that_the_degree_does_not_divide_names_the_degrees_that_do() -> None:
    with pytest.raises(PlanError) as caught:
        resolve(Gated(), GATED, 3)
    assert "IndivisibleParameter" in {finding.kind for finding in caught.value.findings}
    assert caught.value.degrees == (1, 2, 4)


def test_attention_whose_own_parameter_is_sliced_still_divides_its_heads() -> None:
    attn = Attention(heads=8)
    attn.gate = nn.Parameter(torch.ones(8))
    root = nn.Module()
    root.attn = attn
    resolved = resolve(root, {**QKV, "attn": SliceParameter("gate", 0)}, 2)
    assert {"heads": 4} in [m.values(0, 2) for m in resolved.modules]
    assert resolved.layouts["attn.gate"] == Shard(0, (8,))


# ---------------------------------------------------------------- sliced outputs


def test_sliced_output_leaves_its_dim_sharded_and_everything_else_alone() -> None:
    module = nn.Linear(4, 4)
    assert SliceOutput(-1).layouts(module) == {}
    assert SliceOutput(-1).needs(module, 3) is None
    assert SliceOutput(-1).leaves(module, (5, 7, 12)) == Shard(2, (12,))
    assert SliceOutput(1).leaves(module, (5, 8, 12)) == Shard(1, (8,))
    assert SliceOutput(-1).leaves_shard
    assert SliceOutput(-1).label == "SliceOutput(-1)"
    assert LOCAL_CLASSES[SliceOutput] is OutputSlice


@pytest.mark.parametrize("dim", [3, -4])
def test_sliced_output_without_the_dim_is_a_fault(dim: int) -> None:
    with pytest.raises(StyleFault) as caught:
        SliceOutput(dim).leaves(nn.Identity(), (5, 7, 12))
    assert caught.value.kind == "NoSuchDim"
    assert str(dim) in str(caught.value)


@pytest.mark.parametrize("dim", [None, "1", 1.0, True, (1,)])
def test_sliced_dim_must_be_an_integer(dim: object) -> None:
    with pytest.raises(ConfigError, match=r"^SliceOutput: dim must be an integer"):
        SliceOutput(dim)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)


class Rotary(nn.Module):
    """A table beside attention-like Linears; the model itself counts heads, which a sliced table does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.rope, self.other = 3, nn.Identity(), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))


def test_sliced_output_divides_no_heads_of_the_module_around_it() -> None:
    resolved = resolve(Rotary(), {"rope": SliceOutput(-1), "blocks.*.up": "colwise"}, 2)
    assert {m.path for m in resolved.modules} == {"rope", "blocks.0.up", "blocks.1.up"}


# ---------------------------------------------------------------- outputs that are put together


def test_gathered_output_leaves_everything_whole_and_takes_a_plain_cut_of_the_last_dim() -> None:
    style, module = GatherOutput(12), nn.Linear(4, 4)
    assert style.layouts(module) == {}
    assert style.needs(module, 3) is None
    assert style.takes(3) == (Replicated(), Shard(2, (12,)))
    assert style.leaves(module, (5, 7, 12)) == Replicated()
    assert style.gathers
    assert not style.opaque
    assert not style.leaves_shard
    assert LOCAL_CLASSES[GatherOutput] is OutputGather


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_gathering_lays_a_slice_into_zeros_and_leaves_what_is_whole(rank: int) -> None:
    gather = OutputGather(Shard(0, (12,)), CountingGroup(4, rank))
    piece, whole, other = torch.ones(2, 3), torch.ones(2, 12), torch.ones(2, 5)
    gathered, *kept, inner = gather(nn.Identity(), (), (piece, whole, other, None, [piece]))
    assert gathered.shape == (2, 12)
    assert gathered.nonzero()[:, 1].unique().tolist() == [3 * rank, 3 * rank + 1, 3 * rank + 2]
    assert all(a is b for a, b in zip(kept, (whole, other, None), strict=True))
    assert inner[0].shape == (2, 12)
    assert gather.group.traffic.all_reduces == 2


# ---------------------------------------------------------------- optional entries


@pytest.mark.parametrize("key", ["blocks.*.down", "refiner.*.up", "down"])
def test_optional_entry_may_match_nothing(key: str) -> None:
    resolved = resolve(Rotary(), {"blocks.*.up": "colwise", key: IfPresent("rowwise")}, 2)
    assert {m.plan_key for m in resolved.modules} == {"blocks.*.up"}


@pytest.mark.parametrize("key", ["blocks.*.down", "refiner.*.up", "down"])
def test_entry_that_is_not_optional_must_match_something(key: str) -> None:
    with pytest.raises(PlanError) as caught:
        resolve(Rotary(), {"blocks.*.up": "colwise", key: "rowwise"}, 2)
    assert [finding.kind for finding in caught.value.findings] == ["UnmatchedKey"]


def test_optional_entry_that_matches_is_as_any_other() -> None:
    resolved = resolve(Rotary(), {"blocks.*.up": IfPresent("colwise")}, 2)
    assert {m.style for m in resolved.modules} == {ColwiseParallel()}
    assert resolved.layout("blocks.1.up.weight") == Shard(0, (16,))


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("blocks.*.down", IfPresent("colwize"), "UnknownStyle"),
        ("blocks.*.*", IfPresent("colwise"), "TwoWildcards"),
        ("rope.*.up", IfPresent("colwise"), "NotAModuleList"),
        ("rope", IfPresent("colwise"), "NotALinear"),
    ],
)
def test_optional_entry_is_checked_in_every_other_way(key: str, value: object, kind: str) -> None:
    with pytest.raises(PlanError) as caught:
        resolve(Rotary(), {"blocks.*.up": "colwise", key: value}, 2)
    assert [finding.kind for finding in caught.value.findings] == [kind]


def test_plan_of_optional_entries_that_match_nothing_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        resolve(Rotary(), {"down": IfPresent("rowwise")}, 2)
    assert [finding.kind for finding in caught.value.findings] == ["NothingSharded"]


# ---------------------------------------------------------------- blocks that follow the config


def halves(linear: nn.Linear) -> list[int]:
    return [linear.out_features // 2] * 2


@pytest.mark.parametrize("mlp", [8, 20, 36])
def test_P9_blocks_may_be_a_function_of_the_linear(mlp: int) -> None:
    style = PackedRowwiseParallel(attention_and_mlp)
    assert style.layouts(nn.Linear(12 + mlp, 12))["weight"] == Shard(1, (12, mlp))
    assert style.label == "PackedRowwiseParallel(attention_and_mlp)"
    assert PackedColwiseParallel(halves).shard_of(nn.Linear(4, 10)) == Shard(0, (5, 5))


@pytest.mark.parametrize("blocks", [[], [0, 4], [-4, 16], None, 3, [1.0]])
def test_P9_function_that_gives_no_blocks_is_a_fault(blocks: object) -> None:
    style: Style = PackedRowwiseParallel(lambda linear: blocks)
    with pytest.raises(StyleFault) as caught:
        style.layouts(nn.Linear(12, 12))
    assert caught.value.kind == "BadBlocks"
    assert repr(blocks) in str(caught.value)


def test_P8_function_of_the_linear_must_keep_declared_borders() -> None:
    linear = nn.Linear(12, 12)
    linear._tp_packed_row_blocks = [4, 8]
    with pytest.raises(StyleFault) as caught:
        PackedRowwiseParallel(halves).layouts(linear)
    assert caught.value.kind == "PackedWeight"
