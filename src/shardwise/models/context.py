"""Context parallelism of diffusers on models that are sharded, or whole: checked before, and refused with the reason.

The hooks and the attention are diffusers' own. They are given the slices of a model as they would be given all of it,
since these are ordinary modules with fewer heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
from diffusers import ContextParallelConfig, ModelMixin
from diffusers.hooks.context_parallel import ContextParallelSplitHook
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ConfigError, UnsupportedOperation, UnsupportedState
from shardwise.runtime.group import TensorParallelGroup
from shardwise.runtime.mesh import NO_RING_ON_CPUS, ranks_along
from shardwise.runtime.shard import sharding_of

_M = TypeVar("_M", bound=nn.Module)

_MARK = "_parallel_config"

_MASKS = "its attention masks are made for all heads, and in a Ulysses attention a rank has some of them"
REFUSED: Mapping[str, str] = {"LTXVideoTransformer3DModel": _MASKS, "LTX2VideoTransformer3DModel": _MASKS}
"""Classes of diffusers 0.42.1 that say how their sequence is cut and fail when it is -> why."""


def enable_context_parallel(model: _M, *, mesh: DeviceMesh) -> _M:
    """Share out the sequence that a model works on over the axes "ring" and "ulysses" of a mesh, and return the model.

    Every rank calls the model with the whole inputs and gets the whole output. A model that is to be sharded as well
    is sharded first. Call it with `return_dict=False`, as pipelines do. Of sizes 1 the model is returned as it is.

    Args:
        model: A diffusers model whose class has a `_cp_plan`; unchanged when the call raises.
        mesh: That of `shardwise.init_mesh(config)`.

    Raises:
        ConfigError: `mesh` lacks one of these axes, or there is a ring on CPUs.
        UnsupportedState: the class cannot be cut, or the ranks do not divide its heads, or it is cut already; on
            every rank.
        RankFailure: another rank failed.
    """
    names = mesh.mesh_dim_names or ()
    if not {"ring", "ulysses"} <= set(names):
        raise ConfigError(
            f'expected a mesh with axes "ring" and "ulysses", got {mesh}: pass shardwise.init_mesh(config)'
        )
    ring, ulysses = mesh["ring"].size(), mesh["ulysses"].size()
    if ring * ulysses == 1:
        return model
    if ring > 1 and mesh.device_type == "cpu":
        raise ConfigError(NO_RING_ON_CPUS)
    for ranks in (ranks_along(mesh, "ring"), ranks_along(mesh, "ulysses")):
        with ranks.agreement(f"cutting the sequence of {type(model).__name__}"):
            _check(model, ulysses)
            _check_ranks(model, ranks)
    _enable(
        model, ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, mesh=mesh["ring", "ulysses"])
    )
    for path, hook in _split_hooks(model):
        vars(hook)["_prepare_cp_input"] = _EqualParts(hook._prepare_cp_input, path, ring * ulysses)
    return model


def _check(model: nn.Module, ulysses: int) -> None:
    name, sharding = type(model).__name__, sharding_of(model)
    if name in REFUSED:
        raise UnsupportedState(f"the sequence of {name} cannot be cut: {REFUSED[name]}")
    if getattr(model, "_cp_plan", None) is None:
        raise UnsupportedState(
            f"{name} does not say how its sequence is cut (`_cp_plan`): use the ranks for tp=, cfg= or dp="
        )
    if getattr(vars(model).get(_MARK), "context_parallel_config", None) is not None:
        raise UnsupportedState(f"the sequence of {name} is cut already")
    if sharding is not None and sharding.config.uneven:
        raise UnsupportedState(
            f"{name} is sharded with uneven=True, and its sequence is cut only with equal heads"
        )
    for path, module in model.named_modules():
        heads = getattr(module, "heads", None) if hasattr(module, "processor") else None
        if isinstance(heads, int) and heads % ulysses:
            tp = f", after tp={sharding.plan.degree}" if sharding is not None else ""
            raise UnsupportedState(
                f"{name}: {path} has {heads} heads{tp}, which ulysses={ulysses} does not divide: "
                "the heads must divide by the product of both"
            )


def _check_ranks(model: nn.Module, ranks: TensorParallelGroup) -> None:
    sharding = sharding_of(model)
    if sharding is not None and len(set(sharding.group.members) & set(ranks.members)) > 1:
        raise UnsupportedState(
            f"{type(model).__name__} is sharded over ranks {sharding.group.members}, and ranks {ranks.members} would "
            'share its sequence: shard it over the axis "tp" of the same mesh, config.tensor_parallel(mesh)'
        )


def _enable(model: Any, config: ContextParallelConfig) -> None:
    """Let diffusers put in its hooks, on a model that it knows to be sharded by its own means, which it is not."""
    sharded = vars(model).pop(_MARK, None)
    try:
        with _one_device():
            ModelMixin.enable_parallelism(model, config=config)
    except BaseException:
        vars(model).pop(_MARK, None)
        if sharded is not None:
            vars(model)[_MARK] = sharded
        raise
    if sharded is not None:
        vars(model)[_MARK] = SimpleNamespace(
            tensor_parallel_config=sharded.tensor_parallel_config, context_parallel_config=config
        )


@contextmanager
def _one_device() -> Iterator[None]:
    """Let diffusers, which divides the rank by the number of accelerators, find one where there is none."""
    if torch.accelerator.device_count():
        yield
        return
    with mock.patch.object(torch.accelerator, "device_count", return_value=1):
        yield


def _split_hooks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the hooks that cut what a module is given or returns, with the path of the module."""
    for path, module in model.named_modules():
        registry = getattr(module, "_diffusers_hook", None)
        for hook in registry.hooks.values() if registry is not None else ():
            if isinstance(hook, ContextParallelSplitHook):
                yield path or type(model).__name__, hook


@dataclass(frozen=True)
class _EqualParts:
    """Cuts a tensor as diffusers does, and raises where diffusers would assert that the parts are equal."""

    cut: Callable[[Tensor, Any], Tensor]
    where: str
    degree: int

    def __call__(self, tensor: Tensor, how: Any) -> Tensor:
        if tensor.dim() == how.expected_dims and tensor.shape[how.split_dim] % self.degree:
            raise UnsupportedOperation(
                f"{self.where}: a sequence of {tensor.shape[how.split_dim]} tokens is not divided by {self.degree} "
                "ranks: choose another size of the picture, or another max_sequence_length"
            )
        return self.cut(tensor, how)
