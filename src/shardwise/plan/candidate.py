"""A candidate plan from the names of modules, for a model of which no example inputs are known.

What the names claim (`plan.names`) of each block becomes patterns; each group of patterns is then judged by the
guards of `plan.resolve`, and stays whole with the reason where they refuse it. That no guard refuses a plan does
not make it right: it is unproved until the static check has seen a forward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from shardwise.errors import Finding, PlanError
from shardwise.plan.files import plan_as_python, style_to_json
from shardwise.plan.names import Claim, Unclear, claims, rotary_tables
from shardwise.plan.resolve import Plan, resolve
from shardwise.plan.styles import SliceOutput, as_style
from shardwise.plan.subject import LARGE, Outline


@dataclass(frozen=True)
class NamedGroup:
    """Patterns that are only right together, and what their names say that they are.

    Attributes:
        kind: `"attention"`, `"feed-forward"`, `"modulation"` or `"table"`.
        owner: Pattern of the module that they belong to.
        linears: Patterns of its Linears.
        entries: Pattern -> style; empty if they stay whole.
        reason: Why they are shared like this, or why they stay whole.
        width: Features of all heads, of an attention; 0 of anything else.
    """

    kind: str
    owner: str
    linears: tuple[str, ...]
    entries: Mapping[str, object]
    reason: str
    width: int = 0

    def refused(self, reason: str) -> NamedGroup:
        """Return the group as one that stays whole."""
        return replace(self, entries={}, reason=reason)

    def __str__(self) -> str:
        """Return the entries and the reason for them."""
        lines = [f"  {key}: {as_style(style).label}" for key, style in self.entries.items()]
        return "\n".join([f"{self.owner}: {self.reason}", *lines])


@dataclass(frozen=True)
class Candidate:
    """A plan that was derived from the names of modules, and is not proved.

    Attributes:
        model: Name of the model's class.
        plan: Pattern -> style, ready to be checked, declared or passed on.
        groups: What belongs together, in the order of the model's modules.
        whole: Pattern of each Linear in a block list that stays whole -> why.
        degree: Number of ranks that the guards judged it for.
        proved: False: nothing has run the model.
    """

    model: str
    plan: Plan
    groups: tuple[NamedGroup, ...]
    whole: Mapping[str, str]
    degree: int
    proved: ClassVar[bool] = False

    @property
    def caution(self) -> str:
        """What to know before using it."""
        return (
            f"unproved: derived from the names of the modules of {self.model}, of which no example inputs are known; "
            "pass example_inputs to have it checked, or compare numbers with verify"
        )

    def as_python(self) -> str:
        """Return the plan as source code, ready to paste into a class, under a comment that it is not proved."""
        return f"# {self.caution}\n{plan_as_python(self.plan)}"

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain data that `json` can write."""
        return {
            "proved": self.proved,
            "caution": self.caution,
            "plan": _as_json(self.plan),
            "groups": [
                {"owner": g.owner, "kind": g.kind, "entries": _as_json(g.entries), "reason": g.reason}
                for g in self.groups
            ],
            "whole": dict(self.whole),
            "tp_degree": self.degree,
        }

    def __str__(self) -> str:
        """Return that it is not proved, the plan group by group with reasons, and what stays whole and why."""
        keys: dict[str, list[str]] = defaultdict(list)
        for key, reason in self.whole.items():
            keys[reason].append(key)
        whole = [f"{', '.join(alike)}: whole, because {reason}" for reason, alike in keys.items()]
        return "\n".join([self.caution, *map(str, self.groups), *whole])


def candidate(model: nn.Module, degree: int, uneven: bool = False) -> Candidate:
    """Derive a plan from the names of a model's modules.

    Args:
        model: Its parameters may be on the meta device; not changed.
        degree: Number of ranks.
        uneven: Whether heads that `degree` does not divide are shared in unequal numbers.

    Raises:
        PlanError: the degree does not divide the model's heads, or nothing can be sharded.
    """
    outline = Outline(model)
    named = list(_groups(outline))
    groups = _with_tables(outline, [_judged(model, group, degree, uneven) for group in named])
    shared = tuple(group for group in groups if group.entries)
    plan = outline.in_order(_joined(shared))
    if not plan:
        raise _nothing(model, named, groups, degree)
    planned = {outline.pattern(m.path) for m in resolve(model, plan, degree, uneven=uneven).modules}
    reasons = {key: group.reason for group in groups for key in group.linears}
    whole = {
        key: reasons.get(key, "its name says nothing") for key in outline.candidates if key not in planned
    }
    return Candidate(type(model).__name__, plan, shared, whole, degree)


