"""Gradients of parameters that several ranks hold, each of which knows the part of its own heads.

Every rank ends with the gradient that one process has, so an optimizer step keeps the copies equal.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

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
