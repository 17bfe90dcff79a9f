"""Measures every model class with a plan on 2 and 4 ranks, and writes docs/models.md.

Each tiny model, with random parameters of which none is zero, is sharded and run in fp32, and compared with one
process. The measured differences are kept in `tests/data/model_errors.json`; naming classes measures those alone. With
`--render` nothing is measured.
"""

from __future__ import annotations

import json

import click
from tools.model_table.measure import ERRORS, measured
from tools.model_table.table import PAGE, page

from shardwise import models


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--render", is_flag=True, help="Only write the page from what has been measured.")
def main(names: tuple[str, ...], render: bool) -> None:
    errors = json.loads(ERRORS.read_text()) if ERRORS.exists() else {}
    if not render:
        errors |= measured(names or tuple(models.FAMILIES))
        errors = {name: errors[name] for name in sorted(models.FAMILIES) if name in errors}
        ERRORS.write_text(json.dumps(errors, indent=1) + "\n")
    PAGE.write_text(page(errors))


if __name__ == "__main__":
    main()
