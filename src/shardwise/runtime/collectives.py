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
from shardwise.runtime.group import Entered, TensorParallelGroup


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


def enter_layer(tensor: Tensor, group: TensorParallelGroup) -> Tensor:
    """Return `enter_shard` of what a layer is given: the same tensor for each layer in a row that is given the same.

    The gradients of queries, keys and values are then added up on the rank before they are summed, once. It is
    forgotten where the slices end (`leave_layer`) and in backward, so that nothing is held for longer than that.
    """
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and tensor.requires_grad):
        return enter_shard(tensor, group)
    entered = group.entered
    if entered is None or entered.tensor is not tensor or entered.version != tensor._version:
        entered = group.entered = Entered(tensor, tensor._version, enter_shard(tensor, group))
    return entered.copy


def leave_layer(output: Tensor, group: TensorParallelGroup) -> Tensor:
    """Return `reduce_partial` of what a layer returns, behind which no layer goes on with the slices."""
    if not torch.compiler.is_compiling():
        group.entered = None
    return reduce_partial(output, group)


def split(tensor: Tensor, dim: int, spans: Sequence[Span], group: TensorParallelGroup) -> Tensor:
    """Return this rank's `spans` of a dim of a whole `tensor`, one after another."""
    whole = enter_layer(tensor, group)
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
        if not torch.compiler.is_compiling():
            ctx.group.entered = None  # what a checkpoint computed again may have stopped before it left
        return reduce_partial(grads[0].clone(), ctx.group), None
