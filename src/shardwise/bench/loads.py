"""One load of one kind, on one rank, measured: what `shardwise bench load` runs in fresh processes."""

from __future__ import annotations

import json
import logging
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import torch
import torch.distributed as dist
from diffusers import Flux2Transformer2DModel as DiffusersModel  # and with it what a load would import
from torch import Tensor, nn

from shardwise.bench import diffusers_tp
from shardwise.bench.arena import Arena
from shardwise.bench.checkpoint import STEM
from shardwise.bench.gauges import drop_from_memory, file_bytes, memory, settle
from shardwise.bench.ranks import Watch
from shardwise.checkpoint.read import SliceReader
from shardwise.checkpoint.read_plan import CHUNK
from shardwise.config import TensorParallelConfig
from shardwise.models import Flux2Transformer2DModel
from shardwise.models.lookup import skeleton
from shardwise.models.planning import without_modulations
from shardwise.plan.resolve import resolve
from shardwise.runtime.devices import current_device, synchronize
from shardwise.runtime.group import default_device_type

DTYPE = torch.bfloat16
PLAN: dict[str, Any] = Flux2Transformer2DModel._tp_plan
_ROOM_BETWEEN = 64  # bytes for each tensor, so that it begins where it may


@dataclass(frozen=True)
class Kind:
    """A way to load.

    Attributes:
        title: What a reader calls it.
        load: Loads a folder by a configuration: its degree, and its plan.
        ready: Whether slices go to memory that is in place before, as that of a device is.
        full: Whether each rank holds the whole model first.
        floor: Whether it is no load at all, and only as many bytes are read.
    """

    title: str
    load: Callable[[Path, TensorParallelConfig], Any]
    ready: bool = False
    full: bool = False
    floor: bool = False


def _shardwise(folder: Path, config: TensorParallelConfig) -> Any:
    return Flux2Transformer2DModel.from_pretrained(folder, parallel_config=config, dtype=DTYPE)


def _diffusers(folder: Path, config: TensorParallelConfig) -> Any:
    theirs = diffusers_tp.config(config.tp_degree)
    return DiffusersModel.from_pretrained(folder, parallel_config=theirs, torch_dtype=DTYPE)


def _shardwise_full(folder: Path, config: TensorParallelConfig) -> Any:
    model = Flux2Transformer2DModel.from_pretrained(folder, dtype=DTYPE)
    model.enable_parallelism(config=config)
    return model


def _diffusers_full(folder: Path, config: TensorParallelConfig) -> Any:
    model = DiffusersModel.from_pretrained(folder, torch_dtype=DTYPE)
    model.enable_parallelism(config=diffusers_tp.config(config.tp_degree))
    return model


def _bytes_alone(folder: Path, config: TensorParallelConfig) -> nn.Module:
    """Read as many bytes as a rank keeps, one after another, into new memory: no load that holds them does less."""
    nbytes = max(shard_bytes(folder, config))
    room = (SliceReader.empty or torch.empty)((nbytes,), dtype=torch.uint8, device=torch.device("cpu"))
    target, done = room.numpy().data, 0
    for file in weight_files(folder):
        with file.open("rb", buffering=0) as stream:
            while done < nbytes and (got := stream.readinto(target[done : done + CHUNK])):
                done += got
    return nn.ParameterList([nn.Parameter(room, requires_grad=False)])


KINDS = {
    "shardwise": Kind("shardwise", _shardwise),
    "shardwise_ready": Kind("shardwise, into ready memory", _shardwise, ready=True),
    "diffusers": Kind("diffusers", _diffusers),
    "diffusers_ready": Kind("diffusers, into ready memory", _diffusers, ready=True),
    "shardwise_full_then_shard": Kind("shardwise, load all, then shard", _shardwise_full, full=True),
    "diffusers_full_then_shard": Kind("diffusers, load all, then shard", _diffusers_full, full=True),
    "bytes_alone": Kind("as many bytes, nothing else", _bytes_alone, floor=True),
    "bytes_alone_ready": Kind("as many bytes, into ready memory", _bytes_alone, ready=True, floor=True),
}


