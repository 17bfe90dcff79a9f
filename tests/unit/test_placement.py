"""The placement report: what is held where, counted from the tensors, printable and plain as data."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import TensorParallelConfig, placement
from shardwise.plan.layout import Replicated, Shard
from shardwise.plan.resolve import resolve
from shardwise.plan.styles import PackedColwiseParallel
from shardwise.runtime.group import CountingGroup
from shardwise.runtime.placement import Placement, TensorPlacement, _place
from shardwise.runtime.shard import assign, global_shapes, local_slice, localize, named_tensors

PLAN = {"up": PackedColwiseParallel([1, 3]), "down": "rowwise"}
CPU = torch.device("cpu")
UP, DOWN, NORM = 8 * 4 + 8, 4 * 8 + 4, 2 * 4
"""Numbers in the parameters of each module of `Model`."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("table", torch.zeros(5), persistent=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


def sharded(rank: int = 1, degree: int = 2) -> Model:
    """Return a rank's part of a `Model`; the group knows the rank and only counts."""
    model, group = Model(), CountingGroup(degree, rank)
    plan, shapes = resolve(model, PLAN, degree), global_shapes(model)
    pieces = {
        name: local_slice(t.detach(), plan.layout(name), rank, degree) for name, t in named_tensors(model)
    }
    parameters = dict(model.named_parameters())
    assign(model, {name: nn.Parameter(t) if name in parameters else t for name, t in pieces.items()})
    localize(model, TensorParallelConfig(degree), plan, group, shapes)
    return model


def row(report: Placement, name: str) -> Any:
    (found,) = (tensor for tensor in report.tensors if tensor.name == name)
    return found


# ---------------------------------------------------------------- ordinary models


def test_ordinary_model_is_whole_and_replicated_at_degree_1() -> None:
    report = placement(Model())
    assert (report.model, report.tp_degree, report.rank) == ("Model", 1, 0)
    assert all(tensor.layout == Replicated() for tensor in report.tensors)
    assert all(tensor.local_shape == tensor.global_shape for tensor in report.tensors)
    assert report.replicated_share == 1.0


def test_report_lists_every_parameter_and_buffer_as_it_is() -> None:
    model, report = Model(), placement(Model())
    assert {(t.name, t.kind) for t in report.tensors} == {
        *((name, "parameter") for name, _ in model.named_parameters()),
        *((name, "buffer") for name, _ in model.named_buffers()),
    }
    for name, tensor in named_tensors(model):
        found = row(report, name)
        assert (found.dtype, found.device, found.local_shape) == (tensor.dtype, tensor.device, tensor.shape)
        assert found.bytes == found.global_bytes == tensor.nbytes


def test_weight_bytes_count_parameters_in_their_own_dtype_and_no_buffers() -> None:
    report = placement(Model())
    assert report.weight_bytes == report.weight_bytes_one_process == 4 * UP + 2 * DOWN + 4 * NORM


def test_tied_weight_is_listed_and_counted_once() -> None:
    report = placement(Tied())
    assert [tensor.name for tensor in report.tensors] == ["embedding.weight"]
    assert report.weight_bytes == 4 * 8 * 4


@pytest.mark.parametrize("model", [nn.Identity(), nn.BatchNorm1d(3, affine=False)])
def test_model_without_parameters_has_a_report_of_zero_bytes(model: nn.Module) -> None:
    report = placement(model)
    assert (report.weight_bytes, report.replicated_bytes, report.replicated_share) == (0, 0, 0.0)
    assert str(report).startswith(f"{type(model).__name__}, rank 0 of 1")


def test_model_without_data_is_reported_where_it_is() -> None:
    with torch.device("meta"):
        report = placement(nn.Linear(4, 8))
    assert {str(tensor.device) for tensor in report.tensors} == {"meta"}
    assert report.weight_bytes == 4 * (4 * 8 + 8)


# ---------------------------------------------------------------- sharded models


@pytest.mark.parametrize("rank", [0, 1])
def test_L4_sharded_model_holds_its_share_of_what_is_planned(rank: int) -> None:
    report = placement(sharded(rank))
    assert (report.tp_degree, report.rank) == (2, rank)
    assert report.weight_bytes == 4 * UP // 2 + 2 * (4 * 8 // 2 + 4) + 4 * NORM
    assert report.weight_bytes_one_process == placement(Model()).weight_bytes
    assert report.replicated_bytes == 2 * 4 + 4 * NORM  # the rowwise bias, and the norm
    assert report.replicated_share == report.replicated_bytes / report.weight_bytes


