"""Differentiable forms of the group's collectives, used only while a gradient is needed.

Each pairs a forward with its adjoint. `torch.distributed`'s functional all-reduce is not used here: its own
formula all-reduces the gradient once more, which multiplies it by the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardwise.plan.layout import Shard
from shardwise.runtime.group import TensorParallelGroup


def reduce_partial(tensor: Tensor, group: TensorParallelGroup) -> Tensor:
    """Return the sum over the ranks of their partial results; may overwrite `tensor`.

    The sum is the same tensor on every rank, so its gradient is each rank's gradient already.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        return _ReducePartial.apply(tensor, group)  # type: ignore[no-any-return,no-untyped-call]
    return group.all_reduce(tensor)


def enter_shard(tensor: Tensor, group: TensorParallelGroup) -> Tensor:
    """Return a whole `tensor` unchanged, at the point where each rank goes on with its own slice of the work.

    In backward each rank knows the gradient of its slice only, so the gradients are summed.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        return _EnterShard.apply(tensor, group)  # type: ignore[no-any-return,no-untyped-call]
    return tensor


def split_last_dim(tensor: Tensor, shard: Shard, group: TensorParallelGroup) -> Tensor:
    """Return this rank's slice of the last dim of a whole `tensor` (..., features)."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        return _SplitLastDim.apply(tensor, shard, group)  # type: ignore[no-any-return,no-untyped-call]
    return _own_slice(tensor, shard, group)


def _own_slice(tensor: Tensor, shard: Shard, group: TensorParallelGroup) -> Tensor:
    spans = shard.spans(group.rank, group.degree)
    parts = [tensor.narrow(-1, span.start, span.length) for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class _ReducePartial(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorParallelGroup) -> Tensor:
        return group.all_reduce(tensor.clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _EnterShard(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorParallelGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(grads[0].clone()), None


class _SplitLastDim(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, shard: Shard, group: TensorParallelGroup) -> Tensor:
        ctx.shard, ctx.group = shard, group
        return _own_slice(tensor, shard, group).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # Each rank fills its own columns of the whole gradient; the rest come from the other ranks.
        whole = grads[0].new_zeros(*grads[0].shape[:-1], ctx.shard.size)
        offset = 0
        for span in ctx.shard.spans(ctx.group.rank, ctx.group.degree):
            whole.narrow(-1, span.start, span.length).copy_(grads[0].narrow(-1, offset, span.length))
            offset += span.length
        return ctx.group.all_reduce(whole), None, None
