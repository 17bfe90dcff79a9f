"""`shardwise bench`: the command's front end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from shardwise.errors import ShardwiseError

_json = click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="File for the figures.",
)
_plot = click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the figures in this PNG file.",
)
_ranks = click.option("--ranks", type=click.IntRange(min=2), default=2, show_default=True)
_device = click.option(
    "--device",
    type=click.Choice(["cpu", "cuda", "xpu"]),
    default="cpu",
    show_default=True,
    help="Where the ranks compute.",
)


@click.group()
def bench() -> None:
    """Measure loading and steps on this machine, beside diffusers' tensor parallelism."""


@bench.command()
@_ranks
@click.option("--size-gb", type=click.FloatRange(min=0.01), default=3.6, show_default=True)
@click.option(
    "--modulations/--no-modulations",
    default=True,
    help="Cut the modulations too, as shardwise does by default; diffusers' own plan leaves them whole.",
)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--cold/--no-cold", default=True, help="Also measure with files that are on storage only.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write the checkpoint here and leave it; by default it is removed.",
)
@_device
@_json
@_plot
def load(
    ranks: int,
    size_gb: float,
    modulations: bool,
    repeats: int,
    cold: bool,
    folder: Path | None,
    device: str,
    json_file: Path,
    plot: Path | None,
) -> None:
    """Load a checkpoint of FLUX.2-dev's tensor shapes in six ways, beside reading as many bytes alone."""
    from shardwise.bench.load import bench_load  # torch and diffusers take seconds to import
    from shardwise.bench.plot import draw_loads
    from shardwise.bench.show import load_table

    def work() -> dict[str, Any]:
        return bench_load(
            ranks,
            size_gb,
            modulations=modulations,
            repeats=repeats,
            cold=cold,
            folder=folder,
            device=device,
            say=_say,
        )

    _measured(work, json_file, plot, load_table, draw_loads)


@bench.command()
@_ranks
@click.option("--repeats", type=click.IntRange(min=1), default=9, show_default=True)
@_device
@_json
@_plot
def step(ranks: int, repeats: int, device: str, json_file: Path, plot: Path | None) -> None:
    """Run the forward of four families on one process and on ranks."""
    from shardwise.bench.plot import draw_steps
    from shardwise.bench.show import step_table
    from shardwise.bench.step import bench_step

    def work() -> dict[str, Any]:
        return bench_step(ranks, repeats=repeats, device=device, say=_say)

    _measured(work, json_file, plot, step_table, draw_steps)


def _measured(work: Any, json_file: Path, plot: Path | None, table: Any, draw: Any) -> None:
    """Do the work, print its table, and write its files."""
    from shardwise.verification.plot import require_matplotlib

    try:
        if plot is not None:
            require_matplotlib()
        found = work()
    except ShardwiseError as error:
        click.echo(f"Error: {error}", err=True)
        raise SystemExit(2) from error
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(found, indent=1) + "\n")
    Console(width=max(120, Console().width)).print(table(found))
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        draw(found, plot)


def _say(line: str) -> None:
    click.echo(line, err=True)
