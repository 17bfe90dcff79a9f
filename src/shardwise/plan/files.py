"""Plans as text: JSON files, and Python source.

A file maps a module pattern to a style name, or an object that names a style and its arguments.

    {
      "blocks.*.attn.to_q": "colwise",
      "blocks.*.ff.linear_in": {"style": "PackedColwiseParallel", "blocks": [1, 1]},
      "blocks.*.attn": {"style": "DivideAttributes", "names": ["heads"]}
    }

Whether the plan fits a model is another question: see `plan.resolve`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, Finding, PlanError
from shardwise.plan import styles
from shardwise.plan.resolve import Plan
from shardwise.plan.styles import STYLES, Style, as_style

_IF_PRESENT = "if_present"


def read_plan(path: Path) -> dict[str, object]:
    """Return the plan in a JSON file.

    Raises:
        PlanError: the file cannot be read or is not a plan, with a finding for each entry that is wrong.
    """
    try:
        entries = json.loads(path.read_text("utf-8"), object_pairs_hook=_without_repeats)
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(
            [Finding("NotAPlan", str(path), f"cannot be read: {error}", "write a JSON object")]
        ) from error
    if not isinstance(entries, dict):
        message = f"holds a {type(entries).__name__}"
        raise PlanError(
            [Finding("NotAPlan", str(path), message, "write an object of module pattern -> style")]
        )
    plan: dict[str, object] = {}
    findings: list[Finding] = []
    for pattern, entry in entries.items():
        try:
            plan[pattern] = style_from_json(entry)
        except (ConfigError, TypeError, ValueError) as error:
            findings.append(Finding("UnknownStyle", pattern, str(error), _HINT, pattern))
    if findings:
        raise PlanError(findings, str(path))
    return plan


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan as a JSON file that `read_plan` reads.

    Raises:
        PlanError: a style has arguments that JSON cannot hold, such as a function.
    """
    entries: dict[str, object] = {}
    findings: list[Finding] = []
    for pattern, style in plan.items():
        try:
            entries[pattern] = style_to_json(style)
            json.dumps(entries[pattern])
        except TypeError as error:
            findings.append(
                Finding("NotWritable", pattern, str(error), "write its blocks as numbers", pattern)
            )
    if findings:
        raise PlanError(findings, str(path))
    path.write_text(json.dumps(entries, indent=2) + "\n", "utf-8")


def style_from_json(entry: object) -> object:
    """Return what one value of a plan file means.

    Raises:
        ValueError, TypeError, ConfigError: it names no style, or not the style's arguments.
    """
    if isinstance(entry, str):
        if entry not in STYLES:
            raise ValueError(f"{entry!r} is not the name of a style")
        return entry
    if not isinstance(entry, dict) or not isinstance(entry.get("style"), str):
        raise ValueError(f"{entry!r} is neither a name nor an object with a style")
    arguments = {key: value for key, value in entry.items() if key not in ("style", _IF_PRESENT)}
    name = entry["style"]
    style = _build(name, arguments) if name not in STYLES or arguments else name
    return styles.IfPresent(style) if entry.get(_IF_PRESENT) is True else style


def _build(name: str, arguments: Mapping[str, Any]) -> Style:
    cls = _style_class(name)
    if cls is None:
        raise ValueError(f"{name!r} is not the name of a style")
    rest = dict(arguments)
    if isinstance(rest.get("plan"), dict):  # of what is inside
        rest["plan"] = {pattern: style_from_json(inner) for pattern, inner in rest["plan"].items()}
    several = [p.name for p in _parameters(cls) if p.kind is p.VAR_POSITIONAL]
    positional = [value for key in several for value in _listed(key, rest.pop(key, []))]
    return cls(*positional, **rest)


def _style_class(name: str) -> type[Style] | None:
    """Return the public style class of this name."""
    cls = getattr(styles, name, None)
    if name.startswith("_") or not isinstance(cls, type) or not issubclass(cls, Style) or cls is Style:
        return None
    return cls


def _listed(key: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{key} is a list, not a {type(value).__name__}")
    return value


def style_to_json(style: object) -> object:
    """Return the value of a plan file that means `style`.

    Raises:
        TypeError: it is no style.
    """
    if isinstance(style, styles.IfPresent):
        inner = style_to_json(style.style)
        return {**(inner if isinstance(inner, dict) else {"style": inner}), _IF_PRESENT: True}
    if isinstance(style, str):
        return style
    for plan_name, known in STYLES.items():
        if type(style) is type(known):
            return plan_name
    name = type(style).__name__
    cls = _style_class(name)  # by name: diffusers' markers have the same, and mean the same
    if cls is None:
        raise TypeError(f"{style!r} is not a style")
    values = {p.name: getattr(style, p.name) for p in _parameters(cls)}
    if isinstance(values.get("plan"), Mapping):
        values["plan"] = {pattern: style_to_json(inner) for pattern, inner in values["plan"].items()}
    return {"style": name, **{name: value for name, value in values.items() if value is not None}}


def plan_as_python(plan: Plan) -> str:
    """Return a plan as source code: the assignment that declares it on a class."""
    lines = [f"    {json.dumps(key)}: {as_style(style).label}," for key, style in plan.items()]
    return "\n".join(["_tp_plan = {", *lines, "}"])


def _parameters(cls: type[Style]) -> Iterator[inspect.Parameter]:
    return iter(inspect.signature(cls).parameters.values())


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse an object with the same key twice, of which JSON would keep the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return found


_HINT = (
    f"write one of {', '.join(STYLES)}, or an object such as "
    '{"style": "PackedColwiseParallel", "blocks": [1, 1]}'
)
