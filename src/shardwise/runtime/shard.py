"""Turns a model into this rank's part of it: all or nothing.

Two callers, one table: the loader gives parameters that are local already, `shard_in_memory` cuts those of a
whole model. Either way everything that can fail on one rank alone (checks, reading, allocating) comes first
and is agreed on, so a refused model is the model it was.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType, SimpleNamespace

import torch
from torch import Tensor, nn

from shardwise.config import TensorParallelConfig
from shardwise.plan.layout import Layout, Shard
from shardwise.plan.resolve import Plan, ResolvedPlan, resolve
from shardwise.runtime.debug import require_equal_inputs
from shardwise.runtime.group import CountingGroup, TensorParallelGroup, is_initialized
from shardwise.runtime.modules import adopt
from shardwise.runtime.state import check_state, refuse_operations
from shardwise.runtime.together import sum_together

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
    """Return the sharding of a tensor parallel model, compiled or not, or None for an ordinary one."""
    return vars(getattr(model, "_orig_mod", model)).get(_STATE)


def shard_in_memory(
    model: nn.Module,
    config: TensorParallelConfig,
    plan: Plan,
    validate: Callable[[ResolvedPlan], None] | None = None,
    claims: Mapping[str, object] = MappingProxyType({}),
) -> TensorParallelGroup:
    """Shard a whole model that is in memory, in place, and return its ranks.

    `validate` may refuse the plan; `claims` must be equal on all ranks. Rank 0's values win: every parameter and
    buffer, planned or not, ends as rank 0 had it. Parameters stay the same objects; only slices are sent, one tensor
    at a time.

    Raises:
        UnsupportedState: the model cannot be sharded as it is.
        PlanError: the plan does not fit the model at this degree.
        GroupError: there is no group of `config.tp_degree` ranks, or this process is not in it.
        RankFailure: another rank failed; the model is unchanged here too.
    """
    if not is_initialized():
        _prepare(model, config, plan)  # what is wrong with the model comes before the missing group
    group = TensorParallelGroup.of(config)
    with group.agreement(f"sharding {type(model).__name__}") as step:
        resolved = _prepare(model, config, plan)
        group.check(config)
        if validate is not None:
            validate(resolved)
        step.must_equal(**fingerprint(model, resolved), **claims)
    group.meet("tp")
    with group.agreement(f"making room for {type(model).__name__}"):
        shapes = global_shapes(model)
        room = _make_room(model, resolved, group)
    _fill_from_rank_zero(model, resolved, group, room)
    localize(model, config, resolved, group, shapes)
    return group


def _prepare(model: nn.Module, config: TensorParallelConfig, plan: Plan) -> ResolvedPlan:
    check_state(model)
    return resolve(model, plan, config.tp_degree, uneven=config.uneven)


def localize(
    model: nn.Module,
    config: TensorParallelConfig,
    plan: ResolvedPlan,
    group: TensorParallelGroup,
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Give a model that holds local parameters its local classes, attributes and state.

    Nothing here can fail but the ranks' word on whether to compare inputs, which comes first: the plan was
    resolved on this model.
    """
    require_equal_inputs(model, config, group)
    for planned in plan.modules:
        adopt(model.get_submodule(planned.path), group, planned)
    sum_together(model, plan)
    refuse_operations(model)
    vars(model)[_STATE] = Sharding(config, plan, group, shapes)
    # diffusers' pipelines ask this attribute before they offload; they then refuse, as long as we do.
    vars(model)["_parallel_config"] = SimpleNamespace(
        tensor_parallel_config=config, context_parallel_config=None
    )