def _groups(outline: Outline) -> Iterator[NamedGroup]:
    """Yield what is claimed of single blocks as patterns, in the order of the model's modules."""
    found: dict[tuple[str, str], list[Claim]] = defaultdict(list)
    for claim in claims(outline):
        found[outline.pattern(claim.owner), claim.kind].append(claim)
    for (owner, kind), alike in sorted(found.items(), key=lambda item: outline.places[item[0][0]]):
        linears = tuple(dict.fromkeys(outline.pattern(path) for claim in alike for path in claim.linears))
        group = NamedGroup(kind, owner, linears, {}, alike[0].reason, max(claim.width for claim in alike))
        try:
            group = replace(group, entries=_agreed(outline, alike))
        except Unclear as why:
            group = group.refused(str(why))
        yield group if _worth_it(outline, group) else group.refused(_SMALL)


def _agreed(outline: Outline, alike: list[Claim]) -> dict[str, object]:
    """Return the entries of claims as patterns.

    Raises:
        Unclear: one of the claims is not clear, or the blocks differ.
    """
    entries: dict[str, object] = {}
    for claim in alike:
        if not claim.entries:
            raise Unclear(claim.reason)
        for path, style in claim.entries.items():
            if entries.setdefault(outline.pattern(path), style) != style:
                raise Unclear(f"its blocks differ: {path} is unlike those before it")
    claimed = {path for claim in alike for path in claim.entries}
    for path in outline.modules:
        if outline.pattern(path) in entries and path not in claimed:
            raise Unclear(f"its blocks differ: {path} is in none of its kind")
    return entries


_SMALL = f"a modulation of less than {LARGE:.1%} of the weights, not worth an all-reduce in each block"


def _worth_it(outline: Outline, group: NamedGroup) -> bool:
    """Return whether a group saves enough for the all-reduce that it costs."""
    total = sum(p.numel() for p in outline.model.parameters())
    return group.kind != "modulation" or outline.weights(group.linears[0]) >= LARGE * total


def _judged(model: nn.Module, group: NamedGroup, degree: int, uneven: bool) -> NamedGroup:
    """Return a group, as one that stays whole if the guards refuse it."""
    try:
        if group.entries:
            resolve(model, group.entries, degree, uneven=uneven)
    except PlanError as error:
        finding = error.findings[0]
        if finding.kind == "NothingSharded":  # a lone projection, which stays whole without a fault
            return group.refused(f"tp_degree {degree} does not divide what it reads")
        return group.refused(f"{finding.kind}: {finding.message}")
    return group


def _with_tables(outline: Outline, groups: list[NamedGroup]) -> list[NamedGroup]:
    """Return the groups with a slice of each rotary table that is over the features of all heads.

    An attention that may read such a table stays whole where it cannot be told how the table is laid out, or
    where another one that may read it stays whole.
    """
    tables: dict[int, dict[str, bool]] = defaultdict(dict)
    for path, width, by_heads in rotary_tables(outline):
        tables[width][path] = by_heads
    sliced: list[NamedGroup] = []
    for width, paths in tables.items():
        about = f"a rotary table over {width} features, those of all heads"
        readers = [group for group in groups if group.width == width]
        if any(paths.values()) or not all(group.entries for group in readers):
            why = (
                "one may be laid out by heads"
                if any(paths.values())
                else "some attentions of that width are whole"
            )
            reason = f"it may read {about} ({', '.join(paths)}), and {why}"
            groups = [g.refused(reason) if g in readers and g.entries else g for g in groups]
        elif readers:
            sliced += [NamedGroup("table", path, (), {path: SliceOutput(-1)}, about) for path in paths]
    return [*sliced, *groups]


def _nothing(
    model: nn.Module, named: Iterable[NamedGroup], groups: Iterable[NamedGroup], degree: int
) -> PlanError:
    """Return the error for a model nothing of which can be shared: what the guards say of it, or why all is whole."""
    try:
        resolve(model, _joined(named), degree)
    except PlanError as error:
        if error.findings[0].kind != "NothingSharded":
            return error
    fix = "pass example_inputs, with which a plan is found by dataflow, or write the plan"
    name, message = type(model).__name__, "the names of its modules do not say what could be sharded"
    reasons = [Finding("StaysWhole", group.owner, group.reason, fix) for group in groups]
    return PlanError([Finding("NothingSharded", name, message, fix), *reasons], name)


def _joined(groups: Iterable[NamedGroup]) -> dict[str, object]:
    return {key: style for group in groups for key, style in group.entries.items()}


def _as_json(plan: Plan) -> dict[str, Any]:
    return {key: style_to_json(style) for key, style in plan.items()}
