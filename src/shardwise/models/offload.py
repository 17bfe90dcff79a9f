"""The calls of diffusers that offload models and pipelines, on those that are sharded or hold a sharded model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from types import MethodType
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.hooks import group_offloading
from torch import nn

from shardwise.compose import offload
from shardwise.errors import UnsupportedOption

_MARK = "_parallel_config"
"""By what diffusers knows a sharded model, which it neither offloads nor gives adapters."""


def allow(model: nn.Module) -> None:
    """Let a sharded model be offloaded, by itself or in a pipeline."""
    offload.watch()
    _watch_pipelines()
    if isinstance(model, ModelMixin):
        vars(model)["enable_group_offload"] = MethodType(enable_group_offload, model)


def enable_group_offload(model: Any, onload_device: Any, *args: Any, **kwargs: Any) -> None:
    """Offload groups of layers as diffusers' method of this name does; each rank moves its slices to its own device.

    Raises:
        UnsupportedOption: the device of another rank, or files; on every rank.
        RankFailure: another rank failed.
    """
    with unmarked(model):
        type(model).enable_group_offload(model, onload_device, *args, **kwargs)


@contextmanager
def unmarked(*models: nn.Module) -> Iterator[None]:
    """Take away for a while by what diffusers knows sharded models."""
    marks = [(model, vars(model).pop(_MARK)) for model in models if _MARK in vars(model)]
    try:
        yield
    finally:
        for model, mark in marks:
            vars(model)[_MARK] = mark


def offload_groups_again(model: nn.Module) -> None:
    """Let what offloads groups of layers know of layers that have come, gone or changed."""
    with offload.settled():
        group_offloading._maybe_remove_and_reapply_group_offloading(model)


@cache
def _watch_pipelines() -> None:
    """See to it, in this process, that diffusers offloads the slices of a sharded model to their rank's device."""
    apply = group_offloading._apply_group_offloading
    group_offloading._apply_group_offloading = _applying(apply)
    for call in ("enable_model_cpu_offload", "enable_sequential_cpu_offload"):
        setattr(DiffusionPipeline, call, _enabling(getattr(DiffusionPipeline, call)))
    DiffusionPipeline.enable_group_offload = _enabling_groups(DiffusionPipeline.enable_group_offload)
    DiffusionPipeline.maybe_free_model_hooks = _freeing(DiffusionPipeline.maybe_free_model_hooks)


def _applying(apply: Callable[..., None]) -> Callable[..., None]:
    """Return diffusers' function that offloads groups of a module's layers, for those of sharded models as well."""

    @wraps(apply)
    def _apply_group_offloading(module: nn.Module, config: Any) -> None:
        group = offload.group_of(module)
        if group is not None:
            with offload.agreement(group, type(module).__name__):
                offload.no_shared_files(config.offload_to_disk_path)
                config.onload_device = offload.own_device(config.onload_device, group)
                _check_stream(config.stream, group.device)
        apply(module, config)

    return _apply_group_offloading


def _check_stream(stream: Any, own: torch.device) -> None:
    """Refuse a stream that diffusers has made on another device: it takes the current one."""
    if getattr(stream, "device", own) != own:
        raise UnsupportedOption(
            f"the stream is on {stream.device}, and the slices on {own}: call "
            f"torch.accelerator.set_device_index({own.index}) before use_stream=True"
        )


def _enabling(enable: Callable[..., None]) -> Callable[..., None]:
    """Return a pipeline's method that offloads all of it, for pipelines that hold sharded models as well."""

    @wraps(enable)
    def wrapped(pipeline: Any, gpu_id: int | None = None, device: Any = None) -> None:
        sharded = _sharded(pipeline)
        if not sharded:
            enable(pipeline, gpu_id=gpu_id, device=device)
            return
        asked = _asked(pipeline, enable.__name__, sharded, gpu_id, device)
        with unmarked(*sharded), offload.settled():
            enable(pipeline, device=asked)

    return wrapped


def _asked(
    pipeline: Any, call: str, sharded: list[nn.Module], gpu_id: int | None, device: Any
) -> torch.device:
    """Return the device to which all of a pipeline is to be brought, which is this rank's.

    Without a device each rank takes its own, and need not ask the others.
    """
    group = offload.group_of(sharded[0])
    assert group is not None
    if gpu_id is None and device is None:
        before = vars(pipeline).get("_offload_device")
        if before is None and group.device.type == "cpu":
            raise UnsupportedOption(f"{call} needs an accelerator, and the model is sharded over CPUs")
        return before or group.device
    with offload.agreement(group, type(pipeline).__name__):
        asked = torch.device(device if device is not None else group.device.type)
        if gpu_id is not None and asked.index is not None:
            raise UnsupportedOption(f"gpu_id={gpu_id} and the index of device={device} exclude each other")
        return offload.own_device(asked if gpu_id is None else torch.device(asked.type, gpu_id), group)


def _enabling_groups(enable: Callable[..., None]) -> Callable[..., None]:
    """Return a pipeline's method that offloads groups of layers, for pipelines that hold sharded models as well."""
    signature = inspect.signature(enable)

    @wraps(enable)
    def enable_group_offload(pipeline: Any, *args: Any, **kwargs: Any) -> None:
        call, sharded = signature.bind(pipeline, *args, **kwargs), _sharded(pipeline)
        group = offload.group_of(sharded[0]) if sharded else None
        if group is not None:  # before the first component is touched
            with offload.agreement(group, type(pipeline).__name__):
                offload.no_shared_files(call.arguments.get("offload_to_disk_path"))
                call.arguments["onload_device"] = offload.own_device(call.arguments["onload_device"], group)
        with offload.settled():
            enable(*call.args, **call.kwargs)

    return enable_group_offload


def _freeing(free: Callable[..., None]) -> Callable[..., None]:
    """Return a pipeline's method that offloads it anew after each call, to where the ranks have agreed to."""

    @wraps(free)
    def maybe_free_model_hooks(pipeline: Any) -> None:
        with offload.settled():
            free(pipeline)

    return maybe_free_model_hooks


def _sharded(pipeline: Any) -> list[nn.Module]:
    """Return the components of a pipeline that are sharded."""
    components = [one for one in pipeline.components.values() if isinstance(one, nn.Module)]
    return [one for one in components if offload.group_of(one) is not None]
