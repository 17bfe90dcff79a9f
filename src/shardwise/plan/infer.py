"""A plan by dataflow: found by the check's own repairs, without looking at a name.

One Linear is tried as colwise; what the check finds says what else must change, until nothing is found or no
repair is left. What belongs together that way is a group. Groups that want the same Linear are judged by the
bytes that each all-reduce saves. Large Linears that stay whole and read whole inputs then split their input.

The search runs on few blocks (`plan.subject`), and what it finds is checked on the whole model at the end.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import nn

from shardwise.errors import PlanError
from shardwise.plan.check import CheckReport, Localize, check_plan
from shardwise.plan.files import plan_as_python, style_to_json
from shardwise.plan.layout import Shard
from shardwise.plan.linears import ColwiseParallel, RowwiseParallel
from shardwise.plan.mend import Entries, Taken, divide, mend
from shardwise.plan.resolve import Plan, resolve
from shardwise.plan.styles import DivideAttributes, as_style
from shardwise.plan.subject import LARGE, DeadEnd, Subject, shortened
from shardwise.plan.trace import quiet_forward

MOST_REPAIRS = 40
"""A group that needs more repairs than this is given up; attention with norms over all heads needs five."""


@dataclass(frozen=True)
class Group:
    """Modules that are only right together, and why they are.

    Attributes:
        seed: The pattern that was tried first.
        entries: Pattern -> style.
        steps: The repairs that were applied: what was changed, and what had been found.
        bytes_saved: Bytes of weights that a rank does not hold.
        all_reduces: Sums over the ranks that one forward makes for it.
    """

    seed: str
    entries: Mapping[str, object]
    steps: tuple[str, ...]
    bytes_saved: int
    all_reduces: int

    @property
    def score(self) -> float:
        """Bytes saved for each all-reduce."""
        return self.bytes_saved / max(1, self.all_reduces)

    def __str__(self) -> str:
        """Return the entries, what they save and cost, and the repairs that led to them."""
        lines = [
            f"{self.seed}: saves {self.bytes_saved:,} bytes per rank for {self.all_reduces} all-reduces",
            *(f"  {key}: {as_style(style).label}" for key, style in self.entries.items()),
            *(f"    because {step}" for step in self.steps),
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Inferred:
    """A plan that was found by dataflow, and what speaks for it.

    Attributes:
        plan: Pattern -> style, ready to be declared or passed on.
        groups: What belongs together, in the order in which it was found.
        whole: Pattern of each Linear in a block list that stays whole -> why.
        report: What the check says of the plan on the whole model; always without findings.
        checks: How many plans were tried.
        seconds: What it took.
        proved: True: the check has followed it through the model's forward.
    """

    plan: Plan
    groups: tuple[Group, ...]
    whole: Mapping[str, str]
    report: CheckReport
    checks: int = 0
    seconds: float = 0.0
    proved: ClassVar[bool] = True

    def as_python(self) -> str:
        """Return the plan as source code, ready to paste into a class."""
        return plan_as_python(self.plan)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain data that `json` can write."""
        return {
            "proved": self.proved,
            "plan": {key: style_to_json(style) for key, style in self.plan.items()},
            "groups": [
                {
                    "seed": group.seed,
                    "entries": {key: style_to_json(style) for key, style in group.entries.items()},
                    "steps": list(group.steps),
                    "bytes_saved": group.bytes_saved,
                    "all_reduces": group.all_reduces,
                }
                for group in self.groups
            ],
            "whole": dict(self.whole),
            "check": self.report.as_dict(),
            "checks": self.checks,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        """Return the plan group by group with reasons, what stays whole and why, and the verdict of the check."""
        whole = [f"{key} stays whole: {reason}" for key, reason in self.whole.items()]
        end = f"{self.checks} plans tried in {self.seconds:.1f} s; {self.report}"
        return "\n".join([*map(str, self.groups), *whole, end])


def infer_plan(model: nn.Module, inputs: Mapping[str, Any], degree: int, localize: Localize) -> Inferred:
    """Find a plan for a model by dataflow.

    Args:
        model: Without weights (meta device), in evaluation mode; not changed.
        inputs: Keyword arguments of its forward.
        degree: Number of ranks.
        localize: Builds a rank's part of a model without weights; the runtime half provides it.

    Raises:
        PlanError: the degree does not divide the model's heads, or nothing can be sharded.
    """
    start = time.perf_counter()
    whole = Subject(_bare(model), inputs, degree, localize)
    search = _Search(shortened(whole))
    search.run()
    groups = tuple(_measured(whole, group) for group in search.groups)
    plan = whole.in_order(search.plan)
    plan, report = _settled(model, whole, plan)
    checks, seconds = search.subject.checks, time.perf_counter() - start
    return Inferred(plan, groups, _unplanned(whole, search), report, checks, seconds)


@dataclass
class _Search:
    """The groups that have been accepted so far, and why other Linears were not."""

    subject: Subject
    groups: list[Group] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def plan(self) -> dict[str, object]:
        """The entries of all groups."""
        return _joined(self.groups)

    def run(self) -> None:
        """Try every Linear as a seed, then let large ones that are left split their input."""
        pending = list(self.subject.order)
        while pending:
            seed = pending.pop(0)
            owner = self._owner(seed)
            if owner is not None and as_style(owner.entries[seed]).leaves_shard:
                continue
            try:
                pending += self._try(seed, [owner] if owner else [])
            except DeadEnd as reason:
                if owner is None:
                    self.reasons[seed] = str(reason)
        self._split_inputs()

    def _try(self, seed: str, rivals: list[Group]) -> list[str]:
        """Accept the group of a seed; return the Linears that it takes from others and does not use.

        Raises:
            DeadEnd: there is none, or it saves less for each all-reduce than those that it would replace.
        """
        while True:
            base = _joined(group for group in self.groups if group not in rivals)
            try:
                group = self._grow(base, seed)
                break
            except Taken as taken:
                rival = self._owner(taken.key)
                if rival is None or rival in rivals:
                    raise DeadEnd(str(taken)) from taken
                rivals.append(rival)
        self._must_be_better(group, rivals)
        self.groups = [*(other for other in self.groups if other not in rivals), group]
        freed = [key for rival in rivals for key in rival.entries if key not in self.plan]
        return [key for key in freed if key in self.subject.order]

    def _must_be_better(self, group: Group, rivals: list[Group]) -> None:
        if not rivals:
            return
        saved = sum(rival.bytes_saved for rival in rivals)
        score = saved / max(1, sum(rival.all_reduces for rival in rivals))
        if group.score <= score or group.bytes_saved < saved:
            seeds = ", ".join(rival.seed for rival in rivals)
            raise DeadEnd(f"with it, fewer bytes would be saved for each all-reduce than with {seeds}")

    def _grow(self, base: Entries, seed: str) -> Group:
        """Return the group of a seed: repair until the check finds nothing, layouts first and then sizes."""
        plan: dict[str, object] = {**base, seed: "colwise"}
        steps: list[str] = []
        for _ in range(MOST_REPAIRS):
            finding = self.subject.first_fault(plan)
            if finding is None:
                break
            repaired = mend(self.subject, plan, finding)
            steps.append(f"{_changes(plan, repaired)}: {finding.message}")
            plan = repaired
        plan = self._divided(plan, steps)
        entries = {key: style for key, style in plan.items() if base.get(key) != style}
        return _group(self.subject, seed, entries, tuple(steps))

    def _divided(self, plan: dict[str, object], steps: list[str]) -> dict[str, object]:
        """Return the plan with the attributes divided that the second pass asks for."""
        report = self.subject.check(plan)
        for _ in range(MOST_REPAIRS):
            if report.ok:
                return plan
            finding = report.findings[0]
            repaired, report = divide(self.subject, plan, finding)
            steps.append(f"{_changes(plan, repaired)}: {finding.message}")
            plan = repaired
        raise DeadEnd("there is no end to its repairs")

    def _split_inputs(self) -> None:
        """Let each large Linear that is left whole, and reads a whole input, split its input."""
        weights = sum(p.numel() for p in self.subject.model.parameters())
        for key in self.subject.order:
            if key in self.plan or self.subject.weights(key) < LARGE * weights:
                continue
            entries = {key: "rowwise_split_input"}
            step = f"it is large, its input is whole, and as colwise: {self.reasons.get(key, '')}"
            try:
                group = _group(self.subject, key, entries, (step,))
            except DeadEnd:  # the degree does not divide its input
                continue
            if self.subject.check({**self.plan, **entries}).ok:
                self.groups.append(group)

    def _owner(self, key: str) -> Group | None:
        return next((group for group in self.groups if key in group.entries), None)


def _joined(groups: Any) -> dict[str, object]:
    return {key: style for group in groups for key, style in group.entries.items()}


def _changes(before: Entries, after: Entries) -> str:
    """Return the entries that differ, as text."""
    changed = [(key, style) for key, style in after.items() if before.get(key) != style]
    return ", ".join(f"{key} {as_style(style).label}" for key, style in changed)


def _group(subject: Subject, seed: str, entries: Entries, steps: tuple[str, ...]) -> Group:
    """Return a group with what it saves and costs on a subject."""
    resolved = subject.resolve(entries)
    sizes = {name: p.nbytes for name, p in subject.model.named_parameters()}
    cut = sum(sizes[n] for n, layout in resolved.layouts.items() if isinstance(layout, Shard) and n in sizes)
    saved = cut - cut // subject.degree
    return Group(
        seed,
        entries,
        steps,
        saved,
        sum(m.style.sums(subject.model.get_submodule(m.path)) for m in resolved.modules),
    )


def _measured(whole: Subject, group: Group) -> Group:
    """Return a group with what it saves and costs on the whole model, in one forward."""
    measured = _group(whole, group.seed, group.entries, group.steps)
    twin, counter = whole.localize(whole.model, whole.resolve(group.entries), 0)
    quiet_forward(twin, copy.deepcopy(dict(whole.inputs)))
    return replace(measured, all_reduces=counter.traffic.all_reduces)


def _unplanned(whole: Subject, search: _Search) -> dict[str, str]:
    """Return why each Linear in a block list that is not planned stays whole."""
    unseen = "the example inputs do not reach it"
    order, plan = whole.order, search.plan
    return {
        key: search.reasons.get(key, unseen) if key in order else unseen
        for key in whole.candidates
        if key not in plan
    }


def _settled(model: nn.Module, whole: Subject, found: Entries) -> tuple[dict[str, object], CheckReport]:
    """Return the shortest plan that means what was found, proved on the whole model, and its report.

    Most head counts are divided without an entry: entries are added only where that is refused or wrong.

    Raises:
        PlanError: it is not right on the whole model.
    """
    divided = {key: style for key, style in found.items() if isinstance(style, DivideAttributes)}
    plan = {key: style for key, style in found.items() if key not in divided}
    while True:
        try:
            report = check_plan(model, resolve(model, plan, whole.degree), whole.inputs, whole.localize)
            if report.ok:
                return whole.in_order(plan), report
            error = PlanError(report.findings, f"{type(model).__name__}: the plan that was inferred")
        except PlanError as refused:
            error = refused
        keys = {whole.pattern(finding.module) for finding in error.findings}
        known = {key for key in keys - set(plan) if key in divided or key in _guarded(whole, error)}
        if "" in divided.keys() - plan.keys():
            known = {""}  # what the model itself counts shows in other modules
        if not known:
            raise error
        plan |= {key: divided.get(key, DivideAttributes()) for key in known}


def _guarded(whole: Subject, error: PlanError) -> set[str]:
    """Return the modules whose head counts the guards cannot tell: the check has told them."""
    kinds = ("HalfPlanned", "AmbiguousHeads", "HeadsNotFound", "LocalShape", "LocalScalar")
    return {whole.pattern(f.module) for f in error.findings if f.kind in kinds}


def _bare(model: nn.Module) -> nn.Module:
    """Return a copy of a model without the block sizes that it declares: inference is to find them."""
    bare = copy.deepcopy(model)
    for module in bare.modules():
        for style in (ColwiseParallel, RowwiseParallel):
            vars(module).pop(style.declared_attribute, None)
    return bare
