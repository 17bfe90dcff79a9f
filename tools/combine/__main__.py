"""Measures what goes together with a sharded model, by the functions that the tests run, and writes docs/combine.md.

The measured errors are kept in `tests/data/combine.json`. With `--render` nothing is measured; naming columns of the
table measures those alone.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from tools.combine.page import PAGE, RECORD, page, record

from shardwise.launch import run_ranks
from tests.combine import CELLS, FAMILIES, Error, measure, prepare

DEGREES = (2, 4)


@click.command(help=__doc__)
@click.argument("columns", nargs=-1)
@click.option("--render", is_flag=True, help="Only write the page from what has been measured.")
def main(columns: tuple[str, ...], render: bool) -> None:
    if not render:
        found = record() | measured(columns or tuple(CELLS))
        RECORD.write_text(json.dumps({what: found[what] for what in CELLS}, indent=1) + "\n")
    PAGE.write_text(page(record()))


def measured(columns: tuple[str, ...]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return column -> class -> degree -> the largest errors of a rank."""
    found: dict[str, dict[str, dict[str, Any]]] = {what: {name: {} for name in FAMILIES} for what in columns}
    for degree in DEGREES:
        with tempfile.TemporaryDirectory() as place:
            for what in columns:
                folders = {name: prepare(name, Path(place, what, name)) for name in FAMILIES}
                for name, *errors in zip(FAMILIES, *run_ranks(_errors, degree, what, folders), strict=True):
                    worst = max(errors, key=lambda error: error.sharded)
                    figures = {key: float(f"{value:.1e}") for key, value in asdict(worst).items() if value}
                    found[what][name][str(degree)] = figures
                    click.echo(f"{what}, {name}, {degree} ranks: {figures}")
    return found


def _errors(what: str, folders: dict[str, Path]) -> list[Error]:
    torch.set_num_threads(1)
    return [measure(what, name, folder) for name, folder in folders.items()]


if __name__ == "__main__":
    main()
