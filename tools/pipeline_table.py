"""Writes the table of docs/pipelines.md: what `shardwise.DiffusionPipeline` shards of each pipeline of diffusers.

Which components a pipeline has is read from its constructor, whether one is sharded from the classes that have a plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any, get_args

import diffusers
from tests.whole_pipelines import TESTED

from shardwise import encoders, models
from shardwise.models.decode import SPREADABLE

PAGE = Path(__file__).parents[1] / "docs" / "pipelines.md"
BEGIN, END = "<!-- table: python -m tools.pipeline_table -->", "<!-- end of table -->"
_PARTS = re.compile(
    r"^(transformer|text_encoder|vae|video_vae|audio_vae|image_encoder|controlnet|unet|prior)"
)
_NO_MODEL = re.compile(
    r"Tokenizer|Scheduler|Processor|^(None|Union|Optional|List|Any|PreTrainedModel|ModelMixin)$"
)


def pipelines() -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Yield each pipeline that has a transformer with a plan, and the classes that each of its components may have."""
    for name in sorted(diffusers._import_structure["pipelines"]):
        cls = getattr(diffusers, name)
        if isinstance(cls, type) and issubclass(cls, diffusers.DiffusionPipeline):
            parts = components(cls)
            if any(cls in models.FAMILIES for classes in parts.values() for cls in classes):
                yield name, parts


def components(pipeline: type[Any]) -> dict[str, list[str]]:
    """Return the components with weights of a pipeline, and the names of the classes that its constructor takes."""
    parameters = signature(pipeline.__init__).parameters
    found = {
        name: _classes(parameter.annotation) for name, parameter in parameters.items() if _PARTS.match(name)
    }
    models_of = {
        name: [cls for cls in dict.fromkeys(all_of) if not _NO_MODEL.search(cls)]
        for name, all_of in found.items()
    }
    return {name: classes for name, classes in models_of.items() if classes}


def _classes(annotation: Any) -> list[str]:
    """Return the names of classes in an annotation, whether it is a type or its text."""
    if isinstance(annotation, str):
        return [word for word in re.findall(r"\w+", annotation) if word[0].isupper()]
    inner = get_args(annotation)
    if inner:
        return [name for part in inner for name in _classes(part)]
    return [annotation.__name__] if isinstance(annotation, type) and annotation is not type(None) else []


@cache
def fate(class_name: str) -> str:
    """Return what is done with a component of this class."""
    if class_name in models.FAMILIES or class_name in encoders.FAMILIES:
        return "sharded"
    return "spread" if class_name in SPREADABLE else "whole"


def row(name: str, parts: dict[str, list[str]]) -> str:
    """Return the line of one pipeline."""
    done: dict[str, list[str]] = {"sharded": [], "spread": [], "whole": []}
    for part, classes in parts.items():
        for cls in classes:
            done[fate(cls)].append(f"{part} ({cls})")
    cells = [name, *(", ".join(done[kind]) for kind in ("sharded", "spread", "whole")), TESTED.get(name, "")]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """Return the table."""
    lines = [
        "| pipeline | sharded | whole, decode can be spread | whole | tested |",
        "|---|---|---|---|---|",
        *(row(name, parts) for name, parts in pipelines()),
    ]
    return "\n".join(lines)


def page() -> str:
    """Return docs/pipelines.md with the table of today."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page())
