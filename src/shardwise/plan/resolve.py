"""From patterns to layouts: what a plan means for one model and one degree.

Works on any model, also one without weights (meta device): it reads module types, shapes and integer
attributes, changes nothing, needs no process group, and reports all faults of a plan at once.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import TypeVar

from torch import nn

from shardwise.errors import Finding, PlanError
from shardwise.plan import adapters, heads
from shardwise.plan.layout import Layout, Replicated, Shard
from shardwise.plan.styles import IfPresent, PerHead, Style, StyleFault, as_style
from shardwise.plan.uneven import Entry, attentions, shared

_T = TypeVar("_T")

Plan = Mapping[str, object]
"""A plan as users write it: module pattern -> style."""


@dataclass(frozen=True)
class PlannedModule:
    """One module that the plan touches."""

    path: str
    plan_key: str
    style: Style
    layouts: Mapping[str, Layout]
    """Layout of each own parameter, by its name in the module."""
    attributes: Mapping[str, Shard]
    """Integer attributes, each as a dim of that size and its cut."""

    def values(self, rank: int, degree: int) -> dict[str, int]:
        """Return the integer attributes and their values on a rank."""
        return {name: cut.local_size(rank, degree) for name, cut in self.attributes.items()}


@dataclass(frozen=True)
class ResolvedPlan:
    """The one table of who owns what: every planned module, and the layout of every planned parameter."""

    degree: int
    modules: tuple[PlannedModule, ...]
    layouts: Mapping[str, Layout]
    """Layout of each planned parameter by its full name; parameters that are not listed are whole."""

    def layout(self, name: str) -> Layout:
        """Return the layout of a parameter or buffer by its full name."""
        return self.layouts.get(name, Replicated())

    @cached_property
    def uneven(self) -> frozenset[Shard]:
        """The cuts that give the ranks unequal numbers of heads."""
        return frozenset(lay for lay in self.layouts.values() if isinstance(lay, Shard) and lay.units)

    def shares(self, rank: int) -> set[Fraction]:
        """Return which parts of uneven cuts a rank holds."""
        return {Fraction(cut.share(rank, self.degree).length, cut.units) for cut in self.uneven}


def resolve(
    model: nn.Module, plan: Plan | object, degree: int, guards: bool = True, uneven: bool = False
) -> ResolvedPlan:
    """Return what `plan` means for `model` on `degree` ranks.

    Args:
        model: The whole model; its parameters may be on the meta device.
        plan: Module patterns and styles. A pattern is a module path relative to the model with at most one
            `*`, which stands for every element of an `nn.ModuleList`. It must match a module, unless its style
            is wrapped in `IfPresent`.
        degree: Number of ranks.
        guards: Whether to judge the plan's attentions by the names in them and to divide their head counts.
            Without, the plan means what is written in it, as inference needs it for plans that are not done.
        uneven: Whether heads that `degree` does not divide are shared in unequal numbers.

    Raises:
        PlanError: with a finding for each fault: patterns that match nothing or are malformed, modules
            matched twice, styles that do not fit their module, blocks or heads that `degree` does not
            divide, shared parameters that would be cut in two ways.
    """
    if not isinstance(plan, Mapping):
        message = f"a plan maps module patterns to styles, this is a {type(plan).__name__}"
        raise PlanError([Finding("NotAPlan", type(model).__name__, message, "pass a dict")])
    findings: list[Finding] = []
    matched = _Matched.of(model, plan, uneven, findings)
    odd = matched.uneven_attentions(degree) if guards else {}
    if guards:
        findings += heads.faults(matched.owners)
        findings += heads.indivisible(matched.owners, matched.config, degree, odd)
    resolved = [
        _plan_module(matched.modules[path], path, key, style, degree, findings)
        for path, key, style in matched.entries(degree, odd, guards)
    ]
    planned_modules = tuple(m for m in resolved if m)
    layouts = _layouts(matched.modules, planned_modules)
    findings += _shared(model, layouts)
    if degree > 1 and not findings and not any(isinstance(layout, Shard) for layout in layouts.values()):
        message = "the plan shards no weight: every rank would hold the whole model"
        findings.append(
            Finding("NothingSharded", type(model).__name__, message, "add patterns of its Linears")
        )
    if findings:
        degrees = filter(matched.fits, range(1, _LARGEST_DEGREE + 1))
        raise PlanError(_collapse(findings), f"{type(model).__name__} at tp_degree {degree}", degrees)
    return ResolvedPlan(degree, planned_modules, layouts)


def _layouts(modules: Mapping[str, nn.Module], planned: Iterable[PlannedModule]) -> dict[str, Layout]:
    """Return the layout of each planned parameter, under every path that leads to its module."""
    aliases: dict[int, list[str]] = defaultdict(list)
    for path, module in modules.items():
        aliases[id(module)].append(path)
    return {
        f"{alias}.{name}".lstrip("."): layout
        for m in planned
        for name, layout in m.layouts.items()
        for alias in aliases[id(modules[m.path])]
    }


_LARGEST_DEGREE = 64  # how far messages look for degrees that would work


def fitting_degrees(model: nn.Module, plan: Plan, uneven: bool = False) -> tuple[int, ...]:
    """Return the degrees, up to 64, that can share all blocks and heads, whatever else may be wrong with a plan."""
    matched = _Matched.of(model, plan, uneven, [])
    return tuple(filter(matched.fits, range(1, _LARGEST_DEGREE + 1)))


@dataclass(frozen=True)
class _Matched:
    """What a plan touches of a model, before anything is cut: the same at every degree.

    Attributes:
        modules: All modules by path.
        planned: Path -> plan key and style.
        config: The model's configuration, if it has one.
        uneven: Whether heads may be shared in unequal numbers.
    """

    modules: Mapping[str, nn.Module]
    planned: Mapping[str, tuple[str, Style]]
    config: object
    uneven: bool

    @classmethod
    def of(cls, model: nn.Module, plan: Plan, uneven: bool, findings: list[Finding]) -> _Matched:
        """Return what `plan` touches of `model`; keys that are wrong become findings."""
        modules = dict(model.named_modules(remove_duplicate=False))
        return cls(modules, _match(modules, plan, findings), getattr(model, "config", None), uneven)

    @cached_property
    def owners(self) -> Sequence[heads.Owner]:
        """The modules whose own Linears leave a shard."""
        return heads.owners_of(self.modules, self.planned)

    def uneven_attentions(self, degree: int) -> Mapping[str, int]:
        """Return path -> number of heads for what is cut unevenly, if that is allowed."""
        return attentions(self.modules, self.owners, degree) if self.uneven else {}

    def entries(self, degree: int, odd: Mapping[str, int], guards: bool = True) -> list[Entry]:
        """Return (path, plan key, style) of what the plan cuts and, with the guards, of what follows from it."""
        entries = [(path, key, style) for path, (key, style) in self.planned.items()]
        if not guards:
            return [*_cut(self.modules, entries, degree), *_whole_inside(self.modules, entries)]
        copies = heads.shared(self.owners, degree)
        entries += heads.derive(self.owners, copies)
        entries += adapters.derive(self.modules, self.planned)
        entries += _whole_inside(self.modules, entries)
        entries = [
            (path, key, style.shared_by(copies[path]) if path in copies else style)
            for path, key, style in entries
        ]
        if self.uneven:
            entries = list(shared(self.modules, self.owners, entries, odd, degree))
        return _cut(self.modules, entries, degree)

    def fits(self, degree: int) -> bool:
        """Return whether `degree` ranks can share all blocks and heads, whatever else may be wrong with the plan."""
        odd = self.uneven_attentions(degree)
        if any(True for _ in heads.indivisible(self.owners, self.config, degree, odd)):
            return False
        return not any(
            _faults(self.modules[path], style, degree) for path, _, style in self.entries(degree, odd)
        )


def _cut(modules: Mapping[str, nn.Module], entries: Iterable[Entry], degree: int) -> list[Entry]:
    """Return the entries without those that stay whole because the degree does not divide them."""
    return [
        (path, key, style)
        for path, key, style in entries
        if not (style.may_stay_whole and _faults(modules[path], style, degree))
    ]


def _whole_inside(modules: Mapping[str, nn.Module], entries: Sequence[Entry]) -> Iterator[Entry]:
    """Yield an entry for each module inside of one that sums once whose parameters are whole: a router.

    Each rank knows the part of their gradients that its own terms of the sum make.
    """
    known = {path for path, _, style in entries if style.inside or style.sums_gradients}
    for outer, key, style in entries:
        for path, module in modules.items() if style.plan else ():
            within = path == outer or path.startswith(f"{outer}." if outer else "")
            if within and path not in known and any(True for _ in module.parameters(recurse=False)):
                yield path, key, PerHead()


def _faults(module: nn.Module, style: Style, degree: int) -> list[StyleFault]:
    try:
        return list(style.faults(module, degree))
    except StyleFault:  # the style does not take this module at any degree
        return []


def _match(
    modules: Mapping[str, nn.Module], plan: Plan, findings: list[Finding]
) -> dict[str, tuple[str, Style]]:
    """Return path -> (plan key, style) for every module that a pattern matches."""
    planned: dict[str, tuple[str, Style]] = {}
    taken: dict[int, tuple[tuple[str, str], object]] = {}  # module id -> what matched it first, and its style
    entries = [(key, key, value, False) for key, value in plan.items()]
    while entries:
        key, pattern, value, inside = entries.pop(0)
        expand = partial(_expand, modules, pattern, isinstance(value, IfPresent))
        paths = _attempt(expand, pattern, key, findings) or []
        style = _attempt(partial(_styled, value, inside), pattern, key, findings)
        for path in paths:
            first, first_style = taken.setdefault(id(modules[path]), ((key, pattern), style))
            if first != (key, pattern) and (path in planned or first_style != style):
                fix = "keep one of the two keys"
                findings.append(Finding("MatchedTwice", path, f'also matched by "{first[1]}"', fix, key))
            elif style is not None:
                planned[path] = (key, style)
                prefix = f"{path}." if path else ""
                entries += [(key, prefix + inner, part, True) for inner, part in style.plan.items()]
    return planned


def _styled(value: object, inside: bool) -> Style:
    style = as_style(value)
    return style.put_inside() if inside else style


def _attempt(step: Callable[[], _T], place: object, key: object, findings: list[Finding]) -> _T | None:
    """Return what `step` returns; a fault becomes a finding of `key` and gives None."""
    try:
        return step()
    except StyleFault as fault:
        findings.append(_finding(fault, str(place), str(key)))
        return None


def _expand(modules: Mapping[str, nn.Module], key: object, optional: bool) -> list[str]:
    """Return the paths of the modules that a plan key means.

    Raises:
        StyleFault: the key is malformed, or matches nothing without being `optional`.
    """
    if not isinstance(key, str):
        raise StyleFault(
            "BadKey", f"a plan key is a module path, not a {type(key).__name__}", "write a string"
        )
    if key.count("*") > 1:
        raise StyleFault(
            "TwoWildcards", "a key may hold one '*' at most", "write one key for each inner list"
        )
    prefix, star, suffix = key.partition("*")
    if not star:
        paths = [key]
    else:
        container = modules.get(prefix.removesuffix(".")) if prefix.endswith(".") or not prefix else None
        if container is not None and not isinstance(container, nn.ModuleList):
            raise StyleFault(
                "NotAModuleList",
                f"'*' stands for the elements of an nn.ModuleList, {prefix.removesuffix('.') or 'the model'!r} "
                f"is a {type(container).__name__}",
                "spell out the paths, one key each",
            )
        paths = [f"{prefix}{i}{suffix}" for i in range(len(container))] if container is not None else []
    # Some blocks may lack a child (the last block of SD3 has no ff_context): those are skipped.
    found = [path for path in paths if path in modules]
    if not found and not optional:
        raise StyleFault("UnmatchedKey", "matches no module of the model", _nearest(modules, key))
    return found


def _nearest(modules: Mapping[str, nn.Module], key: str) -> str:
    """Return a hint with the patterns that look most like `key`."""
    patterns = dict.fromkeys(pattern_of(modules, path) for path in modules if path)
    close = difflib.get_close_matches(key, patterns, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else "take the key out"


def pattern_of(modules: Mapping[str, nn.Module], path: str) -> str:
    """Return `path` with its first list index replaced by `*`."""
    parts = path.split(".")
    for i in range(1, len(parts)):
        if isinstance(modules[".".join(parts[:i])], nn.ModuleList):
            return ".".join([*parts[:i], "*", *parts[i + 1 :]])
    return path


def _plan_module(
    module: nn.Module, path: str, key: str, style: Style, degree: int, findings: list[Finding]
) -> PlannedModule | None:
    """Apply one style to one module; faults become findings and give None."""
    try:
        layouts = style.layouts(module)
    except StyleFault as fault:
        findings.append(_finding(fault, path, key))
        return None
    faults = [_finding(fault, path, key) for fault in style.faults(module, degree)]
    findings += faults
    if faults:
        return None
    return PlannedModule(path, key, style, layouts, style.attributes(module, degree))


def _shared(model: nn.Module, layouts: Mapping[str, Layout]) -> Iterator[Finding]:
    """Yield a finding for each parameter that several modules share and the plan would cut differently."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    for first, *others in names.values():
        for other in others:
            if layouts.get(first, Replicated()) != layouts.get(other, Replicated()):
                yield Finding(
                    kind="SharedParameter",
                    module=first,
                    message=f"is one tensor with {other}, and the plan cuts the two differently",
                    fix="plan both modules the same way, or leave both whole",
                )


def _finding(fault: StyleFault, module: str, key: str) -> Finding:
    return Finding(fault.kind, module, fault.message, fault.fix, key)


def _collapse(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings with those that repeat from block to block merged into one with a count."""
    merged: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        same = (finding.kind, finding.plan_key or finding.module, finding.message, finding.fix)
        first = merged.get(same)
        merged[same] = replace(first, count=first.count + 1) if first else finding
    return list(merged.values())
