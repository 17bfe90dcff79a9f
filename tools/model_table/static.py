"""The columns that follow from a plan and the class's default configuration, without weights and without ranks."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise import models
from shardwise.models.lookup import family_of, skeleton, tiny_case
from shardwise.plan.layout import Shard
from shardwise.plan.resolve import ResolvedPlan, fitting_degrees, pattern_of, resolve
from shardwise.plan.styles import AcrossHeadNorm, as_style
from shardwise.plan.trace import quiet_forward
from shardwise.runtime.norms import LocalNorm
from shardwise.runtime.shard import localized_twin


@dataclass(frozen=True)
class Row:
    """What a plan is for the default configuration of a class.

    Attributes:
        name: The class.
        billions: Its parameters.
        styles: Names of the styles in its plan.
        sharded: Share of its parameters that is sharded at the smallest degree above one.
        degrees: Possible degrees up to 64; those with fewer key heads than ranks included.
        sums: Block list -> sums over the ranks in one block; "" is what is in none.
    """

    name: str
    billions: float
    styles: tuple[str, ...]
    sharded: float
    degrees: tuple[int, ...]
    sums: dict[str, int]


def default_model(name: str) -> nn.Module:
    """Return a class in its default configuration, or the one that its file calls released; without weights."""
    family: Any = family_of(getattr(models, name))
    return skeleton(name, **getattr(family, "RELEASED_CONFIG", {}))


def row(name: str) -> Row:
    """Return the static columns of a class."""
    model, plan = default_model(name), getattr(models, name)._tp_plan
    degrees = fitting_degrees(model, plan)
    resolved = resolve(model, plan, next(degree for degree in degrees if degree > 1))
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    cut = sum(size for n, size in sizes.items() if isinstance(resolved.layout(n), Shard))
    return Row(
        name=name,
        billions=sum(sizes.values()) / 1e9,
        styles=tuple(sorted({_spelled(style) for style in plan.values()})),
        sharded=cut / sum(sizes.values()),
        degrees=degrees,
        sums=_sums(model, resolved, _summed_with_others(name)),
    )


def _spelled(style: object) -> str:
    """Return the name of a style, without its arguments."""
    return as_style(style).label.partition("(")[0].strip('"')


def _summed_with_others(name: str) -> set[str]:
    """Return the patterns of norms over all heads that do not sum, because another of their attention did.

    Seen on the tiny configuration: it depends on the order in which the code norms.
    """
    config, inputs = tiny_case(family_of(getattr(models, name)))
    model, plan = skeleton(name, **config), getattr(models, name)._tp_plan
    if not any(isinstance(as_style(style), AcrossHeadNorm) for style in plan.values()):
        return set()
    twin, group = localized_twin(model, resolve(model, plan, 2))
    modules, sums, begun = dict(twin.named_modules()), Counter[str](), list[int]()

    def begin(norm: nn.Module, args: Any) -> None:
        begun.append(group.traffic.all_reduces)

    def end(norm: LocalNorm, args: Any, output: Any) -> None:
        sums[pattern_of(modules, norm.tp_planned.path)] += group.traffic.all_reduces - begun.pop()

    for norm in modules.values():
        if isinstance(norm, LocalNorm):
            norm.register_forward_pre_hook(begin)
            norm.register_forward_hook(end)
            sums[pattern_of(modules, norm.tp_planned.path)] += 0
    quiet_forward(twin, inputs)
    return {pattern for pattern, count in sums.items() if not count}


def _sums(model: nn.Module, plan: ResolvedPlan, free: Collection[str]) -> dict[str, int]:
    """Return the sums of one block of each list, the one that makes most of them, and of what is in no list."""
    blocks: dict[str, Counter[str]] = {}
    modules = dict(model.named_modules())
    for m in plan.modules:
        place, index = _block(model, m.path)
        sums = 0 if pattern_of(modules, m.path) in free else m.style.sums(model.get_submodule(m.path))
        blocks.setdefault(place, Counter())[index] += sums
    most = {place: max(counts.values()) for place, counts in blocks.items()}
    return {place: count for place, count in most.items() if count}


def _block(model: nn.Module, path: str) -> tuple[str, str]:
    """Return the outermost list of blocks that a path goes through, and the index in it."""
    parts = path.split(".")
    for i in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:i])), nn.ModuleList):
            return ".".join(parts[:i]), parts[i]
    return "", ""


def source_of(name: str) -> str:
    """Return the path of the file that holds the plan of a class, from the root of the repository."""
    path = inspect.getfile(getattr(models, name)).replace("\\", "/")
    return "src/shardwise" + path.rpartition("/shardwise")[2]
