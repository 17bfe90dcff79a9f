"""What a plan saves and costs, before any weight is read: bytes per rank, what stays whole and why, traffic.

Everything is counted on a model without weights. Degrees that the plan cannot have are part of the answer.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from torch import nn

from shardwise.errors import PlanError
from shardwise.plan.check import Localize
from shardwise.plan.files import plan_as_python
from shardwise.plan.layout import Shard
from shardwise.plan.resolve import Plan, PlannedModule, ResolvedPlan, fitting_degrees, pattern_of, resolve
from shardwise.plan.styles import as_style
from shardwise.plan.subject import LARGE
from shardwise.plan.trace import quiet_forward


@dataclass(frozen=True)
class PatternShare:
    """What one plan key covers: its style, how many modules it matches, and the parameters it shards."""

    style: str
    modules: int
    parameters: int


@dataclass(frozen=True)
class Whole:
    """Parameters that every rank holds, of all modules of one pattern, and why."""

    pattern: str
    parameters: int
    share: float
    """Of the model's parameters, 0 to 1."""
    reason: str


@dataclass(frozen=True)
class RankShare:
    """What a rank holds and sends at one degree.

    Attributes:
        parameters_per_rank: Parameters that the largest rank holds.
        weight_bytes_per_rank: Their bytes in the dtype of the estimate.
        replicated_share: Share of them that every other rank holds too, 0 to 1.
        all_reduces: Sums over the ranks in one forward; None without example inputs.
        all_reduce_bytes: Bytes that a rank puts into them, for inputs of the shapes stated; None likewise.
    """

    parameters_per_rank: int
    weight_bytes_per_rank: int
    replicated_share: float
    all_reduces: int | None
    all_reduce_bytes: int | None

    def __str__(self) -> str:
        """Return parameters, bytes, the share that every rank holds, and the traffic."""
        gib, same = self.weight_bytes_per_rank / 2**30, f"{self.replicated_share:.1%} of it on every rank"
        held = f"{self.parameters_per_rank:,} parameters, {gib:.2f} GiB, {same}"
        return held if self.all_reduces is None else (
            f"{held}; {self.all_reduces} all-reduces, {self.all_reduce_bytes:,} bytes"
        )  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """A plan for one configuration of a model, and what it means at each degree asked for.

    Attributes:
        model: Name of the class.
        plan: Pattern -> style.
        proved: Whether the plan is declared or was found by dataflow, and not derived from names.
        parameters: Number of parameters of the whole model.
        itemsize: Bytes of one parameter.
        patterns: What each plan key covers.
        whole: What stays whole, the largest first.
        degrees: Degree -> what a rank holds and sends.
        impossible: Degree -> why the plan cannot have it.
        possible_degrees: All degrees up to 64 that fit blocks and heads.
        inputs: Shapes of the tensors that the traffic was counted for, by argument.
    """

    model: str
    plan: Plan
    proved: bool
    parameters: int
    itemsize: int
    patterns: Mapping[str, PatternShare]
    whole: tuple[Whole, ...]
    degrees: Mapping[int, RankShare]
    impossible: Mapping[int, str]
    possible_degrees: tuple[int, ...]
    inputs: Mapping[str, tuple[int, ...]]

    def as_python(self) -> str:
        """Return the plan as source code, ready to paste into a class."""
        return plan_as_python(self.plan)

    def __str__(self) -> str:
        """Return the plan, what stays whole and why, and a line for each degree."""
        origin = "" if self.proved else ", derived from names and unproved"
        shapes = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in self.inputs.items())
        return "\n".join(
            [
                f"{self.model}: {self.parameters:,} parameters of {self.itemsize} bytes{origin}",
                *(f"  {key}: {share.style}, {_counted(share)}" for key, share in self.patterns.items()),
                "whole on every rank:",
                *(
                    f"  {g.pattern}: {g.parameters:,} ({g.share:.2%}), {g.reason}"
                    for g in self.whole[:_LISTED]
                ),
                *([f"  and {len(self.whole) - _LISTED} smaller ones"] if len(self.whole) > _LISTED else []),
                f"sent in one forward, for {shapes}:"
                if shapes
                else "no example inputs: traffic is not known",
                *(f"  tp_degree {degree}: {share}" for degree, share in self.degrees.items()),
                *(f"  tp_degree {degree} is impossible: {why}" for degree, why in self.impossible.items()),
                f"possible degrees up to 64: {', '.join(map(str, self.possible_degrees))}",
            ]
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate as plain data that `json` can write; degrees are strings, as JSON has them."""
        return {
            "model": self.model,
            "proved": self.proved,
            "parameters": self.parameters,
            "bytes_per_parameter": self.itemsize,
            "patterns": {key: asdict(share) for key, share in self.patterns.items()},
            "whole": [asdict(group) for group in self.whole],
            "degrees": {str(degree): asdict(share) for degree, share in self.degrees.items()},
            "impossible": {str(degree): reason for degree, reason in self.impossible.items()},
            "possible_degrees": list(self.possible_degrees),
            "inputs": {name: list(shape) for name, shape in self.inputs.items()},
        }


_LISTED = 20  # rows of what stays whole, in print


def _counted(share: PatternShare) -> str:
    modules = "1 module" if share.modules == 1 else f"{share.modules} modules"
    return f"{modules}, {share.parameters:,} parameters" if share.parameters else modules


def estimate_plan(
    model: nn.Module,
    plan: Plan,
    degrees: Iterable[int],
    inputs: Mapping[str, Any] | None,
    localize: Localize,
    itemsize: int = 2,
    proved: bool = True,
    uneven: bool = False,
) -> Estimate:
    """Return what `plan` means for a model without weights at several degrees.

    Args:
        model: On the meta device; not changed.
        plan: Module patterns and styles.
        degrees: Numbers of ranks.
        inputs: Keyword arguments of its forward, to count the traffic; None leaves it out.
        localize: Builds a rank's part of a model without weights; the runtime half provides it.
        itemsize: Bytes of one parameter; 2 is bfloat16.
        proved: What the estimate says of where the plan comes from.
        uneven: Whether heads that a degree does not divide are shared in unequal numbers.

    Raises:
        PlanError: the plan does not fit the model at any degree.
    """
    found: dict[int, RankShare] = {}
    impossible: dict[int, str] = {}
    possible = fitting_degrees(model, plan, uneven)
    for degree in degrees:
        try:
            resolved = resolve(model, plan, degree, uneven=uneven)
        except PlanError as error:
            impossible[degree] = "; ".join(f"{f.module}: {f.message}" for f in error.findings[:3])
        else:
            found[degree] = _rank_share(model, resolved, inputs, localize, itemsize)
    smallest = resolve(model, plan, next((degree for degree in possible if degree > 1), 1), uneven=uneven)
    return Estimate(
        model=type(model).__name__,
        plan=plan,
        proved=proved,
        parameters=sum(p.numel() for p in model.parameters()),
        itemsize=itemsize,
        patterns=_patterns(model, plan, smallest),
        whole=tuple(sorted(_whole(model, smallest), key=lambda group: -group.parameters)),
        degrees=found,
        impossible=impossible,
        possible_degrees=possible,
        inputs={
            name: tuple(value.shape) for name, value in (inputs or {}).items() if hasattr(value, "shape")
        },
    )


def _rank_share(
    model: nn.Module,
    plan: ResolvedPlan,
    inputs: Mapping[str, Any] | None,
    localize: Localize,
    itemsize: int,
) -> RankShare:
    held = replicated = 0
    for name, parameter in model.named_parameters():
        layout = plan.layout(name)
        held += prod(layout.local_shape(tuple(parameter.shape), 0, plan.degree))
        replicated += 0 if isinstance(layout, Shard) else parameter.numel()
    calls = sent = None
    if plan.degree == 1:
        calls, sent = 0, 0  # an ordinary model
    elif inputs is not None:
        twin, counter = localize(model, plan, 0)
        quiet_forward(twin, copy.deepcopy(dict(inputs)))
        calls = counter.traffic.all_reduces
        sent = counter.traffic.all_reduce_bytes * itemsize // _itemsize(model)
    return RankShare(held, held * itemsize, replicated / held, calls, sent)


def _itemsize(model: nn.Module) -> int:
    return next(model.parameters()).dtype.itemsize


def _patterns(model: nn.Module, plan: Plan, resolved: ResolvedPlan) -> dict[str, PatternShare]:
    """Return what each key covers; what is only derived from it (head counts) is not counted as a module of its own."""
    modules: dict[str, set[str]] = {key: set() for key in plan}
    parameters: dict[str, int] = defaultdict(int)
    for m in resolved.modules:
        if m.style.label == as_style(plan[m.plan_key]).label:
            modules[m.plan_key].add(m.path)
            own = dict(model.get_submodule(m.path).named_parameters(recurse=False))
            parameters[m.plan_key] += sum(
                own[n].numel() for n, lay in m.layouts.items() if isinstance(lay, Shard)
            )
    return {
        key: PatternShare(as_style(style).label, len(modules[key]), parameters[key])
        for key, style in plan.items()
    }


def _whole(model: nn.Module, plan: ResolvedPlan) -> Iterator[Whole]:
    """Yield the parameters that stay whole, module pattern by module pattern."""
    modules = dict(model.named_modules())
    total = sum(p.numel() for p in model.parameters())
    planned = {m.path: m for m in plan.modules if m.layouts}
    groups: dict[tuple[str, str], int] = defaultdict(int)
    sizes: dict[str, int] = defaultdict(int)
    for name, parameter in model.named_parameters():
        path = name.rpartition(".")[0]
        sizes[pattern_of(modules, path)] += parameter.numel()
    for name, parameter in model.named_parameters():
        if isinstance(plan.layout(name), Shard):
            continue
        path = name.rpartition(".")[0]
        pattern = pattern_of(modules, path)
        reason = _reason(modules[path], planned.get(path), sizes[pattern] / total)
        groups[pattern, reason] += parameter.numel()
    for (pattern, reason), count in groups.items():
        yield Whole(pattern or type(model).__name__, count, count / total, reason)


def _reason(module: nn.Module, planned: PlannedModule | None, share: float) -> str:
    """Return why the parameters of a module stay whole."""
    if planned is not None:
        per_head = planned.style.sums_gradients
        return "each rank applies it to its own heads" if per_head else "a bias, added once after the sum"
    kind = type(module).__name__
    if share < LARGE:
        return f"small: its {kind} modules hold less than {LARGE:.1%} of the weights"
    return f"no plan entry: {kind}"
