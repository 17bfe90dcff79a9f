"""The `shardwise` command: thin front ends of the library's functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from shardwise import __version__
from shardwise.bench.command import bench
from shardwise.doctor.command import doctor
from shardwise.errors import PlanError, ShardwiseError
from shardwise.generate.command import generate
from shardwise.launch import is_first

if TYPE_CHECKING:
    from shardwise.demo.run import DemoReport
    from shardwise.plan.estimate import Estimate


_F = TypeVar("_F", bound=Callable[..., Any])


def _tp(smallest: int) -> Callable[[_F], _F]:
    """Return the option that all commands call `--tp`."""
    degree = click.IntRange(min=smallest)
    return click.option(
        "--tp", "tp_degree", type=degree, default=2, show_default=True, help="Number of ranks."
    )


_plan_file = click.option(
    "--plan",
    "plan_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON file of module pattern -> style, in place of the declared plan.",
)
_uneven = click.option(
    "--uneven", is_flag=True, help="Share heads that a degree does not divide in unequal numbers."
)
_variant = click.option("--variant", help='Infix of the file names, such as "fp16".')
_as_json = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")


@click.group()
@click.version_option(__version__, prog_name="shardwise")
def main() -> None:
    """Tensor parallelism for diffusers pipelines."""


main.add_command(bench)
main.add_command(doctor)
main.add_command(generate)


@main.command()
@_tp(1)
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


@main.command()
@click.argument("model")
@_tp(1)
@_plan_file
@_uneven
@_as_json
def check(model: str, tp_degree: int, plan_file: Path | None, uneven: bool, as_json: bool) -> None:
    """Check the plan of MODEL without reading a weight.

    MODEL is the name of a model class (its default, full-size configuration is used), a folder or hub id with a
    config.json, or "embedded" for the model that comes with shardwise.

    Exits 1 if something is found, 2 if the question is wrong.
    """
    from shardwise.models.checking import check as run
    from shardwise.plan.files import read_plan

    with _exit_codes():
        plan = read_plan(plan_file) if plan_file else None
        report = run(str(_embedded()) if model == "embedded" else model, plan, tp_degree, uneven=uneven)
    click.echo(json.dumps(report.as_dict(), indent=2) if as_json else f"{model}: {report}")
    if not report.ok:
        raise SystemExit(1)


@main.command()
@click.argument("model")
@_tp(2)
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="Where; by default CUDA if each rank can have one."
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="What to compute in; by default float32.",
)
@click.option(
    "--subfolder", help="Folder of the checkpoint; of a pipeline's folder, by default its transformer."
)
@_plan_file
@_uneven
@_as_json
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the error of each module in this PNG file.",
)
def verify(
    model: str,
    tp_degree: int,
    device: str | None,
    dtype: str | None,
    subfolder: str | None,
    plan_file: Path | None,
    uneven: bool,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Compare MODEL on several ranks with one process, module by module.

    MODEL is the name of a model class (its tiny configuration with random weights is used), a folder or hub id
    of a checkpoint, or "embedded" for the model that comes with shardwise.

    Exits 1 if the plan is wrong, 2 if the question is.
    """
    import torch  # takes seconds to import

    from shardwise.plan.files import read_plan
    from shardwise.verification import verify as run
    from shardwise.verification.plot import draw_strip, require_matplotlib

    with _exit_codes():
        if plot is not None:
            require_matplotlib()
        report = run(
            _embedded() if model == "embedded" else model,
            tp_degree,
            plan=read_plan(plan_file) if plan_file else None,
            dtype=getattr(torch, dtype) if dtype else None,
            device=device,
            subfolder=subfolder,
            uneven=uneven,
        )
        if plot is not None and is_first():
            draw_strip(report, plot)
    if is_first():
        click.echo(json.dumps(report.as_dict(), indent=2) if as_json else str(report))
    if not report.ok:
        raise SystemExit(1)


