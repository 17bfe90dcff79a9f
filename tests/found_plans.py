"""Plans that are found, for the thirteen models that this is held on, and how they differ from the declared ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from tools.mutation.cases import Case, case

import shardwise
from shardwise.plan.infer import Inferred
from shardwise.plan.layout import Shard
from shardwise.plan.resolve import resolve
from shardwise.plan.styles import as_style
from shardwise.plan.subject import block_lists

VARIANTS = (
    "WanTransformer3DModel:image_to_video",
    "SD3Transformer2DModel:without_norms_and_second_attention",
)
THIRTEEN = (
    "CogVideoXTransformer3DModel",
    "Flux2Transformer2DModel",
    "FluxTransformer2DModel",
    "HunyuanVideoTransformer3DModel",
    "LTXVideoTransformer3DModel",
    "Lumina2Transformer2DModel",
    "MiniMaxH3Transformer3DModel",
    "QwenImageTransformer2DModel",
    "SD3Transformer2DModel",
    "WanTransformer3DModel",
    "ZImageTransformer2DModel",
    *VARIANTS,
)
"""Eleven families in their tiny configuration, and two variants: `Class` or `Class:variant`."""


@dataclass(frozen=True)
class Difference:
    """How a plan that was found differs from the declared one of a model.

    Attributes:
        groups: Whether what belongs together is cut otherwise: parameters or attributes differ.
        more: What splits its input in the plan that was found only.
        less: What splits its input in the declared plan only; what is in no list of blocks is not searched.
    """

    groups: bool = False
    more: tuple[str, ...] = ()
    less: tuple[str, ...] = ()


def difference(name: str, plan: Mapping[str, Any]) -> Difference:
    """Return how a plan for a case differs from the declared one.

    Declared entries for modules that this configuration does not have are `IfPresent`, and mean nothing here.
    """
    whole, found = model_of(name), _parted(plan)
    declared = _parted(whole.plan)
    searched = tuple(f"{path}.*" for path in block_lists(whole.model))
    return Difference(
        groups=_meaning(whole, found[0]) != _meaning(whole, declared[0]),
        more=tuple(sorted(found[1] - declared[1])),
        less=tuple(sorted(key for key in declared[1] - found[1] if key.startswith(searched))),
    )


def _parted(plan: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the groups of a plan, and the lone Linears that split their input."""
    alone = {key for key, style in plan.items() if as_style(style) == as_style("rowwise_split_input")}
    return {key: style for key, style in plan.items() if key not in alone}, alone


def _meaning(case: Case, plan: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return what a plan does: how each parameter is cut, if it is, and each attribute it divides."""
    if not plan:
        return {}, {}
    resolved = resolve(case.model, plan, 2)
    cuts = {name: layout for name, layout in resolved.layouts.items() if isinstance(layout, Shard)}
    return cuts, {m.path: m.values(0, 2) for m in resolved.modules if m.attributes}


@cache
def model_of(name: str) -> Case:
    """Return a case; its model is not to be changed."""
    return case(name)


@cache
def inferred_for(name: str) -> Inferred:
    """Return the plan that is found for a case by dataflow."""
    found = shardwise.infer(model_of(name).model, example_inputs=model_of(name).inputs)
    assert isinstance(found, Inferred)
    return found
