"""Applies the repair of a finding to a plan that is being tried: the step of inference.

Each function takes a plan (pattern -> style) and returns a changed copy. What cannot be repaired is a
`DeadEnd`; a Linear that another group has is `Taken`, which the search may settle in favour of either. No
name of a module or attribute is looked at, only who made what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, combinations, pairwise
from math import gcd
from typing import Any

from torch import nn

from shardwise.plan.check import CheckReport
from shardwise.plan.findings import CheckFinding
from shardwise.plan.linears import LinearStyle, PackedColwiseParallel, PackedRowwiseParallel
from shardwise.plan.repair import (
    Align,
    Divide,
    EqualBlocks,
    KeepWhole,
    PlanRowwise,
    RefineBlocks,
    ShardToo,
    SplitView,
)
from shardwise.plan.styles import CONFIG_PREFIX, DivideAttributes, SliceOutput, as_style, is_count
from shardwise.plan.subject import DeadEnd, Subject

MOST_PARTS = 7
"""A dim that a view or an index takes apart in more parts than this counts heads, not fused projections."""

MOST_PRODUCERS = 4
"""More producers than this are a residual stream, which is whole."""

Entries = Mapping[str, object]
"""A plan that is being tried: pattern -> style."""


class Taken(Exception):
    """A repair needs a Linear that the plan has already."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key} is planned already")
        self.key = key


def mend(subject: Subject, plan: Entries, finding: CheckFinding) -> dict[str, object]:
    """Return the plan with the repair of a finding applied.

    Raises:
        DeadEnd: no repair is known, or it does not fit.
        Taken: it needs a Linear that is planned already.
    """
    apply = _REPAIRS.get(type(finding.repair))
    if apply is None:
        raise DeadEnd(finding.message)
    changed = apply(subject, plan, finding, finding.repair)
    if changed is None:
        raise DeadEnd(finding.message)
    return {**plan, **changed}


def _shard_too(
    subject: Subject, plan: Entries, finding: CheckFinding, repair: ShardToo
) -> dict[str, object] | None:
    """Make the Linears behind a whole tensor colwise, or slice what a module without Linears returned."""
    makers = {subject.pattern(path): path for path in repair.producers}
    linears = {key for key in makers if key in subject.linears}  # a table beside them has no vote
    if not linears and len(makers) == 1:
        (key, path), *_ = makers.items()
        return _slice(subject, plan, key, path, repair.dim - repair.ndim)
    if not 0 < len(linears) <= MOST_PRODUCERS or not linears <= set(subject.candidates):
        return None
    for key in sorted(linears):
        if key in plan:
            raise Taken(key)
    return dict.fromkeys(sorted(linears), "colwise")


def _slice(subject: Subject, plan: Entries, key: str, path: str, dim: int) -> dict[str, object] | None:
    module = subject.modules[path]
    holds_linears = any(isinstance(inner, nn.Linear) for inner in module.modules())
    return None if key in plan or holds_linears else {key: SliceOutput(dim)}


def _rowwise(
    subject: Subject, plan: Entries, finding: CheckFinding, repair: PlanRowwise
) -> dict[str, object] | None:
    key = subject.pattern(repair.linear)
    if key not in subject.candidates:
        return None
    if key in plan:
        raise Taken(key)
    size = subject.linear(key).in_features
    return {key: linear_style(1, _scaled(repair.blocks, size))}


def _refine(
    subject: Subject, plan: Entries, finding: CheckFinding, repair: RefineBlocks
) -> dict[str, object] | None:
    """Give a rowwise Linear the blocks it is fed, or cut those of a colwise one smaller."""
    return _cut(subject, plan, repair.producers, repair.piece, repair.sizes)


def _align(subject: Subject, plan: Entries, finding: CheckFinding, repair: Align) -> dict[str, object] | None:
    """Cut the blocks of both sides wherever one of them is cut."""
    common = _merged(repair.shard.blocks, repair.other.blocks)
    changed: dict[str, object] = {}
    sides = ((repair.producers, repair.shard), (repair.other_producers, repair.other))
    for producers, shard in sides:
        if shard.blocks != common:
            changed |= _cut(subject, {**plan, **changed}, producers, shard.blocks, common) or {}
    return changed or None


