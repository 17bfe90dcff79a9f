"""Norms that look at all heads together, on a rank that holds some of them: their statistic is summed over the ranks.

The formulas are those of `torch.nn.RMSNorm`, `torch.nn.LayerNorm` and diffusers' `RMSNorm`, cast for cast: they
differ where the input and the weight are of different or of half precision.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from shardwise.plan.resolve import PlannedModule
from shardwise.plan.styles import AcrossHeadNorm
from shardwise.runtime.collectives import enter_shard, reduce_partial
from shardwise.runtime.gradients import sum_gradients_of_copies
from shardwise.runtime.group import TensorParallelGroup

_HALF = (torch.float16, torch.bfloat16)


class LocalNorm(nn.Module):
    """A rank's slice of a norm over all heads: maps a slice (..., width / degree) to its slice of the output.

    Attributes:
        tp_group: The ranks that hold the other slices.
        tp_planned: The module's entry in the resolved plan.
        tp_width: The number of features on all ranks together, each counted once.
        tp_copies: How many ranks hold each of them.
        eps: What is added to the mean of squares; None is the smallest step of the dtype it is computed in.
    """

    tp_group: TensorParallelGroup
    tp_planned: PlannedModule
    tp_width: int
    tp_copies: int
    eps: float | None
    shape_attribute: ClassVar[str]
    """The module's own record of its width."""

    @classmethod
    def adopt(cls, module: nn.Module, group: TensorParallelGroup, planned: PlannedModule) -> None:
        """Make `module`, a norm whose parameters are local already, a module of this class: the one of its formula."""
        local: type[LocalNorm] = AcrossHeadDiffusersRMSNorm
        if isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
            local = AcrossHeadTorchRMSNorm if isinstance(module, nn.RMSNorm) else AcrossHeadLayerNorm
        style, whole = planned.style, tuple(getattr(module, local.shape_attribute))
        assert isinstance(style, AcrossHeadNorm)
        shard = style.shard_of(module)
        module.__class__ = local
        vars(module).update(tp_group=group, tp_planned=planned, tp_width=shard.size, tp_copies=shard.copies)
        vars(module)[local.shape_attribute] = torch.Size(shard.local_shape(whole, group.rank, group.degree))
        sum_gradients_of_copies(module, shard, group)

    def extra_repr(self) -> str:
        """Return the local width, and the rank."""
        group = self.tp_group
        (width,) = getattr(self, self.shape_attribute)
        return f"{width} of {self.tp_width}, eps={self.eps}, rank {group.rank} of {group.degree}"

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of a slice of values over the features of all ranks (..., 1); one all-reduce.

        Each rank goes on with the mean on features of its own, so its gradient is summed too.
        """
        total = reduce_partial(values.sum(-1, keepdim=True), self.tp_group)
        return enter_shard(total, self.tp_group) / (self.tp_width * self.tp_copies)


class AcrossHeadTorchRMSNorm(LocalNorm, nn.RMSNorm):
    """A slice of a `torch.nn.RMSNorm`: computed in fp32 or more, returned in the input's dtype."""

    shape_attribute = "normalized_shape"

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's features, normalized; one all-reduce."""
        values = x.float() if x.dtype in _HALF else x
        eps = torch.finfo(values.dtype).eps if self.eps is None else self.eps
        output = values * torch.rsqrt(self.mean(values.pow(2)) + eps)
        if self.weight is not None:
            output = output * self.weight
        return output.to(x.dtype)


class AcrossHeadLayerNorm(LocalNorm, nn.LayerNorm):
    """A slice of a `torch.nn.LayerNorm`: computed in fp32 or more, returned in the input's dtype.

    Mean and variance are summed one after the other: their difference, from one sum, would lose digits.
    """

    shape_attribute = "normalized_shape"
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's features, normalized; two all-reduces."""
        values = input.float() if input.dtype in _HALF else input
        centred = values - self.mean(values)
        output = centred * torch.rsqrt(self.mean(centred.pow(2)) + self.eps)
        if self.weight is not None:
            output = output * self.weight
        if self.bias is not None:
            output = output + self.bias
        return output.to(input.dtype)


class AcrossHeadDiffusersRMSNorm(LocalNorm):
    """A slice of diffusers' `RMSNorm`: the statistic in fp32, the product in the weight's dtype if that is half."""

    shape_attribute = "dim"
    eps: float
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return this rank's features, normalized; one all-reduce."""
        mean = self.mean(hidden_states.float().pow(2))
        output = hidden_states * torch.rsqrt(mean + self.eps)
        if self.weight is None:
            return output.to(hidden_states.dtype)
        if self.weight.dtype in _HALF:
            output = output.to(self.weight.dtype)
        output = output * self.weight
        return output if self.bias is None else output + self.bias
