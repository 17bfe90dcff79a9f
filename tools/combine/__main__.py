"""Measures what goes together with a sharded model, by the functions that the tests run, and writes docs/combine.md.

The measured errors are kept in `tests/data/combine.json`. With `--render` nothing is measured; naming columns of the
table measures those alone.
"""

from __future__ import annotations

import json

import click
from tests.combine import CELLS
from tools.combine.measure import measured
from tools.combine.page import PAGE, RECORD, page, record


@click.command(help=__doc__)
@click.argument("columns", nargs=-1)
@click.option("--render", is_flag=True, help="Only write the page from what has been measured.")
def main(columns: tuple[str, ...], render: bool) -> None:
    found = record()
    for what in () if render else columns or tuple(CELLS):
        found[what] = measured(what)
        RECORD.write_text(json.dumps({name: found[name] for name in CELLS if name in found}, indent=1) + "\n")
    PAGE.write_text(page(record()))


if __name__ == "__main__":
    main()
