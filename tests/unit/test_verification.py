"""The parts of a verification that need no ranks: errors, bounds, reports, the strip, what is made for a class."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from shardwise import demo_model_path
from shardwise.errors import CheckpointError, UnsupportedOption
from shardwise.verification import ModuleError, VerifyReport
from shardwise.verification.bound import HALF, products, relative_error, rounding_bound
from shardwise.verification.checkpoint import Checkpoint
from shardwise.verification.compare import Call, Trio, compare, watch, worst
from shardwise.verification.plot import draw_strip
from shardwise.verification.rounding import unrounded
from shardwise.verification.run import cast, main_dtype, tiny_model
from tests import tolerances
from tests.helpers import FAMILIES, Routes, family
from tests.small_models import Mlp, small_input

ROWS = (
    ModuleError("blocks.0.norm", "LayerNorm", 0.0, 1e-6),
    ModuleError("blocks.0.attn", "Attention", 2e-7, 1e-5),
    ModuleError("blocks.0", "Block", 3e-7, 2e-5),
    ModuleError("", "Model", 4e-7, 3e-5),
)
REPORT = VerifyReport("Model", 2, "float32", "cpu", ROWS, 0.5)


def broken(**changes: object) -> VerifyReport:
    """Return the report with another row for the attention."""
    return replace(REPORT, modules=(ROWS[0], replace(ROWS[1], **changes), *ROWS[2:]))


# --- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 3.0], [1.0, 4.0], 0.25),
        ([nan, 1.0], [nan, 1.0], 0.0),
        ([-inf, 1.0], [-inf, 1.0], 0.0),
        ([-inf, 3.0], [-inf, 4.0], 0.25),
        ([nan, 1.0], [0.0, 1.0], inf),
        ([0.0, 1.0], [nan, 1.0], inf),
        ([inf, 1.0], [-inf, 1.0], inf),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 1e-9], [0.0, 0.0], inf),
        ([1 + 1j, 0], [1 + 2j, 0], 0.5),
        ([1, 2], [1, 2], 0.0),
        ([1, 2], [1, 3], inf),
        ([True], [False], inf),
        ([], [], 0.0),
        ([1.0], [[1.0]], inf),
    ],
)
def test_error_is_relative_to_the_largest_value(
    actual: list[float], expected: list[float], error: float
) -> None:
    assert relative_error(torch.tensor(actual), torch.tensor(expected))[0] == error


def test_error_of_several_outputs_is_the_worst_of_them() -> None:
    ones = torch.ones(2)
    assert relative_error((ones, {"a": ones * 2}, None), (ones, {"a": ones * 4}, None))[0] == 0.5
    assert relative_error((ones,), (ones, ones)) == (inf, "1 output tensors instead of 2")
    assert relative_error(3, 4) == (0.0, "")


# --- bound ------------------------------------------------------------------------------------------------------


def test_bound_grows_with_width_degree_and_dtype() -> None:
    small, large = nn.Linear(64, 8), nn.Linear(6400, 8)
    base = rounding_bound(small, torch.float32, 2, None)
    assert rounding_bound(large, torch.float32, 2, None) > base
    assert rounding_bound(small, torch.float32, 4, None) > base
    assert rounding_bound(small, torch.float64, 2, None) == base  # models compute norms in fp32 all the same
    assert (
        rounding_bound(small, torch.bfloat16, 2, 0.01) > rounding_bound(small, torch.float16, 2, 0.01) > base
    )


def test_bound_counts_the_products_of_every_weight() -> None:
    module = nn.Sequential(nn.Linear(8, 3), nn.Conv2d(4, 5, 3), nn.LayerNorm(8))
    assert products(module) == 8 + 4 * 3 * 3
    assert products(nn.Linear(8, 3, device="meta")) == 8


def test_bound_of_a_block_of_released_size_stays_below_a_mistake() -> None:
    widths = [6144] * 8 + [18432] * 2
    block = nn.ModuleList(nn.Linear(width, 1, device="meta") for width in widths)
    assert rounding_bound(block, torch.float32, 8, None) < tolerances.MISTAKE


# --- calls ------------------------------------------------------------------------------------------------------


class _Half(nn.Module):
    """Calls two children; the second writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Identity()

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        y = self.second(self.first(x))
        return y.mul_(scale)


