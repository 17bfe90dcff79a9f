"""The tables of `shardwise doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text


def check_table(report: Mapping[str, Any]) -> Table:
    """Return what was looked at, with what was found or is wrong."""
    table = Table(title="shardwise doctor", title_justify="left", show_lines=False)
    for column in ("check", "", "found"):
        table.add_column(column, overflow="fold")
    for check in report["checks"]:
        problems = check["problems"]
        table.add_row(
            check["name"], "wrong" if problems else "ok", Text("\n".join(problems) or check["says"])
        )
    return table


def link_table(report: Mapping[str, Any]) -> Table:
    """Return what all-reduces between the ranks take."""
    table = Table(title="all-reduce", title_justify="left")
    for column in ("MiB", "ms", "MiB/s"):
        table.add_column(column, justify="right")
    for link in report["links"]:
        known = link["seconds"] is not None
        row = (
            (f"{link['seconds'] * 1e3:.2f}", f"{link['mib_per_second']:,.0f}") if known else ("too slow", "")
        )
        table.add_row(str(link["mib"]), *row)
    return table
