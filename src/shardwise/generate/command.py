"""`shardwise generate`: the command's front end. It imports no torch, so that ranks start at once."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import click

from shardwise.errors import ConfigError, OutputError, RankFailure, ShardwiseError
from shardwise.generate import preflight
from shardwise.generate.events import append
from shardwise.generate.request import LARGEST_SEED, Request
from shardwise.launch import found, own_share, run_ranks
from shardwise.launch.machine import require_room

WORKER = "shardwise.generate.worker:generate"
AUTO = "auto"
MOST_DIGITS = 9
"""Of a number that somebody types: more are a mistake, and Python refuses to read thousands."""
_DEGREE = click.IntRange(1, 10**MOST_DIGITS)
_MANY = click.IntRange(1, 10_000)
_SECONDS = click.FloatRange(0, 10**7, min_open=True)


def _tp(context: click.Context, option: click.Parameter, value: str) -> int | None:
    """Return a degree, or None for `auto`."""
    if value == AUTO:
        return None
    if not value.isdecimal() or len(value) > MOST_DIGITS or int(value) < 1:
        raise click.BadParameter(f"{value!r} is neither a number of ranks nor {AUTO!r}")
    return int(value)


def _size(context: click.Context, option: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Return width and height."""
    if value is None:
        return None
    found = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not a width and a height in pixels, such as 1024x768")
    return int(found[1]), int(found[2])


def _names(context: click.Context, option: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    return tuple(name.strip() for name in value.split(",")) if value is not None else None


def _arguments(context: click.Context, option: click.Parameter, value: str) -> dict[str, Any]:
    """Return the arguments in a JSON object."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise click.BadParameter("not a JSON object, such as '{\"true_cfg_scale\": 4}'")
    return found


def _finite(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number")
    return value


@click.command()
@click.argument("model")
@click.option(
    "--prompt", "prompts", multiple=True, required=True, help="What to draw; may be given several times."
)
@click.option("--negative-prompt", help="What not to draw.")
@click.option(
    "--tp",
    default="1",
    show_default=True,
    callback=_tp,
    help="Ranks that share the weights; auto takes the fewest whose memory they fit in.",
)
@click.option(
    "--cfg", type=_DEGREE, default=1, show_default=True, help="Ranks that share the branches of guidance."
)
@click.option("--dp", type=_DEGREE, default=1, show_default=True, help="Replicas that share the prompts.")
@click.option("--ulysses", type=_DEGREE, default=1, show_default=True, help="Ranks that share the sequence.")
@click.option(
    "--device", type=click.Choice(["cuda", "cpu"]), help="By default CUDA if each rank can have one."
)
@click.option("--oversubscribe", is_flag=True, help="Start more ranks than four for each core.")
@click.option("--steps", type=_MANY, help="Denoising steps.")
@click.option("--guidance", type=float, callback=_finite, help="The pipeline's guidance_scale.")
@click.option(
    "--seed",
    type=click.IntRange(0, LARGEST_SEED),
    default=0,
    show_default=True,
    help="Of the first picture; the next has the next one.",
)
@click.option("--size", callback=_size, metavar="WxH", help="Width and height in pixels.")
@click.option(
    "--num-images",
    "images",
    type=_MANY,
    default=1,
    show_default=True,
    help="Pictures of each prompt.",
)
@click.option("--num-frames", "frames", type=_MANY, help="Frames of a video.")
@click.option(
    "--fps", type=click.IntRange(1, 1000), default=16, show_default=True, help="Frames of a video per second."
)
@click.option("--lora", metavar="FILE", help="A LoRA adapter: a file, a folder or a hub id.")
@click.option(
    "--quantize", type=click.Choice(["int8"]), help="Quantize the weights of transformers as they arrive."
)
@click.option(
    "--spread-decode", is_flag=True, help="Tile the VAE's decode, and share the tiles out over the ranks."
)
@click.option("--unload-text-encoders", is_flag=True, help="Free the text encoders before denoising.")
@click.option(
    "--components",
    callback=_names,
    metavar="NAMES",
    help="What to shard, with commas; by default all that can be.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="By default bfloat16 on CUDA, float32 on CPU.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False),
    default="generated",
    show_default=True,
    help="Folder for the pictures.",
)
@click.option(
    "--events", type=click.Path(dir_okay=False), metavar="FILE", help="Write what happens, as JSON lines."
)
@click.option(
    "--arguments",
    callback=_arguments,
    default="{}",
    metavar="JSON",
    help="Further arguments of the pipeline, as a JSON object.",
)
@click.option(
    "--timeout",
    type=_SECONDS,
    callback=_finite,
    default=120.0,
    show_default=True,
    help="Seconds that a rank waits for the others while generating.",
)
@click.option(
    "--load-timeout",
    type=_SECONDS,
    callback=_finite,
    default=7200.0,
    show_default=True,
    help="The same while loading and writing.",
)
def generate(device: str | None, oversubscribe: bool, **options: Any) -> None:
    """Draw with the pipeline MODEL on several ranks, which are started here, or by torchrun, Slurm or Kubernetes.

    MODEL is a folder or hub id of a diffusers pipeline, or "embedded" for the one that comes with shardwise.

    Exits 1 if a rank fails, 2 if the question is wrong, 130 after Ctrl-C; no rank is left behind.
    """
    try:
        request = _request(device, options)
        require_room(own_share(request.ranks), device, oversubscribe)
        preflight.check(request)
    except ShardwiseError as error:
        click.echo(f"Error: {error}", err=True)
        raise SystemExit(2) from error
    timeout = timedelta(seconds=request.timeout)
    try:
        patience = timedelta(seconds=request.load_timeout)
        drawn = run_ranks(
            WORKER,
            request.ranks,
            request,
            device=device,
            timeout=timeout,
            patience=patience,
            oversubscribe=oversubscribe,
        )
        files = drawn[0]
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except ShardwiseError as error:
        click.echo(f"Error: {error}", err=True)
        if not isinstance(error, RankFailure):
            raise SystemExit(2) from error
        _write_down(request, error)
        raise SystemExit(1) from error
    if files is not None:  # else they are another machine's
        click.echo("\n".join(files))


def _write_down(request: Request, error: RankFailure) -> None:
    """Add the failure to the file of events, which the ranks cannot do any more."""
    try:
        append(request.events, "failed", message=str(error))
    except OutputError as another:
        click.echo(f"Error: {another}", err=True)


def _request(device: str | None, options: dict[str, Any]) -> Request:
    """Return the request that the options make, its degree chosen if that was left to us."""
    tp = options.pop("tp")
    request = Request(tp=tp or 1, **options)
    if tp is not None:
        return request
    place = found()
    if place is not None and place.may_divide:
        raise ConfigError(
            f"--tp auto looks at one machine, and {place.by} has started {place.count}: say --tp N, of which each "
            "starts its share"
        )
    if place is not None:  # its launcher has decided
        return replace(request, tp=max(1, place.count // request.ranks))
    from shardwise.generate.degree import choose_degree  # imports torch, which takes a second

    chosen, why = choose_degree(request, device)
    click.echo(f"--tp auto: {why}", err=True)
    return replace(request, tp=chosen)
