"""Gradients of parameters that several ranks hold, each of which knows the part of its own heads.

Every rank ends with the gradient that one process has, so an optimizer step keeps the copies equal.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardwise.plan.layout import Shard
from shardwise.runtime.collectives import reduce_partial
from shardwise.runtime.group import TensorParallelGroup


def sum_gradients(module: nn.Module, group: TensorParallelGroup) -> None:
    """Sum the gradients of the module's whole parameters over the ranks, each of which uses them on its own heads."""
    for parameter in _trained(module):
        parameter.register_hook(partial(_sum, group=group))  # type: ignore[no-untyped-call]


def sum_gradients_of_copies(module: nn.Module, shard: Shard, group: TensorParallelGroup) -> None:
    """Sum the gradients of the module's parameters over the ranks that hold the same piece of them, if several do."""
    for parameter in _trained(module) if shard.copies > 1 else ():
        parameter.register_hook(partial(_sum_copies, shard=shard, group=group))  # type: ignore[no-untyped-call]


def enter_copies(tensor: Tensor, shard: Shard, group: TensorParallelGroup) -> Tensor:
    """Return `tensor` unchanged; its gradient will be summed over the ranks that hold the same piece, if several do."""
    if shard.copies > 1 and torch.is_grad_enabled() and tensor.requires_grad:
        return _EnterCopies.apply(tensor, shard, group)  # type: ignore[no-any-return,no-untyped-call]
    return tensor


class _EnterCopies(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, shard: Shard, group: TensorParallelGroup) -> Tensor:
        ctx.shard, ctx.group = shard, group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _sum_copies(grads[0], ctx.shard, ctx.group), None, None


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]


def _sum(grad: Tensor, group: TensorParallelGroup) -> Tensor:
    return reduce_partial(grad.clone(), group)


def _sum_copies(grad: Tensor, shard: Shard, group: TensorParallelGroup) -> Tensor:
    """Return the sum over the copies: all pieces are summed side by side, which needs no group of their own."""
    piece = group.rank // shard.copies
    pieces = grad.new_zeros((shard.pieces(group.degree), *grad.shape))
    pieces[piece] = grad
    return reduce_partial(pieces, group)[piece]