def test_modules_are_compared_children_first_with_the_input_they_had() -> None:
    whole, other = _Half(), _Half()
    other.load_state_dict(whole.state_dict())
    call = Call((torch.randn(3, 4),), {"scale": 2.0})
    rows = compare(Trio("block", whole, other, None, torch.float32, 2), call)
    assert [row.path for row in rows] == ["block.first", "block.second", "block"]
    assert {row.error for row in rows} == {0.0}
    with torch.no_grad():
        other.first.bias += 1
    rows = compare(Trio("block", whole, other, None, torch.float32, 2), call)
    assert [row.path for row in rows if not row.ok] == ["block.first", "block"]


class _Noisy(nn.Module):
    """Draws twice, in a child and after it, and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Call:
        return Call((self.inner(x) + torch.randn(x.shape),), {})


def test_modules_that_draw_random_numbers_draw_the_same() -> None:
    rows = compare(Trio("", _Noisy(), _Noisy(), None, torch.float32, 2), Call((torch.ones(3, 4),), {}))
    assert [(row.path, row.error) for row in rows] == [("inner", 0.0), ("", 0.0)]


def test_tensors_in_a_dataclass_are_compared() -> None:
    one, two = (Call((torch.full((2,), value),), {}, torch.zeros(1)) for value in (1.0, 2.0))
    assert relative_error(one, two)[0] == 0.5
    assert relative_error(one, one)[0] == 0.0


def test_module_without_a_tensor_in_its_output_is_no_row() -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> str:
            return "a name"

    assert compare(Trio("", Named(), Named(), None, torch.float32, 2), Call((torch.ones(2),), {})) == []


def test_folder_of_a_pipeline_stands_for_its_transformer(tmp_path: Path) -> None:
    found = Checkpoint.find(str(demo_model_path()), None)
    assert (found.subfolder, found.model_class.__name__) == ("transformer", "Flux2Transformer2DModel")
    assert Checkpoint.find(str(demo_model_path() / "transformer"), None).subfolder is None
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="does not say which class"):
        Checkpoint.find(str(tmp_path), None)


def test_module_that_sees_a_slice_is_not_compared() -> None:
    whole, other = Mlp(), Mlp()
    other.load_state_dict(whole.state_dict())
    for name in ("weight", "bias"):
        vars(other.up)["_parameters"][name] = nn.Parameter(getattr(whole.up, name)[:8])
    other.down.weight = nn.Parameter(whole.down.weight[:, :8])
    rows = compare(Trio("", whole, other, None, torch.float32, 2), Call((), small_input(Mlp)))
    assert [row.path for row in rows] == ["norm", ""]
    assert [row.ok for row in rows] == [True, False]


def test_reference_that_raises_is_no_row() -> None:
    with pytest.raises(RuntimeError, match="normalized_shape"):
        compare(Trio("", Mlp(), Mlp(), None, torch.float32, 2), Call((torch.ones(3, 9),), {}))


def test_hooks_are_gone_after_an_error() -> None:
    model = Mlp()
    with pytest.raises(ValueError, match="stop"), watch(model, lambda *args: None):
        raise ValueError("stop")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_call_in_fp32_takes_dtypes_that_are_named_along() -> None:
    half = torch.ones(2, dtype=torch.bfloat16)
    call = Call((half, torch.ones(1, dtype=torch.float64), 3), {"dtype": torch.bfloat16}).widened(
        torch.bfloat16
    )
    assert [call.args[0].dtype, call.args[1].dtype, call.kwargs["dtype"]] == [
        torch.float32,
        torch.float64,
        torch.float32,
    ]


# --- what is made of a class ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_random_weights_are_none_of_them_zero_and_seeded(name: str) -> None:
    cls = getattr(family(name), name)
    models = [tiny_model(cls, seed) for seed in (0, 0, 1)]
    for a, b, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, other)
        assert a.count_nonzero() == a.numel()


def test_cast_leaves_what_is_kept_in_fp32_and_integers() -> None:
    model = Mlp()
    model._keep_in_fp32_modules = ["norm"]
    model.register_buffer("steps", torch.arange(3))
    cast(model, None)
    assert main_dtype(model) == torch.float32
    cast(model, torch.bfloat16)
    assert main_dtype(model) == torch.bfloat16
    assert (model.norm.weight.dtype, model.up.weight.dtype) == (torch.float32, torch.bfloat16)
    assert model.steps.dtype == torch.int64


# --- reports ----------------------------------------------------------------------------------------------------


def test_report_of_equal_modules_is_ok() -> None:
    assert (REPORT.ok, REPORT.first) == (True, None)
    assert "equal up to rounding; 4 modules" in str(REPORT)
    assert "(the model itself)" in str(REPORT)


@pytest.mark.parametrize("error", [1e-4, inf, nan])
def test_report_names_the_first_module_that_diverges(error: float) -> None:
    report = broken(error=error)
    assert (report.ok, report.first) == (False, "blocks.0.attn")
    assert "1 modules DIVERGE" in str(report)
    assert "first: blocks.0.attn" in str(report)


def test_report_of_nothing_is_not_ok() -> None:
    report = replace(REPORT, modules=())
    assert (report.ok, report.first) == (False, None)
    assert "NOTHING COMPARED" in str(report)


def test_report_is_plain_data() -> None:
    data = json.loads(json.dumps(broken(error=inf, note="ValueError: no").as_dict(), allow_nan=False))
    assert (data["ok"], data["first"], data["tp_degree"]) == (False, "blocks.0.attn", 2)
    assert data["modules"][1] == {
        "path": "blocks.0.attn",
        "kind": "Attention",
        "error": None,
        "bound": 1e-5,
        "one_process": None,
        "rank": 0,
        "ok": False,
        "note": "ValueError: no",
    }


def test_report_shows_ten_of_many_and_counts_the_rest() -> None:
    rows = tuple(ModuleError(f"blocks.{i}", "Block", 1.0, 1e-5) for i in range(14))
    assert str(replace(REPORT, modules=rows)).count("blocks.") == 11
    assert "and 4 more" in str(replace(REPORT, modules=rows))


def test_worst_call_on_the_worst_rank_is_kept_in_the_order_of_execution() -> None:
    a, b = ModuleError("a", "A", 1e-7, 1e-5), ModuleError("b", "B", 1e-7, 1e-5)
    found = worst([[a, b, replace(a, error=2e-7)], [a, replace(b, error=nan)]])
    assert [(row.path, row.rank) for row in found] == [("a", 0), ("b", 1)]
    assert found[0].error == 2e-7
    assert not found[1].ok


# --- the strip ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "report",
    [
        REPORT,
        broken(error=0.5),
        broken(error=inf),
        broken(error=nan),
        replace(REPORT, modules=()),
        replace(REPORT, modules=ROWS[:1]),
        replace(REPORT, modules=tuple(replace(row, one_process=1e-7) for row in ROWS)),
        replace(
            REPORT, modules=tuple(replace(ROWS[1], path=f"blocks.{i // 9}.m{i % 9}") for i in range(900))
        ),
    ],
    ids=["right", "wrong", "infinite", "nan", "empty", "exact", "half", "long"],
)
def test_strip_is_drawn_of_any_report(report: VerifyReport, tmp_path: Path) -> None:
    draw_strip(report, tmp_path / "strip.png")
    with Image.open(tmp_path / "strip.png") as picture:
        assert picture.size == (1650, 540)
        colors = {color for _, color in picture.convert("RGB").getcolors(100_000)}
    assert ((0xC8, 0x37, 0x2D) in colors) == (report.first is not None)


def test_strip_needs_matplotlib_and_says_so(tmp_path: Path) -> None:
    with (
        mock.patch("shardwise.verification.plot.find_spec", return_value=None),
        pytest.raises(UnsupportedOption, match=r"shardwise\[plot\]"),
    ):
        draw_strip(REPORT, tmp_path / "strip.png")
    assert not list(tmp_path.iterdir())


def test_forward_with_the_routes_of_another_chooses_as_it_did_and_weighs_by_its_own_scores() -> None:
    scores, other = torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([[6.0, 4.0, 5.0]])
    routes = Routes()
    with routes:
        scores.topk(2)
    with routes.again():
        values, indices = torch.topk(other, 2, dim=-1)
    assert indices.tolist() == [[1, 2]]
    assert values.tolist() == [[4.0, 5.0]]
    assert routes.all_taken()
    routes.again()
    assert not routes.all_taken()


ROUNDING = {
    "to": lambda x: x.to(torch.bfloat16),
    "to_by_name": lambda x: x.to(dtype=torch.bfloat16),
    "to_a_device_too": lambda x: x.to("cpu", torch.float16),
    "bfloat16": lambda x: x.bfloat16(),
    "half": lambda x: x.half(),
    "type": lambda x: x.type(torch.bfloat16),
}


@pytest.mark.parametrize("cast", ROUNDING.values(), ids=ROUNDING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_of_a_models_own_is_left_out_but_in_half_precision(cast: Any, dtype: torch.dtype) -> None:
    x = torch.randn(5, dtype=dtype)
    with unrounded(dtype):
        assert torch.equal(cast(x), x)
        assert cast(x).dtype == dtype
        assert x.to(torch.int32).dtype == torch.int32
    with unrounded(torch.bfloat16):
        assert cast(x).dtype in HALF
