"""Which plan a model gets, and what it means for it: the user's own, the declared one, or what is asked of either."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.config import TensorParallelConfig
from shardwise.errors import Finding, PlanError
from shardwise.models.lookup import example_inputs as known_inputs
from shardwise.models.lookup import skeleton
from shardwise.plan.candidate import Candidate, candidate
from shardwise.plan.estimate import Estimate, estimate_plan
from shardwise.plan.resolve import Plan
from shardwise.plan.styles import RowwiseSplitInputParallel, StyleFault, as_style
from shardwise.runtime.shard import localized_twin

logger = logging.getLogger(__name__)


def declared_plan(cls: type) -> Plan | None:
    """Return the plan of a model class: its own, or that of the class of this name in `shardwise.models`.

    That of a class of transformers is for its own tensor parallelism; a class of `shardwise.encoders` has another.

    Raises:
        PlanError: what it declares is no plan.
    """
    from shardwise import models  # this module is part of it

    theirs = cls.__module__.startswith("transformers.")
    own = getattr(cls, "sharding_plan", None if theirs else getattr(cls, "_tp_plan", None))
    if cls.__module__.startswith("diffusers.") and cls.__name__ in models.FAMILIES:
        own = getattr(models, cls.__name__)._tp_plan
    if own is not None and not isinstance(own, Mapping):
        message = f"its plan is a {type(own).__name__}"
        raise PlanError(
            [Finding("NoPlan", cls.__name__, message, "make it a dict of module pattern -> style")]
        )
    return own


def choose_plan(model: nn.Module, config: TensorParallelConfig, given: Plan | None = None) -> Plan:
    """Return the plan for a model: the one that is given, the config's, the declared one, or one derived from names.

    A derived plan is taken with a warning. Of a plan that is neither given nor the config's, `shard_modulation=False`
    leaves out the lone projections with whole inputs.

    Raises:
        PlanError: there is none.
    """
    given = given if given is not None else config.plan
    if given is not None:
        return given
    plan = declared_plan(type(model))
    if plan is None:
        derived = _derived(model, config.tp_degree, config.uneven)
        logger.warning("%s", derived.caution)
        plan = derived.plan
    return plan if config.shard_modulation else without_modulations(plan)


def _derived(model: nn.Module, degree: int, uneven: bool) -> Candidate:
    """Return a plan from the names of a model's modules.

    Raises:
        PlanError: nothing of it can be sharded.
    """
    try:
        return candidate(model, degree, uneven)
    except PlanError as error:
        name = type(model).__name__
        message = f"the class {name} declares no _tp_plan, and its names do not tell one"
        finding = Finding("NoPlan", name, message, "pass plan=..., or declare _tp_plan")
        raise PlanError([finding, *error.findings]) from error


def without_modulations(plan: Plan) -> Plan:
    """Return a plan without its lone projections, each of which costs a sum over the ranks of its own."""
    return {key: style for key, style in plan.items() if not _is_lone(style)}


def _is_lone(style: object) -> bool:
    try:
        return isinstance(as_style(style), RowwiseSplitInputParallel)
    except StyleFault:
        return False  # reported when the plan is resolved


def estimate(
    model_or_class: Any,
    degrees: Iterable[int] = (1, 2, 4, 8),
    plan: Plan | None = None,
    example_inputs: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    uneven: bool = False,
) -> Estimate:
    """Return what a plan saves and costs at several degrees, without reading or allocating a weight.

    Args:
        model_or_class: A model, a model class or its name, or a folder or hub id with a `config.json`.
        degrees: Numbers of ranks.
        plan: Module patterns and styles; by default the declared plan, or else one derived from names.
        example_inputs: Keyword arguments of the model's forward, for which the traffic is counted; known for the
            classes of `shardwise.models`.
        dtype: What the weights are held in.
        uneven: Whether heads that a degree does not divide are shared in unequal numbers; the figures are then those
            of the first rank, which holds the most.

    Returns:
        Parameters and bytes per rank, the replicated share and the traffic by degree; what stays whole and why; the
        degrees that are possible, and why others are not.

    Raises:
        ConfigError: nothing is known by this name.
        PlanError: there is no plan for the class, or it fits the model at no degree.
    """
    model = skeleton(model_or_class)
    plan, proved = plan if plan is not None else declared_plan(type(model)), True
    if plan is None:
        plan, proved = _derived(model, 2, uneven).plan, False
    inputs = example_inputs if example_inputs is not None else known_inputs(model)
    return estimate_plan(model, plan, degrees, inputs, localized_twin, dtype.itemsize, proved, uneven)
