"""The styles that cut tensors, without ranks: dims by functions, arguments of a module, and what the check says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention

from shardwise import DivideAttributes, SliceInput, SliceOutput
from shardwise.errors import ConfigError, PlanError
from shardwise.plan.check import CheckReport, check_plan
from shardwise.plan.flex import plain_flex_attention
from shardwise.plan.layout import Shard
from shardwise.plan.resolve import resolve
from shardwise.plan.styles import StyleFault
from shardwise.runtime.modules import LOCAL_CLASSES
from shardwise.runtime.shard import localized_twin, meta_twin
from shardwise.runtime.slices import InputSlice
from tests.distributed.test_slices import PLAN, WIDTH, Caller


def check(model: nn.Module, plan: dict[str, Any], **inputs: Any) -> CheckReport:
    twin = meta_twin(model)
    return check_plan(twin, resolve(twin, plan, 2), inputs, localized_twin)


def second(module: nn.Module) -> int:
    return 1


def test_dim_may_be_a_named_function_of_the_module() -> None:
    for style in (SliceOutput(second), SliceInput("x", dim=second)):
        assert style.cut(nn.Identity(), (5, 8, 12)) == Shard(1, (8,))
        assert "second" in style.label
    with pytest.raises(StyleFault, match=r"no dim 5"):
        SliceOutput(lambda module: 5).leaves(nn.Identity(), (5, 8, 12))


@pytest.mark.parametrize("dim", [None, "1", 1.0, True])
def test_dim_is_an_integer_or_a_function(dim: Any) -> None:
    for style in (SliceOutput, lambda dim: SliceInput("x", dim=dim)):
        with pytest.raises(ConfigError, match="dim must be an integer or a function"):
            style(dim)


# --- arguments ---------------------------------------------------------------------------------------------------


class Takes(nn.Module):
    def forward(self, x: Tensor, table: Any = None, *rest: Any, scale: Any = None) -> Any:
        return x


def test_each_argument_is_changed_wherever_it_stands() -> None:
    style = SliceInput("table", "scale", dim=0)
    two = torch.ones(2)
    args, kwargs = style.each_argument(
        Takes(), (two, {"a": [two], "b": (two,)}, two), {"scale": two}, torch.neg
    )
    assert [args[0][0], args[1]["a"][0][0], args[1]["b"][0][0], args[2][0]] == [1, -1, -1, 1]
    assert kwargs["scale"][0] == -1
    assert style.each_argument(Takes(), (two,), {"table": None}, torch.neg)[1] == {"table": None}


def test_style_of_arguments_cuts_nothing_else_and_has_a_runtime_half() -> None:
    style = SliceInput("x", dim=-1)
    assert style.layouts(nn.Identity.forward and Takes()) == {}
    assert not style.leaves_shard
    assert style.label == "SliceInput('x', dim=-1)"
    assert LOCAL_CLASSES[SliceInput] is InputSlice


def test_name_that_is_no_argument_is_a_finding_with_those_that_are() -> None:
    with pytest.raises(PlanError) as caught:
        resolve(Caller(), {**PLAN, "blocks.*": SliceInput("caches", dim=-1)}, 2)
    (finding,) = caught.value.findings
    assert (finding.kind, finding.module) == ("NoSuchArgument", "blocks.0")
    assert "x, cache, table" in finding.fix


# --- what the check says of them ---------------------------------------------------------------------------------


def given() -> dict[str, Any]:
    return {
        "x": torch.ones(3, 7, WIDTH),
        "cache": {"kept": torch.ones(2, 3, 7, WIDTH)},
        "table": torch.arange(float(WIDTH)),
    }


def test_slices_of_arguments_are_right() -> None:
    report = check(Caller(), PLAN, **given())
    assert report.ok, str(report)
    assert report.all_reduces == 1


@pytest.mark.parametrize(
    ("entry", "kind"),
    [
        ({"blocks.*": DivideAttributes()}, "LayoutMismatch"),
        ({"blocks.*": SliceInput("cache", dim=-1)}, "LayoutMismatch"),
        ({"blocks.*": SliceInput("table", dim=-1)}, "LayoutMismatch"),
        ({"blocks.*": SliceInput("x", "cache", "table", dim=-1)}, "WholeInputNeeded"),
        ({"blocks.*": SliceInput("cache", "table", dim=0)}, "LayoutMismatch"),
        ({"blocks.*": SliceInput("cache", "table", dim=1)}, "NoSuchDim"),
    ],
)
def test_arguments_that_are_not_cut_as_the_code_needs_them_are_found(entry: Any, kind: str) -> None:
    report = check(Caller(), {**PLAN, **entry}, **given())
    assert kind in {finding.kind for finding in report.findings}, str(report)


class Twice(nn.Module):
    """Hands what is cut already to a block that cuts it again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Takes()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.first(x))


