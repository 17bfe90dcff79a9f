"""A model as inference sees it: which Linears may be planned, how paths become patterns, in which order they run.

Owns the model that plans are tried on: a copy without weights in which each list of blocks is shortened to one
block of each kind, so that a trial costs a second also for sixty blocks. What is found there is proved on the
whole model by `plan.infer`. Assumes parameters on the meta device.

Its `Outline`, which needs no forward, is all that `plan.candidate` has of a model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from shardwise.errors import PlanError
from shardwise.plan.check import CheckReport, Localize, check_plan, first_fault
from shardwise.plan.findings import CheckFinding
from shardwise.plan.resolve import Plan, ResolvedPlan, resolve
from shardwise.plan.trace import quiet_forward

LARGE = 0.001
"""Share of the model's weights from which a Linear left whole is worth an all-reduce of its own in each block.

Below it a rank would save less than a thousandth of the model, and pay a collective per block for that.
"""


class DeadEnd(Exception):
    """A trial that no repair saves; its text is the reason."""


@dataclass
class Outline:
    """The modules of a model, its lists of blocks, and how paths become patterns.

    Attributes:
        model: With or without weights; not changed.
    """

    model: nn.Module

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """The model's modules by their paths."""
        return dict(self.model.named_modules())

    @cached_property
    def lists(self) -> tuple[str, ...]:
        """Paths of the outermost lists of blocks."""
        return tuple(block_lists(self.model))

    @cached_property
    def linears(self) -> dict[str, str]:
        """Pattern -> path of the first module, for every Linear."""
        found: dict[str, str] = {}
        for path, module in self.modules.items():
            if isinstance(module, nn.Linear):
                found.setdefault(self.pattern(path), path)
        return found

    @cached_property
    def candidates(self) -> tuple[str, ...]:
        """Patterns of the Linears that a plan may shard: those in a list of blocks."""
        return tuple(key for key, path in self.linears.items() if self.in_a_block(path))

    def in_a_block(self, path: str) -> bool:
        """Return whether a module is in a list of blocks."""
        return path.startswith(tuple(f"{start}." for start in self.lists))

    def pattern(self, path: str) -> str:
        """Return a path with its index in a list of blocks replaced by `*`."""
        for name in self.lists:
            if path.startswith(f"{name}."):
                _, *rest = path.removeprefix(f"{name}.").split(".")
                return ".".join([name, "*", *rest])
        return path

    def linear(self, key: str) -> nn.Linear:
        """Return the first Linear that a pattern matches."""
        return self.linear_at(self.linears[key])

    def linear_at(self, path: str) -> nn.Linear:
        """Return the Linear at a path."""
        module = self.modules[path]
        assert isinstance(module, nn.Linear)
        return module

    def weights(self, key: str) -> int:
        """Return how many numbers the parameters of all modules of a pattern hold."""
        modules = (m for path, m in self.modules.items() if self.pattern(path) == key)
        return sum(p.numel() for m in modules for p in m.parameters())

    def in_order(self, plan: Plan) -> dict[str, object]:
        """Return a plan in the order of the model's modules."""
        return {key: plan[key] for key in sorted(plan, key=self.places.__getitem__)}

    @cached_property
    def places(self) -> dict[str, int]:
        """Pattern -> where the first module that it matches stands among the modules."""
        return {self.pattern(path): i for i, path in reversed(list(enumerate(self.modules)))}


@dataclass
class Subject(Outline):
    """A model on which plans are tried.

    Attributes:
        model: Without weights, and the subject's own.
        inputs: Keyword arguments of its forward.
        degree: Number of ranks.
        localize: Builds a rank's part of it, for the second pass of the check.
        order: Patterns of the Linears in its block lists, in the order in which the forward calls them.
        checks: How many trials have been made.
    """

    inputs: Mapping[str, Any]
    degree: int
    localize: Localize
    order: tuple[str, ...] = field(default=(), init=False)
    checks: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.order = self._run()

    def resolve(self, plan: Plan) -> ResolvedPlan:
        """Return what a plan means, without the guards: attributes are divided where the plan says so.

        Raises:
            DeadEnd: a style does not fit its module.
        """
        try:
            return resolve(self.model, plan, self.degree, guards=False)
        except PlanError as error:
            finding = error.findings[0]
            raise DeadEnd(f"{finding.module}: {finding.message}") from error

    def first_fault(self, plan: Plan) -> CheckFinding | None:
        """Return the first thing that is wrong with the layouts of a plan, if there is one.

        Raises:
            DeadEnd: a style does not fit its module.
        """
        resolved = self.resolve(plan)
        self.checks += 1
        return first_fault(self.model, resolved, self.inputs)

    def check(self, plan: Plan) -> CheckReport:
        """Check a plan: its layouts, and the shapes of a rank.

        Raises:
            DeadEnd: a style does not fit its module.
        """
        resolved = self.resolve(plan)
        self.checks += 1
        return check_plan(self.model, resolved, self.inputs, self.localize)

    def _run(self) -> tuple[str, ...]:
        """Run the forward once, for what the model caches and for the order of its Linears."""
        called: dict[str, None] = {}
        names = {id(self.modules[path]): key for key, path in self.linears.items() if key in self.candidates}

        def note(module: nn.Module, args: Any) -> None:
            called.setdefault(names[id(module)])

        handles = [m.register_forward_pre_hook(note) for m in self.modules.values() if id(m) in names]
        try:
            quiet_forward(self.model, copy.deepcopy(dict(self.inputs)))
        finally:
            for handle in handles:
                handle.remove()
        return tuple(called)


def shortened(whole: Subject) -> Subject:
    """Return a subject with one block of each kind in every list; the given one where its forward needs them all."""
    model = copy.deepcopy(whole.model)
    for path in whole.lists:
        blocks = model.get_submodule(path)
        kinds = {_kind(block): block for block in reversed(list(blocks.children()))}
        kept = [block for block in blocks.children() if any(block is kind for kind in kinds.values())]
        blocks._modules = {str(i): block for i, block in enumerate(kept)}
    try:
        short = Subject(model, whole.inputs, whole.degree, whole.localize)
    except Exception:  # whatever a forward may raise that counts its blocks
        return whole
    return short if set(short.order) == set(whole.order) else whole


def block_lists(model: nn.Module) -> Iterator[str]:
    """Yield the paths of the outermost lists whose elements are all of one class, and more than a single layer."""
    found: list[str] = []
    for path, module in model.named_modules():
        inside = path.startswith(tuple(f"{outer}." for outer in found))
        if not inside and isinstance(module, nn.ModuleList) and _are_blocks(module):
            found.append(path)
            yield path


def _are_blocks(elements: nn.ModuleList) -> bool:
    return len({type(e) for e in elements}) == 1 and any(True for _ in elements[0].children())


def _kind(block: nn.Module) -> tuple[object, ...]:
    """Return what makes two blocks alike: classes, shapes and plain attributes of all that is in them."""
    plain = (int, float, str, type(None))
    return tuple(
        (
            path,
            type(module),
            tuple((name, tuple(p.shape)) for name, p in module.named_parameters(recurse=False)),
            tuple((name, value) for name, value in vars(module).items() if isinstance(value, plain)),
        )
        for path, module in block.named_modules()
    )