def measure(
    watch: Watch, name: str, folder: Path, rehearsal: Path, modulations: bool, cold: bool, check: bool
) -> dict[str, Any]:
    """Load `folder` on this rank, and return what that took.

    Args:
        watch: Told when the load begins and ends.
        name: One of `KINDS`.
        folder: The checkpoint.
        rehearsal: A tiny checkpoint of the same class, which is loaded before: what happens once in a process is no
            part of a load.
        modulations: Whether the modulations are sharded, as shardwise does; or left whole, as diffusers' plan does.
        cold: Whether the files are dropped from memory first.
        check: Whether to add the check sums of the tensors, by name.
    """
    kind = KINDS[name]
    config, rehearsed = (
        config_of(place, dist.get_world_size(), modulations) for place in (folder, rehearsal)
    )
    with quiet():
        _once(kind, rehearsal, rehearsed, None)
        arena = Arena(room_for(folder, config)) if kind.ready else None
        if cold and dist.get_rank() == 0:
            cold = drop_from_memory(sorted(folder.glob("*.safetensors")))
        found, model = _measured(watch, lambda: _once(kind, folder, config, arena))
    shard = sum(_local(p).nbytes for p in model.parameters())
    on_host = sum(_local(p).nbytes for p in model.parameters() if p.device.type == "cpu")
    found |= _phases(model) | {"shard_bytes": shard, "new_bytes": 0 if kind.ready else on_host, "cold": cold}
    if check:
        found["check_sums"] = {key: _check_sum(_local(p)) for key, p in model.named_parameters()}
    return found


def _once(kind: Kind, folder: Path, config: TensorParallelConfig, arena: Arena | None) -> Any:
    with ExitStack() as changes:
        if kind.load in (_diffusers, _diffusers_full):
            if default_device_type() == "cpu":
                changes.enter_context(diffusers_tp.on_cpu(arena))
            changes.enter_context(diffusers_tp.same_slices(DiffusersModel, config.plan or {}))
        elif arena is not None:
            changes.enter_context(mock.patch.object(SliceReader, "empty", arena.empty))
        return kind.load(folder, config)


def _measured(watch: Watch, load: Callable[[], Any]) -> tuple[dict[str, Any], nn.Module]:
    settle()
    before, requested = memory(), file_bytes()
    watch.begin()
    clock, cpu = time.perf_counter(), time.process_time()
    model = load()
    synchronize(own_device())
    cpu = time.process_time() - cpu
    own = time.perf_counter() - clock
    watch.end()
    wall = time.perf_counter() - clock
    after, now = memory(), file_bytes()
    return {
        "wall_s": wall,
        "own_wall_s": own,
        "cpu_s": cpu,
        "before_anonymous": before["RssAnon"],
        "before_files": before["RssFile"],
        "highest": after["VmHWM"] - before["VmRSS"],
        "left_files": after["RssFile"] - before["RssFile"],
        "requested": now["rchar"] - requested["rchar"],
        "from_storage": now["read_bytes"] - requested["read_bytes"],
    }, model


def _phases(model: Any) -> dict[str, float]:
    """Return the seconds of the static check and of reading, where a load has such phases."""
    reports = (("check_s", "check_report"), ("read_s", "load_report"))
    found = ((name, getattr(model, report, None)) for name, report in reports)
    return {name: report.seconds for name, report in found if report is not None}


def shard_bytes(folder: Path, config: TensorParallelConfig) -> list[int]:
    """Return the bytes that each rank's slices have by the plan, without opening a file of weights."""
    model, degree = _whole(folder), config.tp_degree
    plan = resolve(model, config.plan or {}, degree)
    shapes = [(plan.layout(name), tuple(p.shape)) for name, p in model.named_parameters()]
    return [
        sum(DTYPE.itemsize * prod(layout.local_shape(shape, rank, degree)) for layout, shape in shapes)
        for rank in range(degree)
    ]


def room_for(folder: Path, config: TensorParallelConfig) -> int:
    """Return how much memory the slices of any rank take."""
    count = sum(1 for _ in _whole(folder).parameters())
    return max(shard_bytes(folder, config)) + _ROOM_BETWEEN * count


def config_of(folder: Path, degree: int, modulations: bool) -> TensorParallelConfig:
    """Return the declared plan, with or without the modulations, less the double blocks that a small one lacks."""
    double = _settings(folder)["num_layers"] > 0
    plan = PLAN if modulations else without_modulations(PLAN)
    keys = (key for key in plan if double or not key.startswith("transformer_blocks."))
    return TensorParallelConfig(degree, plan={key: plan[key] for key in keys})


def _whole(folder: Path) -> nn.Module:
    return skeleton(Flux2Transformer2DModel, **_settings(folder))


def _settings(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return {key: value for key, value in config.items() if not key.startswith("_")}


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights of a checkpoint, in order."""
    return sorted(folder.glob(f"{STEM}*.safetensors"))


def _local(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter, of diffusers' kind or of ours."""
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach()


def _check_sum(tensor: Tensor) -> str:
    data = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return f"{tuple(tensor.shape)} {zlib.crc32(data):08x}"


def own_device() -> torch.device:
    """Return the device of this rank."""
    return current_device(default_device_type())


@contextmanager
def quiet() -> Iterator[None]:
    """No bars and no warnings: they are not what is measured."""
    diffusers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)