def test_slice_that_is_cut_again_is_found() -> None:
    report = check(Twice(), {"first": "colwise", "blocks.*": SliceInput("x", dim=-1)}, x=torch.ones(3, WIDTH))
    assert "WholeInputNeeded" in {finding.kind for finding in report.findings}


# --- FlexAttention -----------------------------------------------------------------------------------------------


class Flex(nn.Module):
    def __init__(self, mask: Callable[..., Tensor] | None = None, heads: int = 1, **options: Any) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.heads, self.options = 4, options
        self.mask = mask and flex_attention.create_block_mask(mask, None, heads, 128, 128, "cpu")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            to(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for to in (self.to_q, self.to_k, self.to_v)
        )
        mixed = flex_attention.flex_attention(q, k, v, block_mask=self.mask, **self.options)
        return self.to_out(mixed.transpose(1, 2).flatten(2))


QKV = {"to_q": "colwise", "to_k": "colwise", "to_v": "colwise", "to_out": "rowwise"}


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def by_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) | (h == 1)


@pytest.mark.parametrize("mask", [None, causal])
def test_flex_attention_is_followed(mask: Any) -> None:
    x = torch.ones(2, 128, WIDTH)
    report = check(Flex(mask), QKV, x=x)
    assert report.ok, str(report)
    wrong = check(Flex(mask), {**QKV, "": DivideAttributes()}, x=x)
    assert {finding.kind for finding in wrong.findings} == {"LocalShape"}


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (lambda: Flex(by_head), "mask that depends on the head"),
        (lambda: Flex(score_mod=lambda score, b, h, q, k: score + h), "score_mod"),
        (lambda: Flex(return_lse=True), "return_lse"),
    ],
)
def test_flex_attention_that_knows_the_head_is_not_decided(model: Any, what: str) -> None:
    report = check(model(), QKV, x=torch.ones(2, 128, WIDTH))
    assert [finding.kind for finding in report.findings] == ["ForwardFailed"]
    assert what in report.findings[0].message


class Sparse(Flex):
    """Chooses the blocks of keys that each head sees by their means, as sparse attention does."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            to(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for to in (self.to_q, self.to_k, self.to_v)
        )
        means = [t.unflatten(2, (-1, 64)).mean(3) for t in (q, k)]
        scores = means[0] @ means[1].transpose(-2, -1)
        mask = flex_attention.BlockMask.from_kv_blocks(
            (scores > 0).sum(-1).int(), scores.argsort(-1).int(), BLOCK_SIZE=64
        )
        return self.to_out(flex_attention.flex_attention(q, k, v, block_mask=mask).transpose(1, 2).flatten(2))


def test_blocks_that_each_head_chooses_are_followed() -> None:
    x = torch.ones(2, 128, WIDTH)
    report = check(Sparse(), QKV, x=x)
    assert report.ok, str(report)
    wrong = check(Sparse(), {**QKV, "": DivideAttributes()}, x=x)
    assert {finding.kind for finding in wrong.findings} == {"LocalShape"}


def test_blocks_of_all_heads_beside_some_of_them_are_found() -> None:
    (finding,) = check(Flex(causal, heads=4), QKV, x=torch.ones(2, 128, WIDTH)).findings
    assert finding.kind == "LayoutMismatch"
    assert "a whole mask" in finding.message


def test_flex_attention_of_values_stays_what_it_is() -> None:
    q, k, v = torch.randn(3, 1, 2, 128, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    mask = flex_attention.create_block_mask(causal, None, None, 128, 128, "cpu")
    with plain_flex_attention():
        masked = flex_attention.flex_attention(q, k, v, block_mask=mask)
    torch.testing.assert_close(masked, F.scaled_dot_product_attention(q, k, v, is_causal=True))