def global_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of a model that is still whole, under every name it has."""
    return {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}


def fingerprint(model: nn.Module, plan: ResolvedPlan) -> dict[str, object]:
    """Return what must be equal on all ranks for their slices to fit together, short enough for a message."""
    tensors = [(name, tuple(t.shape), str(t.dtype)) for name, t in named_tensors(model)]
    modules = [(m.path, m.style.label, sorted(m.layouts.items()), m.attributes) for m in plan.modules]
    return {
        "model": type(model).__name__,
        "tp_degree": plan.degree,
        "tensors": f"{len(tensors)} tensors ({digest(tensors)})",
        "plan": f"{len(modules)} planned modules ({digest(modules)})",
    }


def digest(value: object) -> str:
    """Return a short hash of a printable value."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def assign(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put `tensors` in place of the model's parameters and buffers of these names."""
    for name, tensor in tensors.items():
        path, _, own_name = name.rpartition(".")
        module = model.get_submodule(path)
        store = module._parameters if own_name in module._parameters else module._buffers
        store[own_name] = tensor  # type: ignore[assignment]  # parameters for _parameters, by construction


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return all parameters and buffers under every name they have."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def meta_twin(model: nn.Module) -> nn.Module:
    """Return a copy of a model in evaluation mode, its parameters on the meta device; buffers copied, ties kept."""
    memo: dict[int, object] = {
        id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, memo).eval()


def localized_twin(model: nn.Module, plan: ResolvedPlan, rank: int = 0) -> tuple[nn.Module, CountingGroup]:
    """Return a rank's part of a model without weights, and the group that counts what it would send."""
    twin, group = meta_twin(model), CountingGroup(plan.degree, rank)
    shapes = global_shapes(twin)
    local = {
        name: nn.Parameter(local_slice(parameter.detach(), plan.layout(name), rank, plan.degree))
        for name, parameter in twin.named_parameters(remove_duplicate=False)
        if isinstance(plan.layout(name), Shard)
    }
    assign(twin, local)
    localize(twin, TensorParallelConfig(tp_degree=plan.degree), plan, group, shapes)
    return twin, group


def local_slice(tensor: Tensor, layout: Layout, rank: int, degree: int) -> Tensor:
    """Return the piece of a whole `tensor` that `rank` owns: a slice in new memory, or the tensor itself."""
    if not isinstance(layout, Shard):
        return tensor
    spans = layout.spans(rank, degree)
    return torch.cat([tensor.narrow(layout.dim, span.start, span.length) for span in spans], layout.dim)


@dataclass(frozen=True)
class _Room:
    """Memory for the local tensors, by the identity of the tensor they replace, and for one piece in transit."""

    pieces: Mapping[int, Tensor]
    transit: Tensor


def _make_room(model: nn.Module, plan: ResolvedPlan, group: TensorParallelGroup) -> _Room:
    pieces: dict[int, Tensor] = {}
    for name, tensor in named_tensors(model):
        if id(tensor) not in pieces:
            shape = plan.layout(name).local_shape(tuple(tensor.shape), group.rank, group.degree)
            pieces[id(tensor)] = torch.empty(shape, dtype=tensor.dtype, device=group.device)
    # Rank 0's pieces are the largest, where they are not all of one size.
    largest = max(
        (_bytes(tensor, plan.layout(name), 0, plan.degree) for name, tensor in named_tensors(model)),
        default=0,
    )
    return _Room(pieces, torch.empty(largest, dtype=torch.uint8, device=group.device))


def _bytes(tensor: Tensor, layout: Layout, rank: int, degree: int) -> int:
    """Return how many bytes a rank's piece of a whole tensor has."""
    return prod(layout.local_shape(tuple(tensor.shape), rank, degree)) * tensor.itemsize


@torch.no_grad()
def _fill_from_rank_zero(
    model: nn.Module, plan: ResolvedPlan, group: TensorParallelGroup, room: _Room
) -> None:
    """Give every tensor of the model this rank's piece of rank 0's value, freeing the whole one at once."""
    done: set[int] = set()
    for name, tensor in named_tensors(model):
        if id(tensor) in done:
            continue  # a tensor that two modules share
        done.add(id(tensor))
        layout, piece = plan.layout(name), room.pieces[id(tensor)]
        for rank in range(group.degree if isinstance(layout, Shard) else 1):
            sent = room.transit[
                : _bytes(tensor, layout, rank, group.degree)
            ]  # as bytes: no backend sends every dtype
            if group.rank == 0:
                own = local_slice(tensor.detach(), layout, rank, group.degree).to(group.device)
                sent.copy_(own.contiguous().view(-1).view(torch.uint8))
            group.broadcast(sent)
            if rank == group.rank or not isinstance(layout, Shard):
                piece.copy_(sent.view(piece.dtype).view(piece.shape))
        tensor.data, tensor.grad = piece, None
