"""Offloading a sharded model: each rank moves its own slices, between the host and its own device.

The hooks that move weights are those of accelerate and diffusers, and move whatever a rank holds. They send nothing, so
ranks go on meeting in the same sums. What is left to see to is where to: a device that is right on one rank is wrong on
the others, and a slice on another rank's device would leave all of them waiting in the first sum.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import UnsupportedOperation, UnsupportedOption
from shardwise.runtime.group import TensorParallelGroup
from shardwise.runtime.shard import sharding_of

# ------------------------------------------------------------------------------------------- to which device


def group_of(module: nn.Module) -> TensorParallelGroup | None:
    """Return the ranks of a sharded model, or of the one that `module` is a part of; None if it has no slices."""
    sharding = sharding_of(module)
    if sharding is not None:
        return sharding.group
    return next((vars(m)["tp_group"] for m in module.modules() if "tp_group" in vars(m)), None)


def own_device(asked: Any, group: TensorParallelGroup) -> torch.device:
    """Return the device that is asked for, if it is this rank's; without an index this rank's is meant.

    Raises:
        UnsupportedOption: it is another.
    """
    device, own = torch.device(asked), group.device
    if device.type != own.type or device.index not in (None, own.index or 0):
        raise UnsupportedOption(
            f"device {device} is not that of rank {group.rank} of {group.degree}, which is {own}: each rank moves its "
            "slices to its own device; leave the device out, or give it without an index"
        )
    return own if device.index is None else device


def no_shared_files(path: Any) -> None:
    """Refuse to offload slices to files.

    Raises:
        UnsupportedOption: a path is given.
    """
    if path is not None:
        raise UnsupportedOption(
            f"offloading to {path} cannot be combined with tensor parallelism: the files are named by modules, so the "
            "ranks would read each other's slices, or those of another run; offload to the host's memory"
        )


_settled: ContextVar[bool] = ContextVar("settled", default=False)


@contextmanager
def settled() -> Iterator[None]:
    """Take what is offloaded inside as agreed on: the ranks do not exchange a word for it."""
    token = _settled.set(True)
    try:
        yield
    finally:
        _settled.reset(token)


def agreement(group: TensorParallelGroup, what: str) -> AbstractContextManager[Any]:
    """Offload on all ranks or on none; where the ranks have agreed already, they are not asked again."""
    return nullcontext() if _settled.get() else group.agreement(f"offloading {what}")


# ------------------------------------------------------------------------------------------- accelerate's hooks


@cache
def watch() -> None:
    """See to it, in this process, that accelerate offloads the slices of a sharded model to their rank's device.

    Its functions are found by the names that they have in the module that calls them, so it does not matter who
    imported `cpu_offload` from where, or when.
    """
    from accelerate import big_modeling

    big_modeling.attach_align_device_hook = _attaching(big_modeling.attach_align_device_hook)
    big_modeling.add_hook_to_module = _adding(big_modeling.add_hook_to_module)


def _attaching(attach: Callable[..., None]) -> Callable[..., None]:
    """Return accelerate's function that offloads layer by layer, for sharded models as well."""
    signature = inspect.signature(attach)

    @wraps(attach)
    def attach_align_device_hook(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(module, *args, **kwargs)
        group, given = group_of(module), call.arguments
        if group is not None:
            with _first_hook_undone(module), agreement(group, type(module).__name__):
                weights = given.get("weights_map")
                no_shared_files(None if isinstance(weights, dict | None) else "files")
                own_device(given.get("execution_device", group.device), group)
                given["execution_device"] = group.device  # not cpu:0, which torch takes for another than cpu
            _keep_gradient_hooks(module)
        attach(*call.args, **call.kwargs)

    return attach_align_device_hook


def _adding(add: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return accelerate's function that adds a hook, for those that offload a sharded model as well."""
    from accelerate.hooks import CpuOffload

    @wraps(add)
    def add_hook_to_module(module: nn.Module, hook: Any, append: bool = False) -> nn.Module:
        group = group_of(module) if isinstance(hook, CpuOffload) else None
        if group is not None:
            with agreement(group, type(module).__name__):
                hook.execution_device = own_device(hook.execution_device, group)
        return add(module, hook, append)

    return add_hook_to_module


@contextmanager
def _first_hook_undone(module: Any) -> Iterator[None]:
    """Leave a model as it was if it is not offloaded after all: accelerate has put a hook around it before it asks."""
    from accelerate.hooks import SequentialHook, add_hook_to_module, remove_hook_from_module

    try:
        yield
    except BaseException:
        hook = getattr(module, "_hf_hook", None)
        remove_hook_from_module(module)
        if isinstance(hook, SequentialHook):
            add_hook_to_module(module, hook.hooks[0])
        raise


@dataclass(frozen=True)
class _GradientHooks:
    """A forward pre-hook that gives a module's parameters the hooks that those before them had.

    Accelerate replaces parameters, for good, and what sums their gradients over the ranks would be lost with them.

    Attributes:
        hooks: By the parameter's name.
    """

    hooks: Mapping[str, list[Callable[[Tensor], Tensor | None]]]

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Look for parameters without hooks that are to be trained."""
        for name, hooks in self.hooks.items():
            parameter = module._parameters.get(name)
            if parameter is not None and parameter.requires_grad and not parameter._backward_hooks:
                for hook in hooks:
                    parameter.register_hook(hook)  # type: ignore[no-untyped-call]


def _keep_gradient_hooks(model: nn.Module) -> None:
    for module in model.modules():
        hooks = {
            name: list(parameter._backward_hooks.values())
            for name, parameter in module.named_parameters(recurse=False)
            if parameter._backward_hooks
        }
        if hooks:
            module.register_forward_pre_hook(_GradientHooks(hooks))


# ------------------------------------------------------------------------------------------- what is offloaded


def is_hooked(module: nn.Module) -> bool:
    """Return whether a hook of accelerate or of diffusers, such as brings weights, is around a module's forward."""
    registry = vars(module).get("_diffusers_hook")
    return "_hf_hook" in vars(module) or (registry is not None and len(registry.hooks) > 0)


def with_data(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a model by name, those that are offloaded as the hooks of accelerate keep them."""
    return {
        name: _kept(model, name, tensor) if tensor.is_meta else tensor for name, tensor in tensors.items()
    }


def _kept(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return what a hook keeps of a tensor; the tensor itself if none does."""
    path = name.rpartition(".")[0]
    while True:
        kept = _weights(model.get_submodule(path))
        own = name.removeprefix(f"{path}.") if path else name
        if kept is not None and own in kept:
            return kept[own]
        if not path:
            return tensor
        path = path.rpartition(".")[0]


def _weights(module: nn.Module) -> Mapping[str, Tensor] | None:
    """Return the weights that a hook of accelerate keeps for a module, by their names in it."""
    hook = getattr(module, "_hf_hook", None)
    kept = [getattr(one, "weights_map", None) for one in getattr(hook, "hooks", [hook])]
    return next((weights for weights in kept if weights is not None), None)


def require_data(model: nn.Module, operation: str, fix: str) -> None:
    """Refuse to change weights that are not there.

    Raises:
        UnsupportedOperation: the model is offloaded layer by layer.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UnsupportedOperation(
            f"{operation} is not supported on {type(model).__name__}, which is sharded with tensor parallelism and "
            f"offloaded layer by layer, so that its weights are not there: {fix}"
        )
