"""`--tp auto`: the fewest ranks whose memory the weights fit in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path

import diffusers
import torch
from safetensors import safe_open

from shardwise.config import TensorParallelConfig
from shardwise.errors import CheckpointError, ConfigError, PlanError
from shardwise.generate.request import Request
from shardwise.models.options import library_of
from shardwise.models.planning import choose_plan
from shardwise.pipeline.components import Component, choose, entries
from shardwise.plan.resolve import resolve
from shardwise.runtime.devices import accelerator

FOR_WEIGHTS = 0.8
"""Share of the free memory that weights may take. The rest is for activations, of a size that nobody knows yet."""
_GIB = 2**30


def smallest_that_fits(needed: Mapping[int, int], room: Mapping[int, int]) -> tuple[int, str]:
    """Return the smallest degree whose weights have room on each device, and why it is that one.

    Args:
        needed: Degree -> bytes of weights of the largest rank.
        room: Degree -> bytes that a rank has for them.

    Raises:
        ConfigError: none fits.
    """
    degrees = sorted(needed)
    facts = [
        f"tp {degree} needs {needed[degree] / _GIB:.2f} of {room[degree] / _GIB:.2f} GiB a rank"
        for degree in degrees
    ]
    for i, degree in enumerate(degrees):
        if needed[degree] <= room[degree]:
            smaller = f" ({'; '.join(facts[:i])})" if i else ""
            return degree, f"{facts[i]} that weights may take{smaller}"
    raise ConfigError(
        f"--tp auto: the weights fit at no degree: {'; '.join(facts)}; try --quantize int8, or more devices"
    )


def choose_degree(request: Request, device: str | None) -> tuple[int, str]:
    """Return the degree for a request on this machine, and why it is that one.

    Raises:
        ConfigError: the weights fit at no degree.
        CheckpointError: the model cannot be read.
    """
    accelerated = device != "cpu" and accelerator() is not None
    most = (torch.accelerator.device_count() if accelerated else os.cpu_count() or 1) // request.ranks
    degrees = [degree for degree in (1, 2, 4, 8, 16, 32, 64) if degree <= max(most, 1)]
    dtype = getattr(torch, request.dtype or ("bfloat16" if accelerated else "float32"))
    needed = weights_by_degree(request, degrees, dtype)
    return smallest_that_fits(
        needed, {degree: _room(accelerated, degree * request.ranks) for degree in needed}
    )


def _room(accelerated: bool, ranks: int) -> int:
    """Return the bytes that a rank has for weights. Ranks on CPUs share the memory of the machine."""
    if accelerated:
        devices = range(torch.accelerator.device_count())
        free = min(torch.accelerator.get_memory_info(index)[0] for index in devices)
        return int(FOR_WEIGHTS * free)
    available = next(
        (
            int(line.split()[1]) * 1024
            for line in Path("/proc/meminfo").read_text().splitlines()
            if line.startswith("MemAvailable")
        ),
        0,
    )
    return int(FOR_WEIGHTS * available / ranks)


def weights_by_degree(request: Request, degrees: list[int], dtype: torch.dtype) -> dict[int, int]:
    """Return the bytes of weights that the largest rank holds, by degree; those the model cannot have are left out.

    A model of the hub is downloaded first, which the ranks would do anyway.

    Raises:
        CheckpointError: the model cannot be read.
    """
    folder = _folder(request.location)
    index = diffusers.DiffusionPipeline.load_config(folder)
    sharded = choose(folder, index, request.components, {}, {"dtype": dtype})
    names = {component.name for component in sharded}
    whole = sum(_parameters(folder / name) for name, _ in entries(index) if name not in names)
    needed = dict.fromkeys(degrees, whole * dtype.itemsize)
    for component in sharded:
        shares = _shares(component, folder, degrees, request.quantize is not None)
        needed = {degree: total + shares[degree] for degree, total in needed.items() if degree in shares}
    return needed


def _shares(component: Component, folder: Path, degrees: list[int], int8: bool) -> dict[int, int]:
    """Return the bytes that a rank holds of one component, by degree, as far as its plan has it."""
    model = library_of(component.cls).parse(component.options).build(component.cls, folder)
    plan, int8 = choose_plan(model, TensorParallelConfig()), int8 and isinstance(model, diffusers.ModelMixin)
    shares = {}
    for degree in degrees:
        with suppress(PlanError):
            resolved = resolve(model, plan, degree)
            shares[degree] = sum(
                prod(resolved.layout(name).local_shape(tuple(tensor.shape), 0, degree))
                * (1 if int8 and tensor.dim() == 2 else tensor.dtype.itemsize)
                for name, tensor in model.named_parameters()
            )
    return shares


def _parameters(folder: Path) -> int:
    """Return the number of parameters in the safetensors files of a component; of variants, those of the largest."""
    by_variant: dict[str, int] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            sizes = [torch.Size(tensors.get_slice(key).get_shape()).numel() for key in tensors.keys()]  # noqa: SIM118
        variant = file.name.split("-0")[0]
        by_variant[variant] = by_variant.get(variant, 0) + sum(sizes)
    return max(by_variant.values(), default=0)


def _folder(location: str) -> Path:
    if Path(location).is_dir():
        return Path(location)
    try:
        return Path(diffusers.DiffusionPipeline.download(location))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{location} is neither a folder nor can it be fetched: {error}") from error
