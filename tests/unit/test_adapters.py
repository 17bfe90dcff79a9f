"""What follows for IP adapters when a plan shares the heads of their attentions."""

from __future__ import annotations

from collections import Counter
from typing import Any

from shardwise.plan.layout import Shard
from shardwise.plan.linears import ColwiseParallel, RowwiseSplitInputParallel
from shardwise.plan.resolve import ResolvedPlan, resolve
from shardwise.plan.styles import DivideAttributes, GatherOutput, PerHead, SliceOutput
from tests.adapters import load_flux_adapters, load_sd3_adapter
from tests.helpers import family, tiny_model

FLUX, SD3 = "FluxTransformer2DModel", "SD3Transformer2DModel"


def planned(name: str, model: Any, **entries: Any) -> ResolvedPlan:
    return resolve(model, family(name).PLAN | entries, 2)


def derived(plan: ResolvedPlan, without: ResolvedPlan) -> dict[str, Any]:
    """Return path -> style of what a plan has for a model with adapters, and not without them."""
    usual = Counter((m.path, m.style) for m in without.modules)
    found = [(m.path, m.style) for m in plan.modules]
    assert not usual - Counter(found)
    return dict((Counter(found) - usual).keys())


def test_flux_adapters_follow_the_heads_and_their_attention_is_put_together() -> None:
    model = tiny_model(FLUX)
    load_flux_adapters(model)
    attention = {"to_out.1": SliceOutput(-1), "": GatherOutput(48)} | {
        f"processor.{name}.{i}": ColwiseParallel() for name in ("to_k_ip", "to_v_ip") for i in (0, 1)
    }
    assert derived(planned(FLUX, model), planned(FLUX, tiny_model(FLUX))) == {
        f"transformer_blocks.{block}.attn.{path}".rstrip("."): style
        for block in (0, 1)
        for path, style in attention.items()
    }


def test_sd3_adapter_follows_the_heads_of_both_attentions_and_its_modulation_stays_whole() -> None:
    model = tiny_model(SD3)
    load_sd3_adapter(model)
    plan = planned(SD3, model)
    parts = dict.fromkeys(("to_k_ip", "to_v_ip"), ColwiseParallel()) | dict.fromkeys(
        ("norm_q", "norm_k", "norm_ip_k"), PerHead()
    )
    assert derived(plan, planned(SD3, tiny_model(SD3))) == {
        f"transformer_blocks.{attention}.processor.{name}": style
        for attention in ("0.attn", "0.attn2", "1.attn", "2.attn")
        for name, style in parts.items()
    }
    assert plan.layout("transformer_blocks.0.attn.processor.to_k_ip.weight") == Shard(0, (48,))


def test_part_of_an_adapter_with_its_own_entry_is_left_to_the_plan() -> None:
    model = tiny_model(SD3)
    load_sd3_adapter(model)
    path = "transformer_blocks.1.attn.processor.to_k_ip"
    plan = planned(SD3, model, **{path: "rowwise_split_input"})
    assert [m.style for m in plan.modules if m.path == path] == [RowwiseSplitInputParallel()]


def test_entry_that_divides_heads_does_not_keep_an_attention_from_being_put_together() -> None:
    model = tiny_model(FLUX)
    load_flux_adapters(model)
    heads = DivideAttributes("heads")
    plan = planned(FLUX, model, **{"transformer_blocks.*.attn": heads})
    styles = [m.style for m in plan.modules if m.path == "transformer_blocks.1.attn"]
    assert styles == [heads, GatherOutput(48)]


def test_processor_that_two_attentions_share_is_planned_once() -> None:
    model = tiny_model(SD3)
    load_sd3_adapter(model)
    block = model.transformer_blocks[0]
    block.attn2.set_processor(block.attn.processor)
    shared = [m.path for m in planned(SD3, model).modules if "transformer_blocks.0" in m.path]
    assert sum(path.endswith("to_k_ip") for path in shared) == 1