@main.command()
@click.argument("model")
@click.option(
    "--tp",
    "degrees",
    callback=lambda context, option, value: _degrees(value),
    help="Numbers of ranks, with commas; by default 1,2,4,8, and 2 for --infer.",
)
@click.option("--infer", "find", is_flag=True, help="Find a plan, and say why.")
@_plan_file
@_uneven
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="bfloat16")
@click.option("--python", "as_python", is_flag=True, help="Print the plan only, as Python to paste.")
@_as_json
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the bytes of a rank by degree in this PNG file.",
)
def plan(
    model: str,
    degrees: tuple[int, ...] | None,
    find: bool,
    plan_file: Path | None,
    uneven: bool,
    dtype: str,
    as_python: bool,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Print the plan of MODEL and what a rank holds and sends, or with --infer find a plan.

    A plan is found by dataflow where example inputs are known for the class, without looking at a name; otherwise it
    is derived from the names of modules, and marked unproved. No weight is read.

    MODEL is the name of a model class (its default configuration; for --infer its tiny one, if it has one), a folder
    or hub id with a config.json, or "embedded" for the model that comes with shardwise.

    Exits 1 if there is no plan at this degree, 2 if the question is wrong.
    """
    named = str(_embedded()) if model == "embedded" else model
    with _exit_codes():
        if find:
            from shardwise.models.inference import infer

            found: Any = infer(named, degrees[0] if degrees else 2)
        else:
            found = _estimated(named, degrees or (1, 2, 4, 8), plan_file, dtype, uneven, plot)
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
    elif as_python:
        click.echo(found.as_python())
    else:
        click.echo(str(found))


@main.command()
@click.argument("source", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@_tp(2)
@_variant
@_plan_file
@_uneven
def shard(
    source: Path, target: Path, tp_degree: int, variant: str | None, plan_file: Path | None, uneven: bool
) -> None:
    """Cut the model in folder SOURCE for a number of ranks, one file for each, into folder TARGET.

    from_pretrained(parallel_config=...) reads them without a seek at this degree, and at any other. Takes 16 MiB of
    memory. If it is stopped, the same command goes on where it was.

    Exits 1 if the plan is wrong, 2 if something else is.
    """
    from shardwise.config import TensorParallelConfig
    from shardwise.models.offline import shard_folder
    from shardwise.models.progress import bar_of_bytes
    from shardwise.plan.files import read_plan

    with _exit_codes(), bar_of_bytes(f"{source} for {tp_degree} ranks") as progress:
        plan = read_plan(plan_file) if plan_file else None
        config = TensorParallelConfig(tp_degree, plan=plan, uneven=uneven)
        done = shard_folder(source, target, config, variant, progress)
    _say_resumed(done)


@main.command()
@click.argument("source", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@_variant
@click.option("--max-shard-size", default="10GB", show_default=True, help="Size from which files are split.")
def unshard(source: Path, target: Path, variant: str | None, max_shard_size: str) -> None:
    """Put the files of ranks in folder SOURCE together, as diffusers keeps a model, into folder TARGET.

    Takes 16 MiB of memory. If it is stopped, the same command goes on where it was.

    Exits 2 if something is wrong.
    """
    from shardwise.models.offline import unshard_folder
    from shardwise.models.progress import bar_of_bytes

    with _exit_codes(), bar_of_bytes(f"{source} as a whole") as progress:
        done = unshard_folder(source, target, variant, max_shard_size, progress)
    _say_resumed(done)


def _say_resumed(files: int) -> None:
    if files:
        click.echo(f"{files} file{'s' if files > 1 else ''} had been completed before")


def _degrees(value: str | None) -> tuple[int, ...] | None:
    """Return the numbers in a list with commas."""
    if value is None:
        return None
    numbers = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in numbers):
        raise click.BadParameter(f"{value!r} is not a list of numbers of ranks, such as 1,2,4,8")
    return tuple(dict.fromkeys(int(part) for part in numbers))


def _estimated(
    model: str,
    degrees: tuple[int, ...],
    plan_file: Path | None,
    dtype: str,
    uneven: bool,
    plot: Path | None,
) -> Estimate:
    import torch  # takes seconds to import

    from shardwise.models.planning import estimate
    from shardwise.models.planning_plot import draw_bytes
    from shardwise.plan.files import read_plan
    from shardwise.verification.plot import require_matplotlib

    if plot is not None:
        require_matplotlib()
    given = read_plan(plan_file) if plan_file else None
    found = estimate(model, degrees, given, dtype=getattr(torch, dtype), uneven=uneven)
    if plot is not None:
        draw_bytes(found, plot)
    return found


def _embedded() -> Path:
    """Return the folder of the embedded transformer."""
    from shardwise.demo import demo_model_path

    return demo_model_path() / "transformer"


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Show an error of the library as one: exit code 1 for a wrong plan, 2 for anything else."""
    try:
        yield
    except ShardwiseError as error:
        click.echo(f"Error: {error}", err=True)
        raise SystemExit(1 if isinstance(error, PlanError) else 2) from error
