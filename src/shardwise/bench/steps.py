"""One forward in several ways, on one rank, measured: what `shardwise bench step` runs in fresh processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import models
from shardwise.bench import diffusers_tp
from shardwise.bench.gauges import turns
from shardwise.bench.loads import DTYPE, own_device, quiet
from shardwise.bench.ranks import Watch
from shardwise.config import TensorParallelConfig
from shardwise.models.lookup import family_of, skeleton
from shardwise.plan.rules import tensors_in
from shardwise.runtime.devices import synchronize
from shardwise.runtime.modules import ColwiseLinear

ALONE, OURS, THEIRS = "one process", "shardwise", "diffusers"
SAME_PLAN = "shardwise, modulations whole"
"""The way that shards what diffusers' plans shard."""
_WARM_UP = 2
_CALLS = 1000
_ROUNDS = 31


@dataclass(frozen=True)
class Case:
    """A model whose forward is measured.

    Attributes:
        name: Its class.
        size: What is said of its size.
        config: Changes of the default configuration.
        batch: Number of samples.
    """

    name: str
    size: str
    config: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 1


REAL, SMALL = "real widths, few blocks", "small widths, many blocks"
_FEW = {
    "QwenImageTransformer2DModel": {"num_layers": 2},
    "FluxTransformer2DModel": {"num_layers": 1, "num_single_layers": 2},
    "Flux2Transformer2DModel": {"num_layers": 1, "num_single_layers": 1},
    "MiniMaxH3Transformer3DModel": {"num_layers": 2, "num_refiner_layers": 1},
}
_MANY = {
    "QwenImageTransformer2DModel": {"num_layers": 24},
    "FluxTransformer2DModel": {"num_layers": 8, "num_single_layers": 24},
    "Flux2Transformer2DModel": {"num_layers": 8, "num_single_layers": 24},
    "MiniMaxH3Transformer3DModel": {"num_layers": 24},
}


def cases() -> list[Case]:
    """Return what is measured: four families at two sizes."""
    few = [Case(name, REAL, config, batch=4) for name, config in _FEW.items()]
    return few + [Case(name, SMALL, _tiny(name) | config) for name, config in _MANY.items()]


def _tiny(name: str) -> dict[str, Any]:
    family: Any = family_of(getattr(models, name))
    return dict(family.TINY_CONFIG)


def measure_steps(watch: Watch, case: Case, folder: Path, repeats: int) -> dict[str, Any]:
    """Run a model's forward in each way, in turns, and return what this rank measured, by way.

    Args:
        watch: Not needed: memory is not what is measured.
        case: The model.
        folder: Its checkpoint.
        repeats: Number of turns.
    """
    with quiet():
        ways = _ways(case, folder)
    inputs = _inputs(case)
    found: dict[str, Any] = {way: {"wall_s": [], "cpu_s": []} for way in ways}
    outputs = {}
    for way, forward in ways.items():
        counter = _Collectives()
        with torch.no_grad(), counter:
            outputs[way] = _tensors(forward(**inputs))
        found[way] |= {"all_reduces": counter.count, "all_reduce_bytes": counter.nbytes}
    for turn in range(_WARM_UP + repeats):
        for way in turns(list(ways), turn):
            wall, cpu = _timed(partial(ways[way], **inputs))
            if turn >= _WARM_UP:
                found[way]["wall_s"].append(wall)
                found[way]["cpu_s"].append(cpu)
    if dist.get_rank() == 0:
        for way in found:
            found[way]["difference"] = _difference(outputs[ALONE], outputs[way])
    return found


def _ways(case: Case, folder: Path) -> dict[str, Callable[..., Any]]:
    """Return what runs the model: alone on rank 0, sharded by us, and by diffusers where it has a plan."""
    degree, theirs = dist.get_world_size(), getattr(diffusers, case.name)
    ours, same = (
        getattr(models, case.name).from_pretrained(folder, parallel_config=config, dtype=DTYPE)
        for config in (TensorParallelConfig(degree), TensorParallelConfig(degree, shard_modulation=False))
    )
    device = own_device()
    alone = theirs.from_pretrained(folder, torch_dtype=DTYPE).to(device) if dist.get_rank() == 0 else _nothing
    ways = {ALONE: alone, OURS: ours, SAME_PLAN: same}
    if theirs._tp_plan is not None and (device.type == "cpu" or degree <= torch.accelerator.device_count()):
        with diffusers_tp.on_cpu() if device.type == "cpu" else nullcontext():
            model = theirs.from_pretrained(
                folder, parallel_config=diffusers_tp.config(degree), torch_dtype=DTYPE
            )
        ways[THEIRS] = model
    return ways


def _nothing(**inputs: Any) -> None:
    """Do what a rank does while another one runs alone."""


def _inputs(case: Case) -> dict[str, Any]:
    family: Any = family_of(getattr(models, case.name))
    model: Any = skeleton(getattr(models, case.name), **case.config)
    inputs = family.example_inputs(model.config, torch.Generator().manual_seed(0), case.batch)
    return {name: _placed(value) for name, value in inputs.items()}


def _placed(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(own_device(), DTYPE if value.is_floating_point() else None)


def _timed(forward: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds of a forward, from when all ranks begin to when all have ended, and this thread's CPU time."""
    dist.barrier()
    clock, cpu = time.perf_counter(), time.thread_time()
    with torch.no_grad():
        forward()
    cpu = time.thread_time() - cpu
    synchronize(own_device())
    dist.barrier()
    return time.perf_counter() - clock, cpu


def _tensors(output: Any) -> list[Tensor]:
    return list(tensors_in(output.to_tuple() if hasattr(output, "to_tuple") else output))


def _difference(wanted: list[Tensor], found: list[Tensor]) -> float:
    """Return the largest difference of two outputs, relative to the largest value."""
    scale = max(tensor.abs().max().item() for tensor in wanted)
    return max((a - b).abs().max().item() for a, b in zip(wanted, found, strict=True)) / scale


class _Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the all-reduces that are dispatched, in either form, and the bytes that this rank puts into them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if str(func).partition(".")[2].partition(".")[0] in ("allreduce_", "all_reduce"):
            sent = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            self.count += 1
            self.nbytes += sum(tensor.nbytes for tensor in sent)
        return func(*args, **(kwargs or {}))


def measure_calls(watch: Watch, case: Case, folder: Path) -> dict[str, float]:
    """Return the CPU time of one call of a colwise Linear and of a plain one of its size, in microseconds.

    The tensors are tiny, so that it is the time of the calls and not of the products.
    """
    with quiet():
        ours = _ways(case, folder)[OURS]
    assert isinstance(ours, nn.Module)
    colwise = next(module for module in ours.modules() if isinstance(module, ColwiseLinear))
    plain = nn.Linear(
        colwise.in_features, colwise.out_features, colwise.bias is not None, own_device(), DTYPE
    )
    plain.load_state_dict(colwise.state_dict())
    input = torch.ones(1, 1, colwise.in_features, dtype=DTYPE, device=own_device())
    times: dict[str, list[float]] = {"colwise_us": [], "plain_us": []}
    with torch.no_grad():
        for turn in range(_ROUNDS):
            pairs = [("colwise_us", colwise), ("plain_us", plain)]
            for name, module in pairs if turn % 2 else pairs[::-1]:
                times[name].append(_call_seconds(module, input) * 1e6)
    return {name: median(values) for name, values in times.items()}


def _call_seconds(module: nn.Module, input: Tensor) -> float:
    start = time.thread_time()
    for _ in range(_CALLS):
        module(input)
    return (time.thread_time() - start) / _CALLS