def _equal_blocks(
    subject: Subject, plan: Entries, finding: CheckFinding, repair: EqualBlocks
) -> dict[str, object] | None:
    return _parts(subject, plan, repair.producers, repair.count)


def _split_view(
    subject: Subject, plan: Entries, finding: CheckFinding, repair: SplitView
) -> dict[str, object] | None:
    """Take the leading factor of a view for the number of fused parts."""
    dim = repair.shard.dim
    count = repair.after[dim] if dim < len(repair.after) else 0
    fits = count and repair.before[dim] % count == 0
    return _parts(subject, plan, repair.producers, count) if fits else None


def _norm(
    subject: Subject, plan: Entries, finding: CheckFinding, repair: KeepWhole
) -> dict[str, object] | None:
    """Take the module that needs all features for a norm over them; its style refuses what is none."""
    key, module = subject.pattern(finding.module), subject.modules.get(finding.module)
    own = list(module.parameters(recurse=False)) if module is not None else []
    is_norm = (
        bool(own)
        and all(p.ndim == 1 for p in own)
        and not any(True for _ in (module or nn.Module()).children())
    )
    return {key: "across_head_norm"} if key and key not in plan and is_norm else None


_REPAIRS: dict[type, Callable[..., dict[str, object] | None]] = {
    ShardToo: _shard_too,
    PlanRowwise: _rowwise,
    RefineBlocks: _refine,
    Align: _align,
    EqualBlocks: _equal_blocks,
    SplitView: _split_view,
    KeepWhole: _norm,
}
"""Kind of repair -> what applies it. A rowwise layer that is fed a whole tensor (`SplitInput`) is a dead end."""


# ---------------------------------------------------------------- blocks


