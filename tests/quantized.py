"""Quantized tiny models: each kind of quantization by torchao, and how far a sharded model is from fp32 by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
import torch.distributed as dist
from diffusers import TorchAoConfig
from torch import Tensor, nn
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerAxis,
    PerGroup,
    PerTensor,
    quantize_,
)

from shardwise import TensorParallelConfig
from shardwise.runtime.modules import LocalLayer
from tests.helpers import distance, family, outputs, tiny_inputs
from tests.lora import FAMILIES as FAMILIES

KINDS: dict[str, Callable[[], Any]] = {
    "int8 weights": lambda: Int8WeightOnlyConfig(set_inductor_config=False),
    "int8 weights and activations": lambda: Int8DynamicActivationInt8WeightConfig(set_inductor_config=False),
    "fp8 weights": lambda: Float8WeightOnlyConfig(set_inductor_config=False),
    "int4 weights": lambda: IntxWeightOnlyConfig(torch.int4),
    "int4 weights in groups of 4": lambda: IntxWeightOnlyConfig(torch.int4, PerGroup(GROUP)),
}
"""What can be computed on a CPU. The option of torchao's that is off would change how all of torch multiplies."""

FURTHER_KINDS: dict[str, Callable[[], Any]] = {
    "int8 weights, one scale": lambda: Int8WeightOnlyConfig(
        granularity=PerTensor(), set_inductor_config=False
    ),
    "int8 weights and activations, one scale": lambda: Int8DynamicActivationInt8WeightConfig(
        granularity=PerTensor(), set_inductor_config=False
    ),
    "fp8 weights, one scale": lambda: Float8WeightOnlyConfig(
        granularity=PerTensor(), set_inductor_config=False
    ),
    "int4 weights, int8 activations": lambda: Int8DynamicActivationIntxWeightConfig(torch.int4, PerAxis(0)),
}
"""Kinds that are accepted as well, and tried on one class."""

INT8_PRODUCTS = {"int8 weights and activations", "int8 weights and activations, one scale"}
"""Kinds by which integers of 8 bits are multiplied."""

INT8, IN_GROUPS, GROUP = "int8 weights", "int4 weights in groups of 4", 4
INPUTS = 6
INPUTS_OF_ACTIVATIONS = 18
"""Where activations are rounded as well, each input is a draw: so many, for a mean that says something."""


def load(
    name: str, folder: Path, kind: str | None = None, sharded: bool = False, leave_out: Any = None
) -> Any:
    """Load a tiny model that is on disk, quantized or not, whole or sharded on all ranks."""
    options: dict[str, Any] = {}
    if kind is not None:
        options |= {
            "quantization_config": TorchAoConfig((KINDS | FURTHER_KINDS)[kind](), leave_out),
            "dtype": torch.float32,
        }
    if sharded:
        options["parallel_config"] = TensorParallelConfig(dist.get_world_size(), check=False)
    return getattr(family(name), name).from_pretrained(folder, **options)


def mean_distance(name: str, model: nn.Module, exact: nn.Module) -> float:
    """Return the mean distance of a model's outputs to exact ones, over six random inputs."""
    return fmean(distances(name, model, results(name, exact, INPUTS)))


def results(name: str, exact: nn.Module, count: int) -> list[list[Tensor]]:
    """Return the outputs of a model for each of some random inputs."""
    return [outputs(exact, tiny_inputs(name, seed)) for seed in range(count)]


def distances(name: str, model: nn.Module, exact: list[list[Tensor]]) -> list[float]:
    """Return the distance of a model's outputs to exact ones, for each of the same inputs."""
    return [distance(outputs(model, tiny_inputs(name, seed)), e) for seed, e in enumerate(exact)]


@dataclass(frozen=True)
class Distances:
    """How far a quantized model is from fp32, sharded and in one process: by input, the same for both."""

    sharded: list[float]
    whole: list[float]

    @property
    def means(self) -> tuple[float, float]:
        """Both, on average."""
        return fmean(self.sharded), fmean(self.whole)

    def excess(self, ratio: float) -> float:
        """Return by how many standard errors the sharded model is farther than `ratio` times one process.

        Which way an activation is rounded turns with the last digit of the sum that it comes from, and so with the
        order of summing and the processor. What is compared is therefore a mean, with what is left of chance in it.
        """
        beyond = [s - ratio * w for s, w in zip(self.sharded, self.whole, strict=True)]
        return fmean(beyond) / (stdev(beyond) / sqrt(len(beyond)))


def pair(name: str, folder: Path, kind: str) -> tuple[Any, Any]:
    """Return a quantized model, sharded and whole; without the layers that would cut a group, if it has groups."""
    leave_out = unfit(load(name, folder, sharded=True)) if kind == IN_GROUPS else None
    return load(name, folder, kind, True, leave_out), load(name, folder, kind, False, leave_out)


def unfit(sharded: nn.Module) -> list[str]:
    """Return the Linears of a sharded model of which a group of inputs would be cut, or whose width is odd."""
    found = []
    for path, module in sharded.named_modules():
        if isinstance(module, nn.Linear):
            along = isinstance(module, LocalLayer) and module.tp_shard.dim == 1
            borders = (
                [n for s in module.tp_spans for n in (s.start, s.length)] if along else [module.in_features]
            )
            found += [path] if any(border % GROUP for border in borders) else []
    return found


def quantize_as(model: nn.Module, loaded: nn.Module, kind: str) -> int:
    """Call `quantize_` for the Linears that are quantized in another model, and return their number.

    Diffusers leaves out what a class keeps in fp32; torchao knows nothing of that.
    """
    chosen = {p for p, m in loaded.named_modules() if isinstance(m, nn.Linear) and is_quantized(m.weight)}
    quantize_(model, KINDS[kind](), lambda module, path: path in chosen)
    return len(chosen)


def is_quantized(tensor: Tensor) -> bool:
    """Return whether a tensor consists of others."""
    return hasattr(tensor, "__tensor_flatten__")


def rounds_activations(kind: str) -> bool:
    """Return whether a kind of quantization rounds activations as well as weights."""
    return "activations" in kind


def errors(name: str, folder: Path, kind: str) -> Distances:
    """Return the distances to fp32 of a sharded quantized model, and of one process that quantizes; on each rank."""
    exact = results(name, load(name, folder), INPUTS_OF_ACTIVATIONS if rounds_activations(kind) else INPUTS)
    return Distances(*(distances(name, model, exact) for model in pair(name, folder, kind)))


def parts(tensor: Tensor) -> dict[str, Tensor]:
    """Return the plain tensors of which a quantized one consists: its numbers, and its scales."""
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(tensor, name) for name in names}


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal to the last bit, quantized or not."""
    if type(a) is not type(b):
        return False
    if not is_quantized(a):
        return torch.equal(a, b)
    first, second = parts(a), parts(b)
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)