@pytest.mark.parametrize(
    ("name", "layout", "local", "whole"),
    [
        ("up.weight", Shard(0, (2, 6)), (4, 4), (8, 4)),
        ("up.bias", Shard(0, (2, 6)), (4,), (8,)),
        ("down.weight", Shard(1, (8,)), (4, 4), (4, 8)),
        ("down.bias", Replicated(), (4,), (4,)),
        ("norm.weight", Replicated(), (4,), (4,)),
        ("table", Replicated(), (5,), (5,)),
    ],
)
def test_tensor_of_a_sharded_model_has_its_layout_and_both_shapes(
    name: str, layout: object, local: tuple[int, ...], whole: tuple[int, ...]
) -> None:
    found = row(placement(sharded()), name)
    assert (found.layout, found.local_shape, found.global_shape) == (layout, local, whole)


def test_whole_tensor_of_which_a_rank_has_one_row_is_counted_whole() -> None:
    one = TensorPlacement("x", "parameter", Shard(0, (4,)), torch.float32, CPU, (1, 6), (4, 6), 24, 96)
    assert _place("x", nn.Parameter(torch.zeros(1, 6)), one.layout, (4, 6)) == one


def test_sharded_part_of_an_ordinary_model_is_reported_under_its_path() -> None:
    report = placement(nn.ModuleDict({"transformer": sharded(), "other": nn.Linear(4, 4)}))
    assert (report.model, report.tp_degree, report.rank) == ("ModuleDict", 2, 1)
    assert row(report, "transformer.up.weight").global_shape == (8, 4)
    assert row(report, "transformer.down.weight").layout == Shard(1, (8,))
    assert row(report, "other.weight").layout == Replicated()


def test_report_counts_what_is_held_even_where_the_plan_says_otherwise() -> None:
    model = sharded()
    model.up.weight = nn.Parameter(torch.zeros(8, 4))
    assert placement(model).weight_bytes == placement(sharded()).weight_bytes + 4 * 4 * 4


# ---------------------------------------------------------------- data and print


@pytest.mark.parametrize("build", [Model, Tied, sharded, nn.Identity])
def test_as_dict_is_json_and_comes_back_equal(build: Callable[[], nn.Module]) -> None:
    report = placement(build())
    data = report.as_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert len(data["tensors"]) == len(report.tensors)


def test_as_dict_says_what_the_report_says() -> None:
    report = placement(sharded())
    data = report.as_dict()
    for name in (
        "model",
        "tp_degree",
        "rank",
        "weight_bytes",
        "weight_bytes_one_process",
        "replicated_share",
    ):
        assert data[name] == getattr(report, name)
    rows = {found["name"]: found for found in data["tensors"]}
    assert rows["up.weight"] == {
        "name": "up.weight",
        "kind": "parameter",
        "layout": "shard",
        "dim": 0,
        "blocks": [2, 6],
        "local_shape": [4, 4],
        "global_shape": [8, 4],
        "dtype": "float32",
        "device": "cpu",
        "bytes": 64,
        "global_bytes": 128,
    }
    assert (rows["mean"]["kind"], rows["mean"]["layout"]) == ("buffer", "replicated")
    assert (rows["mean"]["dim"], rows["mean"]["blocks"]) == (None, None)


def test_print_shows_a_line_for_each_tensor_between_headline_and_totals() -> None:
    report = placement(sharded())
    first, *lines, last = str(report).splitlines()
    assert first == "Model, rank 1 of 2"
    assert [line.split()[0] for line in lines] == [tensor.name for tensor in report.tensors]
    assert lines[0].endswith(" shard(dim 0, blocks 2+6)")
    assert "4x4 of 8x4" in lines[0]
    assert " of " not in next(line for line in lines if line.startswith("norm.weight"))
    assert "bfloat16" in str(report)
    assert last == "this rank 0.00 MiB of 0.00 MiB, 26.3% of it replicated"


def test_print_gives_the_totals_in_mebibytes() -> None:
    text = str(placement(nn.Linear(1024, 640, bias=False)))
    assert text.splitlines()[-1] == "this rank 2.50 MiB of 2.50 MiB, 100.0% of it replicated"


def test_print_aligns_its_columns() -> None:
    lines = str(placement(sharded())).splitlines()[1:-1]
    starts = {max(line.find(word) for word in ("shard(", "replicated")) for line in lines}
    assert len(starts) == 1
