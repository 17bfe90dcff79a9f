"""Loses ranks, hosts and links on purpose, and writes docs/reliability.md from what came of it.

What was measured is kept in docs/reliability.json. Naming parts (ranks, hosts, attacks, soak) measures those alone;
with `--render` nothing is measured.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from tools.faults.attacks import attacks
from tools.faults.hosts import host_faults
from tools.faults.page import PAGE, RECORD, page, record
from tools.faults.ranks import rank_faults
from tools.faults.soak import soak


@click.command(help=__doc__)
@click.argument("parts", nargs=-1)
@click.option("--pictures", default=500, show_default=True, help="Of the long run.")
@click.option("--render", is_flag=True, help="Only write the page from what has been measured.")
def main(parts: tuple[str, ...], pictures: int, render: bool) -> None:
    measures: Mapping[str, Callable[[], Any]] = {
        "ranks": lambda: _shown(rank_faults()),
        "hosts": lambda: _shown(host_faults()),
        "attacks": lambda: _shown(attacks()),
        "soak": lambda: soak(pictures),
    }
    found, start = record(), time.monotonic()
    for part in () if render else parts or tuple(measures):
        found[part] = measures[part]()
        if not parts:
            found["about"] = _about(time.monotonic() - start)
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(page(found))


def _shown(rows: Any) -> list[Any]:
    """Return rows, each shown when it comes."""
    kept = []
    for row in rows:
        click.echo(json.dumps(row))
        kept.append(row)
    return kept


def _about(seconds: float) -> dict[str, Any]:
    model = next((line for line in _cpu() if line.startswith("model name")), "").partition(":")[2].strip()
    return {
        "minutes": round(seconds / 60),
        "machine": f"{len(os.sched_getaffinity(0))} cores of {model or platform.machine()}, Linux, gloo",
        "date": datetime.date.today().isoformat(),
    }


def _cpu() -> list[str]:
    return Path("/proc/cpuinfo").read_text().splitlines()


if __name__ == "__main__":
    main()
