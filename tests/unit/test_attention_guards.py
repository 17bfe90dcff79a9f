"""Attentions that a plan would leave with a wrong idea of their heads: silently wrong, so refused or put right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise import DivideAttributes, PackedColwiseParallel
from shardwise.errors import PlanError
from shardwise.plan.resolve import ResolvedPlan, resolve
from shardwise.plan.styles import PerHead

QKVO = {"attn.q": "colwise", "attn.k": "colwise", "attn.v": "colwise", "attn.o": "rowwise"}


def model(attributes: dict[str, int], kv: int = 16, name: str = "Mixer", **more: nn.Module) -> nn.Module:
    """Return a model with one attention of four heads of four, that keeps these attributes."""
    attn = type(name, (nn.Module,), {})()
    for key, value in attributes.items():
        setattr(attn, key, value)
    attn.q, attn.k, attn.v, attn.o = (
        nn.Linear(16, 16),
        nn.Linear(16, kv),
        nn.Linear(16, kv),
        nn.Linear(16, 16),
    )
    for key, module in more.items():
        attn.add_module(key, module)
    root = nn.Module()
    root.attn = attn
    return root


def divided(plan: ResolvedPlan) -> dict[str, int]:
    """Return the attributes of the attention on a rank."""
    return {
        name: value
        for m in plan.modules
        if isinstance(m.style, DivideAttributes)
        for name, value in m.values(0, plan.degree).items()
    }


def kinds(of: nn.Module, plan: Any, degree: int = 2) -> set[str]:
    with pytest.raises(PlanError) as caught:
        resolve(of, plan, degree)
    return {finding.kind for finding in caught.value.findings}


@pytest.mark.parametrize("name", ["heads", "num_heads", "n_head", "nhead", "num_attention_heads"])
def test_P7_head_count_is_divided_under_any_of_the_known_names(name: str) -> None:
    assert divided(resolve(model({name: 4}), QKVO, 2)) == {name: 2}


def test_P7_widths_that_go_with_a_head_count_are_divided_with_it() -> None:
    found = divided(resolve(model({"heads": 4, "inner_dim": 16, "query_dim": 16}), QKVO, 2))
    assert found == {"heads": 2, "inner_dim": 8}


def test_P7_head_width_alone_is_enough_where_nothing_looks_like_a_count() -> None:
    assert divided(resolve(model({"head_dim": 4, "layer": 9}), QKVO, 2)) == {}


def test_P7_unknown_attribute_that_equals_the_head_count_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="splits looks like it") as caught:
        resolve(model({"head_dim": 4, "splits": 4}), QKVO, 2)
    assert {finding.kind for finding in caught.value.findings} == {"HeadsNotFound"}


@pytest.mark.parametrize("entry", [DivideAttributes("splits"), DivideAttributes()])
def test_P7_an_entry_of_the_plan_settles_what_is_divided(entry: DivideAttributes) -> None:
    plan = resolve(model({"head_dim": 4, "splits": 4}), QKVO | {"attn": entry}, 2)
    assert divided(plan) == dict.fromkeys(entry.names, 2)


def test_P7_attention_without_any_head_attribute_is_refused() -> None:
    assert kinds(model({}), QKVO) == {"HeadsNotFound"}


@pytest.mark.parametrize("left_out", ["attn.q", "attn.k", "attn.v"])
def test_P7_attention_that_is_sharded_in_part_is_refused(left_out: str) -> None:
    assert kinds(model({"heads": 4}), {k: v for k, v in QKVO.items() if k != left_out}) == {"HalfPlanned"}


def test_head_count_stays_where_only_the_feed_forward_is_planned() -> None:
    of = model({"num_heads": 4}, up=nn.Linear(16, 32), down=nn.Linear(32, 16))
    assert divided(resolve(of, {"attn.up": "colwise", "attn.down": "rowwise"}, 2)) == {}


def test_head_count_beside_linears_of_unknown_purpose_is_refused() -> None:
    block = nn.Module()
    block.heads, block.a, block.b, block.c = 4, nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
    root = nn.Module()
    root.block = block
    plan = {"block.a": "colwise", "block.b": "rowwise"}
    assert kinds(root, plan) == {"AmbiguousHeads"}
    assert divided(resolve(root, plan | {"block": DivideAttributes("heads")}, 2)) == {"heads": 2}


@pytest.mark.parametrize("attributes", [{"head_dim": 2}, {"heads": 8, "kv_heads": 3}])
def test_E4_key_value_heads_are_checked_where_only_their_width_is_known(attributes: dict[str, int]) -> None:
    with pytest.raises(PlanError) as caught:
        resolve(model(attributes, kv=6), QKVO, 2)
    assert {finding.kind for finding in caught.value.findings} == {"IndivisibleHeads"}
    assert caught.value.degrees == (1,)


def test_per_head_norms_are_found_by_their_width_and_others_are_not() -> None:
    of = model({"heads": 4}, norm_q=nn.RMSNorm(4), norm_in=nn.LayerNorm(16), norm_k=nn.RMSNorm(4))
    found = {m.path for m in resolve(of, QKVO, 2).modules if isinstance(m.style, PerHead)}
    assert found == {"attn.norm_q", "attn.norm_k"}


def test_weights_that_are_computed_are_refused() -> None:
    of = model({"heads": 4})
    torch.nn.utils.parametrizations.weight_norm(of.attn.q)
    assert "NotALinear" in kinds(of, QKVO) or "NotPlainWeight" in kinds(of, QKVO)


def test_module_with_two_names_may_be_planned_by_one_of_them_or_by_both() -> None:
    of = model({"heads": 4})
    of.twin = of.attn
    both = QKVO | {key.replace("attn", "twin"): style for key, style in QKVO.items()}
    for plan in (QKVO, both):
        layouts = resolve(of, plan, 2).layouts
        assert layouts["attn.q.weight"] == layouts["twin.q.weight"]
    assert kinds(of, QKVO | {"twin.q": "rowwise"}) == {"MatchedTwice"}


@pytest.mark.parametrize(("blocks", "degree", "fits"), [([1, 1, 1], 2, True), ([1, 1, 1], 4, False)])
def test_E4_fused_queries_keys_and_values_are_cut_between_heads_only(
    blocks: list[int], degree: int, fits: bool
) -> None:
    attn = type("Fused", (nn.Module,), {})()
    attn.head_dim, attn.to_qkv, attn.to_out = 4, nn.Linear(8, 24), nn.Linear(8, 8)  # two heads of four
    root = nn.Module()
    root.attn = attn
    plan = {"attn.to_qkv": PackedColwiseParallel(blocks), "attn.to_out": "rowwise"}
    if fits:
        assert resolve(root, plan, degree).layouts["attn.to_qkv.weight"].blocks == (8, 8, 8)
    else:
        assert kinds(root, plan, degree) == {"IndivisibleHeads"}


def test_plan_that_shards_nothing_is_refused() -> None:
    assert kinds(model({"heads": 4}), {}) == {"NothingSharded"}
    assert kinds(model({"heads": 4}), {"attn": DivideAttributes("heads")}) == {"NothingSharded"}