def linear_style(dim: int, blocks: Sequence[int]) -> object:
    """Return the style that cuts dim 0 (colwise) or 1 (rowwise) of a weight in `blocks`, in lowest terms."""
    if len(blocks) == 1:
        return ("colwise", "rowwise")[dim]
    unit = gcd(*blocks)
    return (PackedColwiseParallel, PackedRowwiseParallel)[dim]([block // unit for block in blocks])


def _blocks(subject: Subject, plan: Entries, key: str) -> tuple[int, tuple[int, ...]]:
    """Return the dim of a planned Linear that is cut, and its blocks.

    Raises:
        DeadEnd: the key is not that of a planned Linear.
    """
    style = as_style(plan[key]) if key in plan and key in subject.linears else None
    if not isinstance(style, LinearStyle):
        raise DeadEnd(f"the blocks of {key} are not in the plan")
    return style.dim, style.shard_of(subject.linear(key)).blocks


def _cut(
    subject: Subject, plan: Entries, producers: Sequence[str], piece: Sequence[int], sizes: Sequence[int]
) -> dict[str, object] | None:
    """Return the producers with `sizes` in place of the blocks `piece`, which are some or all of their blocks."""
    changed: dict[str, object] = {}
    for key in _linears(subject, producers):
        dim, old = _blocks(subject, plan, key)
        if dim == 1:
            new = _scaled(sizes, sum(old))
        elif (placed := _placed(old, tuple(piece), tuple(sizes))) is not None:
            new = _merged(old, placed)
        else:
            return None
        if new != old:
            changed[key] = linear_style(dim, new)
    return changed or None


def _linears(subject: Subject, producers: Sequence[str]) -> list[str]:
    """Return the patterns of the Linears among the producers; tables beside them have no blocks."""
    return sorted({subject.pattern(path) for path in producers} & set(subject.linears))


def _placed(old: tuple[int, ...], piece: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the blocks `old` with `sizes` where `piece` is; a view of all of them may have other units."""
    if sum(sizes) == sum(old):
        return sizes
    for i in range(len(old) - len(piece) + 1):
        if old[i : i + len(piece)] == piece:
            return old[:i] + sizes + old[i + len(piece) :]
    unit = sum(old) // sum(piece)
    return _scaled(sizes, sum(old)) if old == tuple(unit * part for part in piece) else None


def _parts(subject: Subject, plan: Entries, producers: Sequence[str], count: int) -> dict[str, object] | None:
    """Return the producers with `count` equal blocks each."""
    if not 1 < count <= MOST_PARTS:
        return None
    changed: dict[str, object] = {}
    for key in _linears(subject, producers):
        dim, old = _blocks(subject, plan, key)
        new = _scaled((1,) * count, sum(old))
        if new != old:
            changed[key] = linear_style(dim, new)
    return changed or None


def _scaled(blocks: Sequence[int], size: int) -> tuple[int, ...]:
    """Return blocks times the unit that makes them sum to `size`.

    Raises:
        DeadEnd: there is none.
    """
    unit, rest = divmod(size, sum(blocks))
    if rest or not unit:
        raise DeadEnd(f"blocks {list(blocks)} do not divide {size}")
    return tuple(unit * block for block in blocks)


def _merged(*cuts: Sequence[int]) -> tuple[int, ...]:
    """Return the blocks between all borders of several lists of blocks."""
    borders = sorted({0}.union(*(accumulate(blocks) for blocks in cuts)))
    return tuple(b - a for a, b in pairwise(borders))


# ---------------------------------------------------------------- attributes


def divide(subject: Subject, plan: Entries, finding: CheckFinding) -> tuple[dict[str, object], CheckReport]:
    """Return the plan with integer attributes of one module divided that clear it, and the report of that plan.

    Single attributes are tried first, then pairs, then all; at last one that the model's configuration holds too.

    Raises:
        DeadEnd: no choice of attributes clears the module.
    """
    key = subject.pattern(finding.module)
    for trial in _divisions(subject, plan, finding):
        try:
            report = subject.check(trial)
        except DeadEnd:  # some block has no such number
            continue
        if not any(subject.pattern(f.module) == key for f in report.findings):
            return trial, report
    raise DeadEnd(f"no attribute of {key or 'the model'} explains it: {finding.message}")


def _divisions(subject: Subject, plan: Entries, finding: CheckFinding) -> Iterator[dict[str, object]]:
    """Yield the plans that may clear a finding, each with other numbers divided.

    Raises:
        DeadEnd: the finding is not one that a number can explain.
    """
    if not isinstance(finding.repair, Divide):
        raise DeadEnd(finding.message)
    key = subject.pattern(finding.module)
    have = getattr(plan.get(key), "names", ())
    for names in _choices(_divisible(subject, finding, have)):
        yield {**plan, key: DivideAttributes(*have, *names)}
    of_model = getattr(plan.get(""), "names", ())
    for own, entry in _kept_twice(subject, finding, have):
        yield {**plan, key: DivideAttributes(*have, own), "": DivideAttributes(*of_model, entry)}


def _kept_twice(subject: Subject, finding: CheckFinding, have: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the attributes of the finding's module with each entry of the model's configuration of the same value."""
    config = getattr(subject.model, "config", None)
    entries = config.items() if isinstance(config, Mapping) else ()
    for own in _divisible(subject, finding, have):
        value = vars(subject.modules[finding.module])[own]
        yield from ((own, f"{CONFIG_PREFIX}{name}") for name, entry in entries if entry == value)


def _divisible(subject: Subject, finding: CheckFinding, have: Sequence[str]) -> list[str]:
    """Return the integer attributes that the degree divides; first those that would make the shape right."""
    module, repair = subject.modules[finding.module], finding.repair
    if isinstance(module, nn.Linear):
        return []
    own = {
        name: value
        for name, value in vars(module).items()
        if is_count(value) and value % subject.degree == 0 and name not in have and not name.startswith("_")
    }
    seen = set(repair.local or ()) if isinstance(repair, Divide) else set()
    wanted: set[Any] = set(repair.whole or ()) if isinstance(repair, Divide) else set()
    explains = {name: value in seen and value // subject.degree in wanted for name, value in own.items()}
    return sorted(own, key=lambda name: not explains[name])


def _choices(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for count in (1, 2):
        yield from combinations(names, count)
    if len(names) > 2:
        yield tuple(names)
