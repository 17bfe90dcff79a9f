"""Turns a model into this rank's part of it: all or nothing.

Two callers, one table: the loader gives parameters that are local already, `shard_in_memory` cuts those of a
whole model. Either way everything that can fail comes first, and one assignment step that cannot fail ends
it, so a refused model is the model it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from shardwise.config import TensorParallelConfig
from shardwise.errors import UnsupportedState
from shardwise.plan.layout import Layout, Shard
from shardwise.plan.resolve import Plan, ResolvedPlan, resolve
from shardwise.runtime import modules
from shardwise.runtime.group import TensorParallelGroup, attempt

_STATE = "_tensor_parallel"


@dataclass(frozen=True)
class Sharding:
    """What a sharded model remembers: the resolved plan, its ranks, and the global shapes of its tensors."""

    config: TensorParallelConfig
    plan: ResolvedPlan
    group: TensorParallelGroup
    shapes: Mapping[str, tuple[int, ...]]
    """Global shape of each parameter by its full name."""


def sharding_of(model: nn.Module) -> Sharding | None:
    """Return the sharding of a tensor parallel model, or None for an ordinary one."""
    return vars(model).get(_STATE)


def shard_in_memory(model: nn.Module, config: TensorParallelConfig, plan: Plan) -> None:
    """Shard a whole model that is in memory, in place.

    Rank 0's values win: every parameter and buffer, planned or not, ends as rank 0 had it.

    Raises:
        UnsupportedState: the model cannot be sharded as it is.
        PlanError: the plan does not fit the model at this degree.
        GroupError: there is no group of `config.tp_degree` ranks, or this process is not in it.
        RankFailure: another rank failed; the model is unchanged here too.
    """
    subject = f"sharding {type(model).__name__}"
    prepared = attempt(lambda: _prepare(model, config, plan))
    group = prepared.group(config)
    with group.agreement(subject):
        resolved, shapes = prepared.result()
        group.check(config)
    with group.agreement(subject, expect_equal=fingerprint(model, resolved)):
        group.check_devices()
    with group.agreement(subject):
        tensors = _cut_all(model, resolved, group)
    assign(model, tensors)
    localize(model, config, resolved, group, shapes)


def _prepare(
    model: nn.Module, config: TensorParallelConfig, plan: Plan
) -> tuple[ResolvedPlan, dict[str, tuple[int, ...]]]:
    check_state(model)
    return resolve(model, plan, config.tp_degree), global_shapes(model)


def global_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of a model that is still whole, under every name it has."""
    return {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}


def check_state(model: nn.Module) -> None:
    """Refuse a model whose parameters are not plain, whole and its own.

    Raises:
        UnsupportedState: naming the state and what to do instead.
    """
    name = type(model).__name__
    if sharding_of(model) is not None or getattr(model, "_parallel_config", None) is not None:
        raise UnsupportedState(
            f"{name} is sharded already: parallelism is applied once, by from_pretrained(parallel_config=...) "
            "or by enable_parallelism"
        )
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        raise UnsupportedState(f"{name} is quantized: shard the unquantized model")
    if getattr(model, "hf_device_map", None) is not None:
        raise UnsupportedState(f"{name} was placed by a device_map: load it without one to shard it")
    for path, module in model.named_modules():
        _check_module(name, path, module)
    for path, tensor in model.named_parameters():
        if type(tensor) is not nn.Parameter or tensor.is_quantized:
            kind = type(tensor).__name__
            raise UnsupportedState(
                f"{name}: {path} is a {kind}, not a plain parameter: shard before converting"
            )
        if tensor.is_meta:
            raise UnsupportedState(f"{name}: {path} has no data (meta device): load the weights first")


