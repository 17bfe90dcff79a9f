"""The static check: is a plan right, before any weight is read?

Pass 1 (`layout_pass`) runs the unmodified forward on whole shapes and follows the layout of every value: what a
style needs must arrive, what a function does must commute with the cut, what the model returns must be whole.
Pass 2 (`shape_pass`) runs the localised model, whose sizes are those of one rank, and compares every shape,
constant and slice start with what the layouts predict. The second runs only if the first found nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from shardwise.plan.findings import DIVIDE_FIX, CheckFinding
from shardwise.plan.layout_pass import FirstFinding, Found, LayoutTracer
from shardwise.plan.repair import Divide
from shardwise.plan.resolve import ResolvedPlan
from shardwise.plan.shape_pass import ShapeTracer, compare, compare_outputs

INCONCLUSIVE = frozenset({"NoRule", "ForwardFailed"})
"""Kinds of findings that say the check could not decide, not that the plan is wrong."""

Localize = Callable[[nn.Module, ResolvedPlan, int], tuple[nn.Module, "Counter"]]
"""Returns a rank's part of a model without weights, and what counts its traffic; the runtime half provides it."""


class Counter(Protocol):
    """A stand-in for a process group that counts."""

    @property
    def traffic(self) -> Any:
        """Numbers of collectives and bytes."""


@dataclass(frozen=True)
class CheckReport:
    """What the static check found.

    Attributes:
        findings: Every independent fault, each with a repair where one is known.
        degree: Number of ranks the plan was checked for.
        calls: Torch functions seen in the forward.
        sharded_calls: Those that a shard went into.
        all_reduces: Sums over the ranks in one forward; None if the second pass did not run.
        seconds: What the check took.
    """

    findings: tuple[CheckFinding, ...]
    degree: int
    calls: int = 0
    sharded_calls: int = 0
    all_reduces: int | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def wrong(self) -> tuple[CheckFinding, ...]:
        """The findings that say the plan is wrong, without those that could not decide."""
        return tuple(finding for finding in self.findings if finding.kind not in INCONCLUSIVE)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data that `json` can write."""
        names = ("kind", "module", "plan_key", "source", "message", "fix", "count")
        return {
            "ok": self.ok,
            "tp_degree": self.degree,
            "calls": self.calls,
            "sharded_calls": self.sharded_calls,
            "all_reduces": self.all_reduces,
            "seconds": self.seconds,
            "findings": [{name: getattr(finding, name) for name in names} for finding in self.findings],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CheckReport:
        """Return the report that `as_dict` was made of, without the repairs of its findings."""
        findings = tuple(CheckFinding(**finding) for finding in data["findings"])
        counted = {name: data[name] for name in ("calls", "sharded_calls", "all_reduces", "seconds")}
        return cls(findings, data["tp_degree"], **counted)

    def __str__(self) -> str:
        """Return the verdict, and the findings."""
        seen = f"{self.calls} calls, {self.sharded_calls} of them on shards, {self.seconds:.1f} s"
        if self.ok:
            return f"the plan is right at tp_degree {self.degree} ({seen}, {self.all_reduces} all-reduces)"
        head = (
            f"{len(self.findings)} finding{'s' if len(self.findings) > 1 else ''} at tp_degree {self.degree}"
        )
        return "\n".join([f"{head} ({seen})", *map(str, self.findings)])


def check_plan(
    model: nn.Module,
    plan: ResolvedPlan,
    inputs: Mapping[str, Any],
    localize: Localize,
) -> CheckReport:
    """Check a resolved plan on a model and example inputs.

    Args:
        model: The whole model; parameters may be on the meta device. Not changed.
        plan: What a plan means for it.
        inputs: Keyword arguments of its forward, real tensors; each pass gets a copy.
        localize: Builds the model of the second pass.
    """
    start, findings, traffic = time.perf_counter(), list[CheckFinding](), None
    # Of ranks that hold unequal numbers of heads the first has the most, and the last the fewest.
    for rank in (0, plan.degree - 1) if plan.uneven else (0,):
        first = LayoutTracer(model, plan, rank)
        failed = _run_first(first, inputs)
        findings = list(first.findings)
        if not findings and not failed:
            local, counter = localize(model, plan, rank)
            findings = _run_second(first, ShapeTracer(local, model, plan), inputs)
            traffic = counter.traffic.all_reduces
        if findings:
            break
    return CheckReport(
        findings=_collapse(findings),
        degree=plan.degree,
        calls=len(first.events),
        sharded_calls=sum(event.hot for event in first.events),
        all_reduces=traffic,
        seconds=time.perf_counter() - start,
    )


def first_fault(model: nn.Module, plan: ResolvedPlan, inputs: Mapping[str, Any]) -> CheckFinding | None:
    """Return the first thing that pass 1 finds, for a plan that is being searched; None if there is nothing."""
    tracer = FirstFinding(model, plan)
    with suppress(Found):
        _run_first(tracer, inputs)
    return next(iter(tracer.findings), None)


def _run_first(tracer: LayoutTracer, inputs: Mapping[str, Any]) -> bool:
    """Run the first pass; return whether the forward failed."""
    try:
        tracer.run(inputs)
    except Exception as error:
        path, source, _ = tracer.failed_at or ("", "?", "")
        message = f"the forward fails without weights: {type(error).__name__}: {str(error)[:200]}"
        fix = "check the plan with other example inputs, or verify it numerically"
        tracer.findings.append(CheckFinding("ForwardFailed", path, message, fix, source=source))
        return True
    tracer.check_output()
    return False


def _run_second(first: LayoutTracer, second: ShapeTracer, inputs: Mapping[str, Any]) -> list[CheckFinding]:
    """Run the second pass and return its findings."""
    error: Exception | None = None
    try:
        second.run(inputs)
    except Exception as caught:
        error = caught
    findings = compare(first.events, second.events, complete=error is None)
    if error is None and not findings:
        return compare_outputs(first.output, second.output)
    if error is not None and not findings:
        path, source, function = second.failed_at or (second.path, "?", "the forward")
        message = f"on a rank {function} raises {type(error).__name__}: {str(error)[:160]}"
        repair = Divide(path, None, None)
        findings.append(
            CheckFinding("LocalForwardFailed", path, message, DIVIDE_FIX, source=source, repair=repair)
        )
    return findings


def _collapse(findings: Iterable[CheckFinding]) -> tuple[CheckFinding, ...]:
    """Return the findings with those that repeat merged: from block to block, and of one fault at several lines."""
    merged: dict[tuple[str, ...], CheckFinding] = {}
    for finding in findings:
        same = (finding.kind, finding.source or "", _blockless(finding.module), _blockless(finding.message))
        first = merged.get(same)
        merged[same] = replace(first, count=first.count + 1) if first else finding
    faults: dict[tuple[str, ...], CheckFinding] = {}
    for finding in merged.values():
        root = _blockless(repr(finding.repair)) if finding.repair else finding.message
        faults.setdefault((finding.kind, _blockless(finding.module), root), finding)
    return tuple(faults.values())


def _blockless(text: str) -> str:
    return re.sub(r"\.\d+(?=[.,\s'\"]|$)", ".*", text)
