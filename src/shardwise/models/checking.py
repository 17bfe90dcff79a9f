"""The static check, wired to what is known of models: by default before every load, and as a call of its own."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.config import TensorParallelConfig
from shardwise.errors import ConfigError, PlanError
from shardwise.models.lookup import example_inputs as known_inputs
from shardwise.models.lookup import skeleton
from shardwise.models.planning import choose_plan
from shardwise.plan.check import CheckReport, check_plan
from shardwise.plan.findings import CheckFinding
from shardwise.plan.resolve import Plan, ResolvedPlan, resolve
from shardwise.runtime.shard import localized_twin, meta_twin

logger = logging.getLogger(__name__)

Inputs = Callable[[Any], dict[str, Any] | None]


def check(
    model_or_class: Any,
    plan: Plan | None = None,
    degree: int = 2,
    example_inputs: Mapping[str, Any] | None = None,
    uneven: bool = False,
) -> CheckReport:
    """Check a plan without reading or allocating a weight.

    Args:
        model_or_class: A model, a model class or its name, or a folder or hub id with a `config.json`.
        plan: Module patterns and styles; by default the plan declared for the class, or one derived from names.
        degree: Number of ranks.
        example_inputs: Keyword arguments of the model's forward; known for the classes of `shardwise.models`.
        uneven: Whether heads that `degree` does not divide are shared in unequal numbers.

    Returns:
        A report with `.ok` and `.findings`; a finding has `.kind`, `.module`, `.plan_key`, `.source`, `.message`
        and `.fix`.

    Raises:
        ConfigError: nothing is known by this name, or there are no example inputs for it.
        PlanError: there is no plan for the class.
    """
    model = skeleton(model_or_class)
    plan = choose_plan(model, TensorParallelConfig(degree, uneven=uneven), plan)
    inputs = example_inputs if example_inputs is not None else known_inputs(model)
    if inputs is None:
        raise ConfigError(f"no example inputs are known for {type(model).__name__}: pass example_inputs")
    try:
        resolved = resolve(model, plan, degree, uneven=uneven)
    except PlanError as error:
        return CheckReport(tuple(CheckFinding(**vars(finding)) for finding in error.findings), degree)
    return check_plan(model, resolved, inputs, localized_twin)


class StaticCheck:
    """The check as part of sharding: before any weight is read, or else when the model is first called.

    Args:
        config: Whether a check is wanted at all.
        inputs: Returns example inputs for a model, or None if there are none for its class.

    Attributes:
        report: What it found; None while it has not run.
    """

    def __init__(self, config: TensorParallelConfig, inputs: Inputs = known_inputs) -> None:
        self.report: CheckReport | None = None
        self._enabled, self._inputs = config.check, inputs
        self._later: tuple[nn.Module, ResolvedPlan] | None = None

    def before(self, model: nn.Module, plan: ResolvedPlan) -> None:
        """Check a plan on a model that is still whole, if example inputs are known for its class.

        Raises:
            PlanError: the plan is wrong.
        """
        self.judge(model, self.look(model, plan))

    def look(self, model: nn.Module, plan: ResolvedPlan, mine: bool = True) -> dict[str, Any] | None:
        """Return what the check finds, as plain data for other ranks; None if it is not asked, or inputs are unknown.

        Args:
            model: Still whole.
            plan: What a plan means for it.
            mine: Whether this rank is the one to check: it takes seconds of each core, and all would find the same.
        """
        inputs = self._inputs(model) if self._enabled else None
        if self._enabled and inputs is None:
            self._later = (meta_twin(model), plan)
        if inputs is None or not mine:
            return None
        return check_plan(meta_twin(model), plan, inputs, localized_twin).as_dict()

    def judge(self, model: nn.Module, found: Mapping[str, Any] | None) -> None:
        """Take over what the check found, on this rank or on another.

        Raises:
            PlanError: the plan is wrong.
        """
        if found is not None:
            self.report = _judge(type(model).__name__, CheckReport.from_dict(found))

    def after(self, model: nn.Module) -> None:
        """Leave the report on the sharded model, or see to it that its first forward makes one."""
        if self._later is not None:
            hook = _FirstForward(*self._later)
            hook.handle = model.register_forward_pre_hook(hook, with_kwargs=True)
        vars(model)["check_report"] = self.report


class _FirstForward:
    """A forward pre-hook that checks the plan and removes itself once the plan has passed."""

    handle: RemovableHandle

    def __init__(self, whole: nn.Module, plan: ResolvedPlan) -> None:
        self.whole, self.plan = whole, plan

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Check the plan on these inputs.

        Raises:
            PlanError: the plan is wrong; on every rank alike, before anything is sent.
        """
        if torch.compiler.is_compiling():
            return  # a compiled model is checked when it is first called eagerly, if it ever is
        bound = inspect.signature(type(self.whole).forward).bind(self.whole, *args, **kwargs)
        _, *names = bound.arguments
        inputs = {name: bound.arguments[name] for name in names}
        for name in [n for n, p in bound.signature.parameters.items() if p.kind is p.VAR_KEYWORD]:
            inputs |= inputs.pop(name, {})
        report = _judge(type(model).__name__, check_plan(self.whole, self.plan, inputs, localized_twin))
        self.handle.remove()
        vars(model)["check_report"] = report


def _judge(name: str, report: CheckReport) -> CheckReport:
    """Raise for a wrong plan, warn where the check could not decide, and log what it cost."""
    if report.wrong:
        found_by = "found by the static check, which TensorParallelConfig(check=False) turns off"
        raise PlanError(report.wrong, f"{name} at tp_degree {report.degree} ({found_by})")
    for finding in report.findings:
        logger.warning("the static check of %s could not decide:\n%s", name, finding)
    logger.info("static check of %s: %d calls in %.1f s", name, report.calls, report.seconds)
    return report