def _check_module(model_name: str, path: str, module: nn.Module) -> None:
    """Refuse adapters and offload hooks, which decide what a weight is or where it lives."""
    if any(base.__name__ == "BaseTunerLayer" for base in type(module).__mro__):
        raise UnsupportedState(
            f"{model_name}: {path} has a LoRA adapter, which the plan does not cover: "
            "unload it (unload_lora_weights), or fuse and unload it, before sharding"
        )
    hooks = " ".join(getattr(getattr(module, "_diffusers_hook", None), "hooks", {}))
    if hasattr(module, "_hf_hook") or "group_offloading" in hooks:
        raise UnsupportedState(
            f"{model_name}: {path or 'the model'} is offloaded: each rank keeps its slices on its own device; "
            "load the model without offloading to shard it"
        )
    if "layerwise_casting" in hooks:
        raise UnsupportedState(
            f"{model_name}: {path or 'the model'} has layerwise casting enabled: shard the model without it"
        )


def localize(
    model: nn.Module,
    config: TensorParallelConfig,
    plan: ResolvedPlan,
    group: TensorParallelGroup,
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Give a model that holds local parameters its local classes, attributes and state.

    Nothing here can fail: the plan was resolved on this model.
    """
    for planned in plan.modules:
        module = model.get_submodule(planned.path)
        for name, value in planned.attributes.items():
            setattr(module, name, value)
        if planned.style.runtime_class is not None:
            getattr(modules, planned.style.runtime_class).adopt(module, group, planned)
    vars(model)[_STATE] = Sharding(config, plan, group, shapes)
    # diffusers asks this attribute before it loads an adapter or offloads; it then refuses, as long as we do.
    vars(model)["_parallel_config"] = SimpleNamespace(
        tensor_parallel_config=config, context_parallel_config=None
    )


def local_slice(tensor: Tensor, layout: Layout, group: TensorParallelGroup) -> Tensor:
    """Return this rank's piece of a whole `tensor`: a slice in new memory, or the tensor itself."""
    if not isinstance(layout, Shard):
        return tensor
    spans = layout.spans(group.rank, group.degree)
    return torch.cat([tensor.narrow(layout.dim, span.start, span.length) for span in spans], layout.dim)


def fingerprint(model: nn.Module, plan: ResolvedPlan) -> dict[str, object]:
    """Return what must be equal on all ranks for their slices to fit together, short enough for a message."""
    tensors = [(name, tuple(t.shape), str(t.dtype)) for name, t in named_tensors(model)]
    digests = {"plan": sorted(plan.layouts.items()), "tensors": tensors}
    short = {key: hashlib.sha256(repr(value).encode()).hexdigest()[:12] for key, value in digests.items()}
    return {"model": type(model).__name__, "tp_degree": plan.degree, **short}


def _cut_all(model: nn.Module, plan: ResolvedPlan, group: TensorParallelGroup) -> dict[str, Tensor]:
    """Return this rank's piece of rank 0's value of every tensor of the model, by name."""
    tensors: dict[str, Tensor] = {}
    done: dict[int, Tensor] = {}  # a tensor that two modules share stays one
    for name, tensor in named_tensors(model):
        if id(tensor) not in done:
            local = local_slice(_rank_zero_value(tensor, group), plan.layout(name), group)
            is_parameter = isinstance(tensor, nn.Parameter)
            done[id(tensor)] = nn.Parameter(local, tensor.requires_grad) if is_parameter else local
        tensors[name] = done[id(tensor)]
    return tensors


def _rank_zero_value(tensor: Tensor, group: TensorParallelGroup) -> Tensor:
    """Return rank 0's value of `tensor` on this rank's device, in new memory."""
    copy = tensor.detach().to(group.device, copy=True).contiguous()
    # As bytes, because no backend broadcasts every dtype.
    group.broadcast(copy.reshape(-1).view(torch.uint8))
    return copy


def assign(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put `tensors` in place of the model's parameters and buffers of these names."""
    for name, tensor in tensors.items():
        path, _, own_name = name.rpartition(".")
        module = model.get_submodule(path)
        store = module._parameters if own_name in module._parameters else module._buffers
        store[own_name] = tensor  # type: ignore[assignment]  # parameters for _parameters, by construction


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return all parameters and buffers under every name they have."""
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
