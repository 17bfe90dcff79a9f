"""Finding a plan, wired to what is known of models: the call that users make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.models import FAMILIES
from shardwise.models.lookup import example_inputs as known_inputs
from shardwise.models.lookup import family_of, model_class, skeleton
from shardwise.plan.candidate import Candidate, candidate
from shardwise.plan.infer import Inferred, infer_plan
from shardwise.runtime.shard import localized_twin


def infer(
    model_or_class: Any, degree: int = 2, example_inputs: Mapping[str, Any] | None = None
) -> Inferred | Candidate:
    """Find a plan without reading or allocating a weight: by dataflow, or from names where no inputs are known.

    With example inputs no name is looked at, and the static check finds nothing in the plan: `.proved` is True.
    Without, the plan is a candidate derived from the names of modules, and `.proved` is False.

    Args:
        model_or_class: A model, a model class or its name (its tiny configuration, where `shardwise.models` has
            one, or else its default), or a folder or hub id with a `config.json`.
        degree: Number of ranks.
        example_inputs: Keyword arguments of the model's forward; known for the classes of `shardwise.models`.

    Returns:
        The plan as `.plan`, with the reason of each of its groups and of what stays whole; `.as_python()` gives it
        as source code.

    Raises:
        ConfigError: nothing is known by this name.
        PlanError: nothing can be sharded, or the degree does not divide the model's heads.
    """
    model = skeleton(model_or_class, **_tiny(model_or_class))
    inputs = example_inputs if example_inputs is not None else known_inputs(model)
    if inputs is None:
        return candidate(model, degree)
    return infer_plan(model, inputs, degree, localized_twin)


def _tiny(target: Any) -> Mapping[str, Any]:
    """Return the tiny configuration of a class, if it is given as one or by name and has one."""
    cls = model_class(target) if isinstance(target, str) and target in FAMILIES else target
    family = family_of(cls) if isinstance(cls, type) else None
    return family.TINY_CONFIG if family is not None else {}
