"""Makes wrong plans out of right ones: one fault each, and pairs of faults."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tools.mutation.reblock import reblocked
from torch import nn

from shardwise.plan.heads import HEAD_COUNTS, WIDTHS
from shardwise.plan.layout import Shard
from shardwise.plan.resolve import resolve
from shardwise.plan.style import is_count
from shardwise.plan.styles import (
    ColwiseParallel,
    DivideAttributes,
    PackedColwiseParallel,
    PackedRowwiseParallel,
    RowwiseParallel,
    as_style,
)

Plan = dict[str, Any]

_SPLIT = '"rowwise_split_input"'


@dataclass(frozen=True)
class Mutant:
    """One wrong plan: the kind of fault, the plan key or module pattern it is at, and the plan."""

    kind: str
    target: str
    plan: Plan

    @property
    def name(self) -> str:
        """What identifies the mutant in a record."""
        return f"{self.kind} @ {self.target}"


def mutants(model: nn.Module, plan: Mapping[str, Any]) -> list[Mutant]:
    """Return every single fault of a right plan on a model, each plan once."""
    found: dict[str, Mutant] = {}
    for maker in (_entries, _unplanned, _norms, _attributes, _groups, _reblocked, _divided):
        for mutant in maker(model, dict(plan)):
            key = repr(sorted((k, repr(v)) for k, v in mutant.plan.items()))
            found.setdefault(key, mutant)
    return list(found.values())


def pairs(singles: list[Mutant], plan: Mapping[str, Any], count: int, seed: int = 0) -> list[Mutant]:
    """Return random pairs of faults, `count` of them or a few less where the same pair is drawn twice."""
    rng = random.Random(seed)
    chosen = []
    for _ in range(count):
        a, b = rng.sample(singles, 2)
        merged = {k: v for k, v in plan.items() if k in a.plan and k in b.plan}
        for source in (a, b):
            merged |= {k: v for k, v in source.plan.items() if plan.get(k) != v}
        chosen.append(Mutant(f"pair: {a.kind} + {b.kind}", f"{a.target} + {b.target}", merged))
    return list({mutant.name: mutant for mutant in chosen}.values())


def _entries(model: nn.Module, plan: Plan) -> Iterator[Mutant]:
    """Change or drop one entry."""
    for key, value in plan.items():
        style = as_style(value)
        yield Mutant("drop", key, {k: v for k, v in plan.items() if k != key})
        for kind, other in _other_styles(model, plan, key, style):
            yield Mutant(kind, key, plan | {key: other})


def _other_styles(model: nn.Module, plan: Plan, key: str, style: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return
    colwise = isinstance(style, ColwiseParallel)
    split = style.label == _SPLIT
    yield "swap", "rowwise" if colwise else "colwise"
    if not split:
        yield ("colwise to split-input" if colwise else "rowwise to split-input"), "rowwise_split_input"
    else:
        yield "split-input to rowwise", "rowwise"
    packed = PackedColwiseParallel if colwise else PackedRowwiseParallel
    blocks = _blocks(model, plan, key)
    if split or not blocks:
        return
    size = sum(blocks)
    if len(blocks) == 1:
        yield "over-packed", packed([1, 1])
        return
    yield "unpacked", packed([1])
    if blocks[::-1] != blocks:
        yield "blocks reversed", packed(blocks[::-1])
    if len(blocks) > 2:
        yield "blocks merged", packed([blocks[0] + blocks[1], *blocks[2:]])
    for proportions in ([1, 1], [1, 3]):
        if size % sum(proportions) == 0 and [size // sum(proportions) * p for p in proportions] != blocks:
            yield f"blocks {proportions}", packed(proportions)


def _blocks(model: nn.Module, plan: Plan, key: str) -> list[int]:
    """Return the blocks in which a right plan cuts the weight of an entry."""
    resolved = resolve(model, plan, 2)
    layouts = (m.layouts.get("weight") for m in resolved.modules if m.plan_key == key)
    return next((list(layout.blocks) for layout in layouts if isinstance(layout, Shard)), [])


def _unplanned(model: nn.Module, plan: Plan) -> Iterator[Mutant]:
    """Plan a Linear that should stay whole."""
    planned = {m.path for m in resolve(model, plan, 2).modules}
    for pattern, paths in _patterns(model).items():
        linears = [m for m in map(model.get_submodule, paths) if isinstance(m, nn.Linear)]
        if planned & set(paths) or len(linears) < len(paths):
            continue
        columns, rows = linears[0].in_features, linears[0].out_features
        if rows % 4 == 0:
            yield Mutant("whole to colwise", pattern, plan | {pattern: "colwise"})
        if columns % 4 == 0:
            yield Mutant("whole to rowwise", pattern, plan | {pattern: "rowwise"})
            yield Mutant("whole to split-input", pattern, plan | {pattern: "rowwise_split_input"})


def _norms(model: nn.Module, plan: Plan) -> Iterator[Mutant]:
    """Mark a norm of one head as one of all heads; leaving one out is dropping its entry."""
    for pattern, paths in _patterns(model).items():
        name = pattern.rpartition(".")[2]
        module = model.get_submodule(paths[0])
        is_norm = (
            name.startswith("norm_") and name[-1] in "qk" and getattr(module, "weight", None) is not None
        )
        if is_norm and pattern not in plan:
            yield Mutant("per-head norm marked across heads", pattern, plan | {pattern: "across_head_norm"})


def _attributes(model: nn.Module, plan: Plan) -> Iterator[Mutant]:
    """Leave attributes of an attention undivided: all of them, or each one."""
    everything = dict(plan)
    for m in resolve(model, plan, 2).modules:
        if not isinstance(m.style, DivideAttributes):
            continue
        pattern = _pattern(model, m.path)
        names = [n for n in (*HEAD_COUNTS, *WIDTHS) if n in m.attributes]
        everything[pattern] = DivideAttributes()
        yield Mutant("attributes undivided", pattern, plan | {pattern: DivideAttributes()})
        for name in names if len(names) > 1 else ():
            rest = [n for n in names if n != name]
            yield Mutant(f"attribute {name} undivided", pattern, plan | {pattern: DivideAttributes(*rest)})
    if everything != plan:
        yield Mutant("all attributes undivided", "", everything)


def _groups(model: nn.Module, plan: Plan) -> Iterator[Mutant]:
    """Leave a whole attention or feed-forward out, with its attributes, or with them still divided."""
    resolved = resolve(model, plan, 2)
    divided = {
        _pattern(model, m.path): m.style for m in resolved.modules if isinstance(m.style, DivideAttributes)
    }
    for group in dict.fromkeys(_group(key) for key in plan):
        rest = {k: v for k, v in plan.items() if _group(k) != group}
        if not rest:
            continue
        yield Mutant("group dropped", group, rest)
        if group in divided:
            yield Mutant("group dropped, attributes divided", group, rest | {group: divided[group]})


def _reblocked(model: nn.Module, plan: Plan) -> Iterator[Mutant]:
    """Cut some layers of a group in other blocks, or all of them."""
    groups: dict[str, list[str]] = {}
    blocks: dict[str, list[int]] = {}
    for key, value in plan.items():
        style = as_style(value)
        meets = isinstance(style, (ColwiseParallel, RowwiseParallel)) and style.label != _SPLIT
        if meets and (found := _blocks(model, plan, key)):
            groups.setdefault(_group(key), []).append(key)
            blocks[key] = found
    rowwise = frozenset(key for key in blocks if isinstance(as_style(plan[key]), RowwiseParallel))
    for kind, key, entries in reblocked(groups, blocks, rowwise):
        yield Mutant(kind, key, plan | entries)


def _divided(model: nn.Module, plan: Plan) -> Iterator[Mutant]:
    """Divide one more integer attribute of a module, of those that 2 and 4 divide."""
    planned = {m.path: m for m in resolve(model, plan, 2).modules}
    for pattern, paths in [("", [""]), *_patterns(model).items()]:
        modules = [model.get_submodule(path) for path in paths]
        first = planned.get(paths[0])
        if isinstance(modules[0], nn.Linear) or (first and not isinstance(first.style, DivideAttributes)):
            continue
        divided = tuple(first.attributes) if first else ()
        for name in vars(modules[0]):
            values = [vars(module).get(name) for module in modules]
            if name not in divided and all(is_count(value) and value % 4 == 0 for value in values):
                entry = DivideAttributes(*divided, name)
                yield Mutant("attribute divided", f"{pattern}.{name}".lstrip("."), plan | {pattern: entry})


def _group(key: str) -> str:
    """Return the module that a plan key's Linear belongs to: an attention, a feed-forward."""
    parts = key.split(".")
    while len(parts) > 1 and (parts[-1].isdigit() or parts[-1] in ("proj", "net", "to_out")):
        parts.pop()
    return (
        ".".join(parts[:-1]) if parts[-1] != "*" and len(parts) > 2 and parts[-2] != "*" else ".".join(parts)
    )


def _patterns(model: nn.Module) -> dict[str, list[str]]:
    """Return module patterns with the paths they stand for, in the order of the model."""
    found: dict[str, list[str]] = {}
    for path, _ in model.named_modules():
        if path:
            found.setdefault(_pattern(model, path), []).append(path)
    return found


def _pattern(model: nn.Module, path: str) -> str:
    """Return a path with the index of its outermost block list replaced by `*`."""
    parts = path.split(".")
    for i in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:i])), nn.ModuleList):
            return ".".join([*parts[:i], "*", *parts[i + 1 :]])
    return path
