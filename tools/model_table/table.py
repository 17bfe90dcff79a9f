"""The page itself: static and measured columns, in one table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tools.model_table.measure import DEGREES, ROUNDED
from tools.model_table.static import Row, row, source_of
from tools.rounding import ROUNDS_IN_ANY_DTYPE

from shardwise import models

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

_INTRO = """# Models

{count} model classes of diffusers have a plan, each in a file of its own under `src/shardwise/models/families/`. Any
other class of diffusers can be imported from `shardwise.models` too, with a plan derived from the names of its modules.

- *Parameters, sharded*: of the class's default configuration; what is not sharded is held by every rank.
- *Degrees*: numbers of ranks up to 64 that divide its heads and blocks, or are a multiple of fewer key heads.
- *Sums*: all-reduces in one block of each list, and outside of them, if each planned layer is called once.
- *2 ranks, 4 ranks*: largest difference from one process in fp32, relative to the largest output, of a tiny model
  with random parameters of which none is zero. The tests' bound is 1e-5.

`python -m tools.model_table` measures and writes this page; a test holds it current.
"""


def page(errors: Mapping[str, Mapping[str, float]]) -> str:
    """Return docs/models.md."""
    lines = [
        _INTRO.format(count=len(models.FAMILIES)),
        "| class | parameters | sharded | styles | degrees | sums | 2 ranks | 4 ranks |",
        "|---|---|---|---|---|---|---|---|",
        *(line(row(name), errors[name]) for name in sorted(models.FAMILIES)),
        "",
        *(_note(name, errors[name]) for name in sorted(ROUNDS_IN_ANY_DTYPE)),
    ]
    return "\n".join(lines) + "\n"


def _note(name: str, errors: Mapping[str, float]) -> str:
    """Return what the figures of a class that rounds to bf16 in any dtype leave out."""
    with_it = " and ".join(f"{errors[f'{degree}{ROUNDED}']:.1e}" for degree in DEGREES)
    return (
        f"{name} rounds queries and keys to bf16 in any dtype, so that a difference in the last digit of fp32 may "
        f"become a step of bf16. Its figures are without that rounding; with it they are {with_it}."
    )


def line(of: Row, errors: Mapping[str, float]) -> str:
    """Return one row of the table."""
    sums = ", ".join(f"{place or 'outside'} {count}" for place, count in of.sums.items())
    cells = [
        f"[{of.name}](../{source_of(of.name)})",
        f"{of.billions:.2f}e9",
        f"{of.sharded:.1%}",
        ", ".join(of.styles),
        ", ".join(map(str, of.degrees)),
        sums,
        *(f"{errors[degree]:.1e}" for degree in ("2", "4")),
    ]
    return f"| {' | '.join(cells)} |"
