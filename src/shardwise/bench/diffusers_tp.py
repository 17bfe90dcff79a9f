"""diffusers' own tensor parallelism, where it does not run by itself: on the CPU, with gloo.

Three values of the measuring process are changed, and nothing of how diffusers loads or computes: the CPU is among
the devices that it accepts, there is one of it, and its name has no number (`.to("cpu:0")` would copy every slice once
more).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import diffusers
import torch
from diffusers.hooks import tensor_parallel
from diffusers.models import _modeling_parallel, model_loading_utils
from torch.distributed.tensor import DTensor

from shardwise.bench.arena import Arena
from shardwise.plan.styles import as_style


@contextmanager
def on_cpu(arena: Arena | None = None) -> Iterator[None]:
    """Let diffusers' tensor parallelism run on the CPU inside the context.

    Args:
        arena: Where each slice is copied as soon as it has been cut, as it would be to a device.
    """
    devices = (*tensor_parallel._SUPPORTED_TP_DEVICES, "cpu")
    setup = _modeling_parallel.TensorParallelConfig.setup

    def without_number(config: Any, rank: int, world: int, device: torch.device, mesh: Any) -> None:
        setup(config, rank, world, torch.device(device.type), mesh)

    with ExitStack() as changes:
        changed = changes.enter_context
        changed(mock.patch.object(tensor_parallel, "_SUPPORTED_TP_DEVICES", devices))
        changed(mock.patch.object(torch.accelerator, "device_count", return_value=1))
        changed(mock.patch.object(_modeling_parallel.TensorParallelConfig, "setup", without_number))
        if arena is not None:
            _copy_into(arena, changes)
        yield


def _copy_into(arena: Arena, changes: ExitStack) -> None:
    """Have what diffusers' loader places on its device, sharded or whole, copied into `arena`."""
    place, wrap = model_loading_utils.set_module_tensor_to_device, DTensor.from_local

    def placed(module: Any, name: str, device: Any, value: Any = None, **kwargs: Any) -> Any:
        return place(module, name, device, value=arena.keep(value), **kwargs)

    def wrapped(local: Any, *args: Any, **kwargs: Any) -> Any:
        return wrap(arena.keep(local), *args, **kwargs)

    changes.enter_context(mock.patch.object(model_loading_utils, "set_module_tensor_to_device", placed))
    changes.enter_context(mock.patch.object(DTensor, "from_local", staticmethod(wrapped)))


def config(degree: int) -> Any:
    """Return diffusers' configuration of tensor parallelism."""
    return diffusers.TensorParallelConfig(tp_degree=degree)


@contextmanager
def same_slices(cls: type[Any], plan: Mapping[str, object]) -> Iterator[None]:
    """Have diffusers' class cut what `plan` cuts, the lone projections that its own plan leaves whole as well.

    For loading only: its rowwise style is not made for whole inputs.
    """
    lone = {key for key, style in plan.items() if "rowwise_split_input" in as_style(style).label}
    with mock.patch.object(cls, "_tp_plan", {**cls._tp_plan, **dict.fromkeys(lone, "rowwise")}):
        yield
