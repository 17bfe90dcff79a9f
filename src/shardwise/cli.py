"""The `shardwise` command: thin front ends of the library's functions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from shardwise import __version__

if TYPE_CHECKING:
    from shardwise.demo.run import DemoReport


@click.group()
@click.version_option(__version__, prog_name="shardwise")
def main() -> None:
    """Tensor parallelism for diffusers pipelines."""


@main.command()
@click.option(
    "--tp", "tp_degree", type=click.IntRange(min=1), default=2, show_default=True, help="Number of ranks."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-output"),
    show_default=True,
    help="Folder for the sheets and the report.",
)
def demo(tp_degree: int, out: Path) -> None:
    """Draw a sheet with the embedded model on several ranks, and compare it with one process."""
    from shardwise.demo.run import run_demo  # torch and diffusers take seconds to import

    report = run_demo(tp_degree, out)
    console = Console()
    console.print(_demo_table(report))
    console.print(
        f"largest pixel difference between {tp_degree} ranks and one process: "
        f"[bold]{report.max_pixel_difference}[/bold] of 255; "
        f"{report.all_reduces_per_step:g} all-reduces per step"
    )
    console.print(
        f"pictures: {out / 'sheet.png'}, {out / 'sheet-one-process.png'}; figures: {out / 'report.json'}"
    )


def _demo_table(report: DemoReport) -> Table:
    table = Table(
        title=f"Transformer of the embedded pipeline, tp_degree {report.tp_degree} on {report.device}"
    )
    for column in ("", "weights, bytes", "share", "read, bytes", "load, s", "draw, s"):
        table.add_column(column, justify="right" if column else "left")
    whole = report.weight_bytes_one_process
    alone = (report.load_seconds_one_process, report.seconds_one_process)
    rows = [("one process", whole, report.bytes_read_one_process, alone)]
    held_and_read = zip(report.weight_bytes_per_rank, report.bytes_read_per_rank, strict=True)
    for rank, (held, read) in enumerate(held_and_read):
        rows.append((f"rank {rank}", held, read, (report.load_seconds, report.seconds)))
    for name, held, read, times in rows:
        table.add_row(name, f"{held:,}", f"{held / whole:.1%}", f"{read:,}", *(f"{t:.1f}" for t in times))
    return table
