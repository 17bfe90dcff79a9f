"""Finding a plan, wired to what is known of models: the call that users make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.models import FAMILIES
from shardwise.models.lookup import example_inputs as known_inputs
from shardwise.models.lookup import family_of, model_class, skeleton
from shardwise.models.planning import declared_plan
from shardwise.plan.candidate import Candidate, candidate
from shardwise.plan.files import plan_as_python, style_to_json
from shardwise.plan.infer import Inferred, infer_plan
from shardwise.plan.resolve import Plan, resolve
from shardwise.plan.styles import as_style
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
    model = skeleton(model_or_class, **_tiny(model_or_class)).eval()
    inputs = example_inputs if example_inputs is not None else known_inputs(model)
    if inputs is None:
        return candidate(model, degree)
    return infer_plan(model, inputs, degree, localized_twin)


def _tiny(target: Any) -> Mapping[str, Any]:
    """Return the tiny configuration of a class, if it is given as one or by name and has one."""
    cls = model_class(target) if isinstance(target, str) and target in FAMILIES else target
    family = family_of(cls) if isinstance(cls, type) else None
    return family.TINY_CONFIG if family is not None else {}


@dataclass(frozen=True)
class Declared:
    """The plan that a class declares, and how many modules of one configuration it matches.

    Attributes:
        plan: Pattern -> style.
        matches: Pattern -> number of modules.
        degree: Number of ranks it was resolved for.
    """

    plan: Plan
    matches: Mapping[str, int]
    degree: int

    def as_python(self) -> str:
        """Return the plan as source code."""
        return plan_as_python(self.plan)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain data that `json` can write; a function is written by its name."""
        plan = {key: style_to_json(style) for key, style in self.plan.items()}
        for entry in plan.values():
            if isinstance(entry, dict) and callable(entry.get("blocks")):
                entry["blocks"] = entry["blocks"].__name__
        return {"plan": plan, "matches": dict(self.matches), "tp_degree": self.degree}

    def __str__(self) -> str:
        """Return one line for each pattern."""
        return "\n".join(
            f"{key}: {as_style(style).label}, {self.matches[key]} modules" for key, style in self.plan.items()
        )


def declared(model_or_class: Any, degree: int = 2) -> Declared:
    """Return the plan that a class declares, resolved for one configuration.

    Raises:
        ConfigError: nothing is known by this name.
        PlanError: the class declares no plan, or it does not fit this configuration and degree.
    """
    model = skeleton(model_or_class)
    plan = declared_plan(type(model))
    planned = resolve(model, plan, degree).modules
    own = Counter(m.plan_key for m in planned if m.style.label == as_style(plan[m.plan_key]).label)
    return Declared(plan, {key: own[key] for key in plan}, degree)
