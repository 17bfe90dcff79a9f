"""Measures each cell of the table, by the functions that the tests run."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path

import click
import torch
from tests.combine import FAMILIES, Error, measure, prepare

from shardwise.launch import run_ranks

DEGREES = (2, 4)

Column = dict[str, dict[str, dict[str, float]]]
"""Class -> degree -> the largest errors of a rank."""


def measured(what: str) -> Column:
    """Return a column of the table."""
    found: Column = {name: {} for name in FAMILIES}
    for degree in DEGREES:
        with tempfile.TemporaryDirectory() as place:
            folders = {name: prepare(name, Path(place, name)) for name in FAMILIES}
            for name, *errors in zip(FAMILIES, *run_ranks(_errors, degree, what, folders), strict=True):
                worst = max(errors, key=lambda error: error.sharded)
                found[name][str(degree)] = {k: float(f"{v:.1e}") for k, v in asdict(worst).items() if v}
                click.echo(f"{what}, {name}, {degree} ranks: {found[name][str(degree)]}")
    return found


def _errors(what: str, folders: dict[str, Path]) -> list[Error]:
    torch.set_num_threads(1)
    return [measure(what, name, folder) for name, folder in folders.items()]
