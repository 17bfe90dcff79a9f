"""What can be done with a sharded model, alone and in pairs, each compared with one process that does the same.

The functions run on every rank, on a tiny model that is on disk. Tests bound what they return, and
`python -m tools.combine` records it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from shardwise.errors import ShardwiseError
from tests import quantized
from tests.distributed.test_lora import sharded_copy
from tests.helpers import outputs, plainly, relative_error, save_tiny, tensors_of, tiny_inputs, tiny_model
from tests.lora import adapter
from tests.offload import WAYS, Host, away_on, share_away
from tests.quantized import FAMILIES as FAMILIES
from tests.quantized import INT8, load, mean_distance

OFFLOADED = ("enable_sequential_cpu_offload", "model.enable_group_offload")

FEWER_BLOCKS: dict[str, dict[str, int]] = {
    "FluxTransformer2DModel": {"num_layers": 1, "num_single_layers": 1},
    "Flux2Transformer2DModel": {"num_layers": 1, "num_single_layers": 1},
    "SD3Transformer2DModel": {"num_layers": 2},
}
"""Of models with two kinds of blocks, or a last block that differs: one of each is compiled as a graph."""


@dataclass(frozen=True)
class Error:
    """How far a sharded model is from what is exact.

    Attributes:
        sharded: The largest difference to one process that does the same, over the largest output value. Where weights
            are rounded, the mean distance to fp32 instead.
        alone: Then, that of one process; else 0.
    """

    sharded: float
    alone: float = 0.0


def _whole(name: str) -> Any:
    return tiny_model(name, **FEWER_BLOCKS.get(name, {}))


def _pair(name: str, adapted: bool = False) -> tuple[Any, Any]:
    """Return a model whole and sharded, both with an adapter on every Linear or without."""
    whole = _whole(name)
    state, sharded = adapter(whole), sharded_copy(whole)
    for model in (whole, sharded) if adapted else ():
        model.load_lora_adapter(state, adapter_name="one")
    return whole, sharded


def _error(name: str, sharded: nn.Module, whole: nn.Module) -> Error:
    inputs = tiny_inputs(name)
    return Error(relative_error(outputs(sharded, inputs), outputs(whole, inputs)))


def with_lora(name: str, folder: Path) -> Error:
    """Load an adapter on every Linear."""
    whole, sharded = _pair(name, adapted=True)
    return _error(name, sharded, whole)


def with_int8(name: str, folder: Path) -> Error:
    """Quantize the weights while they are loaded."""
    return Error(*quantized.errors(name, folder, INT8).means)


def _offloaded(name: str, adapted: bool) -> Error:
    whole, sharded = _pair(name, adapted)
    inputs, errors = tiny_inputs(name), []
    for way in OFFLOADED:
        model = copy.deepcopy(sharded)
        with away_on(Host(), model), torch.no_grad():
            found = list(tensors_of(WAYS[way](model)(**{**inputs, **plainly(model)})))
            assert share_away(model) == 1
        errors.append(relative_error(found, outputs(whole, inputs)))
    return Error(max(errors))


def with_offload(name: str, folder: Path) -> Error:
    """Offload layer by layer with accelerate, and leaf by leaf with diffusers."""
    return _offloaded(name, adapted=False)


def saved_and_reloaded(name: str, folder: Path) -> Error:
    """Save with all ranks, in both forms, and load what was saved, sharded."""
    whole, sharded = load(name, folder), load(name, folder, sharded=True)
    errors = []
    for form, options in (("one", {}), ("each", {"sharded": True})):
        target = folder.parent / f"{folder.name}-{form}"
        sharded.save_pretrained(target, **options)
        errors.append(_error(name, load(name, target, sharded=True), whole).sharded)
        errors.append(_error(name, load(name, target), whole).sharded)
    return Error(max(errors))


def compiled(name: str, folder: Path) -> Error:
    """Compile the model to one graph."""
    whole, sharded = _pair(name)
    graphs = _compile(sharded)
    error = _error(name, sharded, whole)
    assert graphs.frame_count == 1
    return error


def compiled_with_lora(name: str, folder: Path) -> Error:
    """Compile each kind of block to one graph, adapters included."""
    whole, sharded = _pair(name, adapted=True)
    graphs = _compile_blocks(sharded)
    error = _error(name, sharded, whole)
    assert graphs.frame_count
    return error


def compiled_with_int8(name: str, folder: Path) -> Error:
    """Compile each kind of block to one graph, of int8 weights."""
    exact, (sharded, whole) = load(name, folder), quantized.pair(name, folder, INT8)
    graphs = _compile_blocks(sharded)
    error = Error(mean_distance(name, sharded, exact), mean_distance(name, whole, exact))
    assert graphs.frame_count
    return error


def _compile(model: Any, call: str = "compile") -> CompileCounter:
    """Have a model compiled when it is called, and return what will count its graphs."""
    torch._dynamo.reset()
    graphs = CompileCounter()
    getattr(model, call)(fullgraph=True, backend=graphs)
    return graphs


def _compile_blocks(model: Any) -> CompileCounter:
    """Have each kind of block compiled; all at once where diffusers does not say which blocks are alike (SD3)."""
    return _compile(model, "compile_repeated_blocks" if model._repeated_blocks else "compile")


def lora_on_int8(name: str, folder: Path) -> Error:
    """Load an adapter onto int8 weights."""
    exact, models = load(name, folder), quantized.pair(name, folder, INT8)
    state = adapter(exact)
    for model in (exact, *models):
        model.load_lora_adapter(state, adapter_name="one")
    sharded, whole = models
    return Error(mean_distance(name, sharded, exact), mean_distance(name, whole, exact))


def lora_and_offload(name: str, folder: Path) -> Error:
    """Offload a model that has an adapter."""
    return _offloaded(name, adapted=True)


CELLS: Mapping[str, Callable[[str, Path], Error]] = {
    "LoRA": with_lora,
    "int8": with_int8,
    "offload": with_offload,
    "save, reload": saved_and_reloaded,
    "compile": compiled,
    "LoRA + int8": lora_on_int8,
    "LoRA + offload": lora_and_offload,
    "LoRA + compile": compiled_with_lora,
    "int8 + compile": compiled_with_int8,
}


def saving_int8(name: str, folder: Path) -> str:
    """Return the error of saving int8 weights."""
    sharded, target = load(name, folder, INT8, sharded=True), folder.parent / f"{folder.name}-int8"
    try:
        sharded.save_pretrained(target)
    except ShardwiseError as error:
        return f"{type(error).__name__}{' half done' if target.exists() else ''}"
    return "saved"


def measure(what: str, name: str, folder: Path) -> Error:
    """Return a cell of the table, on each rank."""
    return CELLS[what](name, folder)


def prepare(name: str, folder: Path) -> Path:
    """Write the tiny model that the functions above load."""
    save_tiny(name, folder)
    return folder
