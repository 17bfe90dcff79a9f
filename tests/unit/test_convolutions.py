"""Styles of convolutions: how each cuts one, what it divides and refuses, and what the check says of wrong plans."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import PackedColwiseParallel, PackedDepthwiseParallel, PackedRowwiseParallel, check
from shardwise.errors import PlanError
from shardwise.plan.files import style_from_json, style_to_json
from shardwise.plan.layout import Replicated, Shard
from shardwise.plan.linears import CONVOLUTIONS, LinearStyle, feature_dim
from shardwise.plan.resolve import resolve
from shardwise.plan.style import StyleFault
from shardwise.plan.styles import as_style
from shardwise.runtime.shard import localized_twin, meta_twin
from tests.small_models import Convolutions, small_input

OPEN = [
    "colwise",
    "rowwise",
    "rowwise_split_input",
    PackedColwiseParallel([1, 1]),
    PackedRowwiseParallel([1, 3]),
]
DEPTHWISE = ["depthwise", PackedDepthwiseParallel([1, 1])]


def styled(value: object) -> LinearStyle:
    style = as_style(value)
    assert isinstance(style, LinearStyle)
    return style


def fault_of(style: object, module: nn.Module) -> StyleFault:
    with pytest.raises(StyleFault) as caught:
        styled(style).layouts(module)
    return caught.value


# --- how a convolution is cut ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CONVOLUTIONS)
def test_colwise_cuts_what_a_convolution_gives_and_rowwise_what_it_reads(cls: Any) -> None:
    module, ndim = cls(8, 12, 3), int(cls.__name__[-2]) + 2
    whole = Replicated()
    colwise, rowwise, split = (styled(s) for s in ("colwise", "rowwise", "rowwise_split_input"))
    assert colwise.layouts(module) == {"weight": Shard(0, (12,)), "bias": Shard(0, (12,))}
    assert rowwise.layouts(module) == split.layouts(module) == {"weight": Shard(1, (8,)), "bias": whole}
    assert (colwise.needs(module, ndim), rowwise.needs(module, ndim)) == (whole, Shard(1, (8,)))
    assert split.needs(module, ndim) == rowwise.leaves(module, (3,) * ndim) == whole
    assert colwise.leaves(module, (3,) * ndim) == Shard(1, (12,))
    assert colwise.leaves(module, (3,) * (ndim - 1)) == Shard(0, (12,))  # without a batch
    assert colwise.attributes(module, 4) == {"out_channels": Shard(0, (12,))}
    assert rowwise.attributes(module, 4) == {"in_channels": Shard(1, (8,))}


@pytest.mark.parametrize("cls", CONVOLUTIONS)
def test_depthwise_cuts_filters_with_the_channels_they_read(cls: Any) -> None:
    module, ndim = cls(12, 12, 3, groups=12), int(cls.__name__[-2]) + 2
    for style, blocks in zip(map(styled, DEPTHWISE), ((12,), (6, 6)), strict=True):
        assert style.layouts(module) == {"weight": Shard(0, blocks), "bias": Shard(0, blocks)}
        assert style.needs(module, ndim) == style.leaves(module, (3,) * ndim) == Shard(1, blocks)
        assert style.attributes(module, 2) == dict.fromkeys(
            ("in_channels", "out_channels", "groups"), Shard(0, blocks)
        )
        assert style.sums(module) == 0


def test_features_of_a_linear_are_last_and_those_of_a_convolution_before_its_places() -> None:
    assert [feature_dim(nn.Linear(2, 2), n) for n in (1, 3)] == [0, 2]
    assert [feature_dim(nn.Conv2d(2, 2, 1), n) for n in (3, 4)] == [0, 1]


@pytest.mark.parametrize("style", [*OPEN, *DEPTHWISE], ids=str)
def test_degree_must_divide_each_block_of_channels(style: Any) -> None:
    module = nn.Conv2d(24, 24, 3, groups=24 if style in DEPTHWISE else 1)
    assert not list(styled(style).faults(module, 2))
    faults = list(styled(style).faults(module, 5))
    assert {fault.kind for fault in faults} == {"IndivisibleBlock"}
    assert len(faults) == len(styled(style).shard_of(module).blocks)


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", OPEN, ids=str)
def test_convolution_in_groups_is_refused_and_depthwise_named(style: Any) -> None:
    fault = fault_of(style, nn.Conv2d(24, 24, 3, groups=24))
    assert fault.kind == "GroupedConvolution"
    assert "24 groups" in fault.message
    assert '"depthwise"' in fault.fix


@pytest.mark.parametrize("style", DEPTHWISE, ids=str)
@pytest.mark.parametrize(
    ("module", "what"),
    [
        (nn.Linear(24, 24), "a Linear"),
        (nn.Conv2d(24, 24, 3), "24 to 24 channels in 1 groups"),
        (nn.Conv2d(24, 48, 3, groups=24), "24 to 48 channels in 24 groups"),
        (nn.Conv2d(24, 24, 3, groups=4), "24 to 24 channels in 4 groups"),
    ],
)
def test_what_does_not_filter_each_channel_on_its_own_is_refused(
    style: Any, module: nn.Module, what: str
) -> None:
    fault = fault_of(style, module)
    assert fault.kind == "NotDepthwise"
    assert what in fault.message


class OwnForward(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class OwnProduct(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight * 2, bias)


@pytest.mark.parametrize("style", [*OPEN, *DEPTHWISE], ids=str)
@pytest.mark.parametrize(
    "module", [OwnForward(24, 24, 1), OwnProduct(24, 24, 1), nn.ConvTranspose2d(24, 24, 1)]
)
def test_convolution_that_computes_in_another_way_is_refused(style: Any, module: nn.Module) -> None:
    assert fault_of(style, module).kind == "NotALinear"


def test_cut_across_the_blocks_that_a_model_declares_names_the_style_to_use() -> None:
    module = nn.Conv2d(24, 24, 3, groups=24)
    vars(module)["_tp_packed_col_blocks"] = [8, 16]
    fault = fault_of("depthwise", module)
    assert (fault.kind, fault.fix) == ("PackedWeight", "use PackedDepthwiseParallel() without blocks")
    assert styled(PackedDepthwiseParallel()).shard_of(module).blocks == (8, 16)


@pytest.mark.parametrize("style", DEPTHWISE, ids=str)
def test_style_is_the_same_after_it_was_written_to_a_file(style: Any) -> None:
    assert as_style(style_from_json(style_to_json(as_style(style)))) == as_style(style)


# --- on a rank ---------------------------------------------------------------------------------------------------


def local(degree: int = 2) -> Any:
    whole = meta_twin(Convolutions())
    return localized_twin(whole, resolve(whole, Convolutions._tp_plan, degree))[0]


def test_convolutions_of_a_rank_are_convolutions_of_local_size() -> None:
    model = local()
    for name, text in {
        "up": "ColwiseConv2d(8, 12, kernel_size=(1, 1), stride=(1, 1), shard(dim 0, blocks 12+12), rank 0 of 2)",
        "depth": "DepthwiseConv2d(12, 12, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), groups=12, "
        "shard(dim 0, blocks 12+12), rank 0 of 2)",
        "down": "RowwiseConv2d(6, 8, kernel_size=(1, 1), stride=(1, 1), shard(dim 1), rank 0 of 2)",
    }.items():
        assert isinstance(model.get_submodule(name), nn.Conv2d)
        assert repr(model.get_submodule(name)) == text
    assert set(model.state_dict()) == set(Convolutions().state_dict())


def test_class_of_a_local_convolution_can_be_pickled_and_copied() -> None:
    depth = local().depth
    assert pickle.loads(pickle.dumps(type(depth))) is type(copy.deepcopy(depth)) is type(depth)


@pytest.mark.parametrize(("name", "channels", "kind"), [("down", 12, "Sharded"), ("along", 4, "Whole")])
def test_input_of_another_number_of_channels_is_named(name: str, channels: int, kind: str) -> None:
    with pytest.raises(PlanError) as caught:
        local().get_submodule(name)(torch.ones(3, channels, 5, 7, device="meta"))
    (finding,) = caught.value.findings
    assert (finding.kind, finding.module) == (f"{kind}InputNeeded", name)
    assert f"got {channels}" in finding.message


# --- what the check says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [2, 4])
def test_convolutions_are_right(degree: int) -> None:
    report = check(Convolutions(), degree=degree, example_inputs=small_input(Convolutions))
    assert report.ok, str(report)
    assert report.all_reduces == 2


@pytest.mark.parametrize(
    ("change", "kind", "place"),
    [
        ({"up": "colwise"}, "BlocksDiffer", "depth"),
        ({"up": "colwise", "depth": "depthwise"}, "LayoutMismatch", ""),
        ({"up": None}, "ShardedInputNeeded", "depth"),
        ({"depth": None}, "LayoutMismatch", "depth"),
        ({"depth": "depthwise"}, "BlocksDiffer", "depth"),
        ({"down": "rowwise_split_input"}, "WholeInputNeeded", "down"),
        ({"down": None}, "LayoutMismatch", "down"),
        ({"along": "rowwise"}, "ShardedInputNeeded", "along"),
        ({"along": "colwise"}, "LayoutMismatch", ""),
    ],
)
def test_wrong_plan_of_convolutions_is_found(change: dict[str, Any], kind: str, place: str) -> None:
    plan = {key: style for key, style in {**Convolutions._tp_plan, **change}.items() if style}
    report = check(Convolutions(), degree=2, plan=plan, example_inputs=small_input(Convolutions))
    assert (kind, place) in {(finding.kind, finding.module) for finding in report.findings}, str(report)
