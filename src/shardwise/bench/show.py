"""The figures as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

_MIB = 2**20


def load_table(found: Mapping[str, Any]) -> Table:
    """Return the table of `bench_load`."""
    size, floor = found["checkpoint_bytes"] / 1e9, found["sequential_read"]
    read = ", ".join(f"{state.removesuffix('_s')} {seconds:.2f} s" for state, seconds in floor.items())
    table = Table(title=f"{size:.2f} GB on {found['ranks']} ranks; read from end to end: {read}")
    names = (
        "",
        "s",
        "CPU s",
        "staging, MiB",
        "mapped, MiB",
        "requested, MB",
        "cold, s",
        "cold, MB of storage",
    )
    for name in names:
        table.add_column(name, justify="right" if name else "left")
    for figures in found["variants"].values():
        cold = figures.get("cold")
        table.add_row(
            figures["title"],
            f"{figures['wall_s']:.2f}",
            f"{figures['cpu_s']:.2f}",
            f"{figures['staging_bytes'] / _MIB:.0f}",
            f"{figures['file_backed_bytes'] / _MIB:.0f}",
            f"{figures['bytes_requested_per_rank'] / 1e6:.1f}",
            f"{cold['wall_s']:.2f}" if cold else "",
            f"{cold['storage_bytes_node'] / 1e6:.0f}" if cold else "",
        )
    return table


def step_table(found: Mapping[str, Any]) -> Table:
    """Return the table of `bench_step`."""
    host = found["colwise_call"]
    table = Table(
        title=f"one forward on {found['ranks']} ranks; a colwise call takes {host['ratio']:.2f} times "
        f"the CPU time of a plain one ({host['colwise_us']:.1f} and {host['plain_us']:.1f} us)"
    )
    for name in ("", "ms", "CPU ms", "all-reduces", "KiB"):
        table.add_column(name, justify="right" if name else "left")
    for case in found["cases"]:
        for way, figures in case["ways"].items():
            table.add_row(
                f"{case['name']}, {case['size']}: {way}",
                f"{figures['wall_s'] * 1e3:.1f}",
                f"{figures['cpu_s'] * 1e3:.1f}",
                str(figures["all_reduces"]),
                f"{figures['all_reduce_bytes'] / 1024:.0f}",
            )
    return table
