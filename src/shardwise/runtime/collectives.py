"""Differentiable forms of the group's all-reduce, used only while a gradient is needed.

The two are each other's adjoint, so each one's backward is the other and gradients of any order are right.
`torch.distributed`'s functional all-reduce is not used here: its own formula all-reduces the gradient once
more, which multiplies it by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardwise.plan.layout import Span
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


def split(tensor: Tensor, dim: int, spans: Sequence[Span], group: TensorParallelGroup) -> Tensor:
    """Return this rank's `spans` of a dim of a whole `tensor`, one after another."""
    whole = enter_shard(tensor, group)
    parts = [whole.narrow(dim, span.start, span.length) for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class _ReducePartial(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorParallelGroup) -> Tensor:
        ctx.group = group
        return group.all_reduce(tensor.clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return enter_shard(grads[0], ctx.group), None


class _EnterShard(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorParallelGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_partial(grads[0].clone(), ctx.group), None
