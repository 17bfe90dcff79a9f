"""What each rank does for `shardwise generate`."""

from __future__ import annotations

import inspect
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from PIL import Image

from shardwise import __version__
from shardwise.config import TensorParallelConfig
from shardwise.errors import ConfigError
from shardwise.generate import preflight
from shardwise.generate.load import load, pipeline_class
from shardwise.generate.output import require_folder, require_video_writer, write_mp4, write_png
from shardwise.generate.progress import Progress, watch_steps
from shardwise.generate.request import OURS, Request
from shardwise.launch.group import limit_collectives
from shardwise.models.progress import watched_by
from shardwise.runtime.agreement import waiting_at_most
from shardwise.runtime.group import TensorParallelGroup
from shardwise.runtime.replicas import spread_prompts


def generate(request: Request) -> list[str]:
    """Draw what was asked for, together with the other ranks; return the files, which the first rank writes.

    Raises:
        ConfigError: the degrees do not make the number of ranks.
        UnsupportedOption: something was asked for that the pipeline cannot do; on every rank.
        CheckpointError: the model's files are missing or invalid; on every rank.
        OutputError: the files cannot be written.
        RankFailure: another rank failed, or was asked for something else.
    """
    start = time.perf_counter()
    group = TensorParallelGroup.of(TensorParallelConfig(dist.get_world_size()))
    progress, patience = Progress(group, request.events), timedelta(seconds=request.load_timeout)
    with group.agreement("starting to generate", patience) as step:
        step.must_equal(**request.as_dict())
        call = _checked_call(request, group)
        progress.tell("start", ranks=group.degree, device=str(group.device), request=request.as_dict())
        progress.check()
    with progress.shown():
        progress.phase("loading")
        with group.agreement("loading", patience), waiting_at_most(patience), watched_by(progress.load):
            pipeline = load(request, group)
        limit_collectives(timedelta(seconds=request.timeout))
        progress.loaded(pipeline.parallel_report)
        watch_steps(pipeline, progress)
        progress.phase("encoding")
        drawn = _drawn(request, pipeline, call)
        progress.phase("writing")
        with group.agreement("writing", patience) as step:
            progress.check()
            files = _written(request, pipeline, call, drawn) if group.rank == 0 else None
            step.say(files)
            _tell_the_end(progress, pipeline, files, time.perf_counter() - start)
            progress.check()
    return step.heard[0]  # type: ignore[no-any-return]


def _checked_call(request: Request, group: TensorParallelGroup) -> dict[str, Any]:
    """Return the pipeline's arguments, once all that can be known before loading is in order."""
    if request.ranks != group.degree:
        raise ConfigError(
            f"tp {request.tp} x cfg {request.cfg} x dp {request.dp} x ulysses {request.ulysses} "
            f"is {request.ranks} ranks, and {group.degree} were started: change one of them"
        )
    preflight.check(request)
    cls, _ = pipeline_class(request.location)
    accepted = inspect.signature(cls.__call__).parameters.keys() - OURS - {"self", "args", "kwargs"}
    if group.rank == 0:
        require_folder(Path(request.out))
        if "num_frames" in accepted:
            require_video_writer()
    return request.call(cls.__name__, accepted)


@torch.inference_mode()
def _drawn(request: Request, pipeline: Any, call: dict[str, Any]) -> Any:
    """Return the pictures or videos, each drawn from noise of its own seed.

    Generators are of the CPU, so noise is the same for any device, any number of ranks and any batch.
    """
    seeds = range(request.seed, request.seed + len(request.pictures))
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]

    def draw(**arguments: Any) -> Any:
        with waiting_at_most(timedelta(seconds=request.timeout)):
            return pipeline(**arguments)

    if request.dp == 1:
        return draw(**call, generator=generators if len(generators) > 1 else generators[0])[0]
    others = {name: value for name, value in call.items() if name != "prompt"}
    mesh, timeout = pipeline.parallel_mesh, request.load_timeout
    return spread_prompts(draw, request.pictures, mesh=mesh, generator=generators, timeout=timeout, **others)


def _written(request: Request, pipeline: Any, call: dict[str, Any], drawn: Any) -> list[str]:
    """Write the pictures or videos, and return their files."""
    out, files = Path(request.out), []
    for i, (prompt, result) in enumerate(zip(request.pictures, drawn, strict=True)):
        seed = request.seed + i
        parameters = {**_parameters(request, pipeline, call), "prompt": prompt, "seed": seed}
        if isinstance(result, Image.Image):
            files.append(write_png(result, out, f"seed-{seed}", parameters))
        else:
            files.append(write_mp4(result, out, f"seed-{seed}", parameters, request.fps))
    return [str(file) for file in files]


def _parameters(request: Request, pipeline: Any, call: dict[str, Any]) -> dict[str, Any]:
    """Return what somebody needs to draw the same again."""
    names = ("model", "negative_prompt", "tp", "cfg", "dp", "ulysses", "lora", "quantize", "spread_decode")
    return {
        **{name: value for name, value in call.items() if name not in ("prompt", "negative_prompt")},
        **{name: getattr(request, name) for name in names},
        "pipeline": type(pipeline).__name__,
        "dtype": str(pipeline.dtype).removeprefix("torch."),
        "shardwise": __version__,
        "diffusers": diffusers.__version__,
        "torch": torch.__version__,
    }


def _tell_the_end(progress: Progress, pipeline: Any, files: list[str] | None, seconds: float) -> None:
    """Say what came of the job, and of the ranks for guidance if there were any."""
    spread = getattr(pipeline, "guidance_spread", None)
    if spread is not None:
        progress.tell("guidance", **asdict(spread.report))
        progress.note("guidance", str(spread.report))
    progress.tell("done", files=files, seconds=round(seconds, 3))
