"""Norms that look at all heads together, on a rank that holds some of them: their statistic is summed over the ranks.

The formulas are those of `torch.nn.RMSNorm`, `torch.nn.LayerNorm` and diffusers' `RMSNorm`, cast for cast: they
differ where the input and the weight are of different or of half precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor, nn

from shardwise.plan.resolve import PlannedModule
from shardwise.plan.styles import AcrossHeadNorm
from shardwise.runtime.collectives import enter_shard, reduce_partial
from shardwise.runtime.gradients import sum_gradients_of_copies
from shardwise.runtime.group import TensorParallelGroup
from shardwise.runtime.together import Summand, Together

_HALF = (torch.float16, torch.bfloat16)


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in _HALF else x


class LocalNorm(nn.Module):
    """A rank's slice of a norm over all heads: maps a slice (..., width / degree) to its slice of the output.

    Attributes:
        tp_group: The ranks that hold the other slices.
        tp_planned: The module's entry in the resolved plan.
        tp_width: The number of features on all ranks together, each counted once.
        tp_copies: How many ranks hold each of them.
        tp_together: The queries and keys of its attention, whose statistics are summed together.
        eps: What is added to the mean of squares; None is the smallest step of the dtype it is computed in.
    """

    tp_group: TensorParallelGroup
    tp_planned: PlannedModule
    tp_width: int
    tp_copies: int
    tp_together: Together | None = None
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

    def statistics(self, inputs: Sequence[Summand]) -> list[tuple[Tensor, ...]]:
        """Return what the formula needs of each slice of values, from all ranks; one all-reduce for each number."""
        raise NotImplementedError

    def statistic(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return what the formula needs of a slice of values, summed together with what else is waiting."""
        own = Summand(x, self.tp_width * self.tp_copies)
        if self.tp_together is None or torch.compiler.is_compiling():
            return self.statistics([own])[0]
        return self.tp_together.take(own, self.statistics)

    def means(self, values: Sequence[Tensor], widths: Sequence[int]) -> list[Tensor]:
        """Return the means of slices of values over the features of all ranks (..., 1); one all-reduce for all.

        Each rank goes on with a mean on features of its own, so its gradient is summed too.
        """
        terms = [value.sum(-1, keepdim=True) for value in values]
        if len(terms) == 1:
            sums = [enter_shard(reduce_partial(terms[0], self.tp_group), self.tp_group)]
        else:
            joined = reduce_partial(torch.cat([term.flatten() for term in terms]), self.tp_group)
            ends, whole = accumulate(term.numel() for term in terms), enter_shard(joined, self.tp_group)
            sums = [
                whole[end - term.numel() : end].view(term.shape)
                for end, term in zip(ends, terms, strict=True)
            ]
        return [total / width for total, width in zip(sums, widths, strict=True)]


class _RMSNorm(LocalNorm):
    """What both formulas of an RMSNorm share."""

    def values(self, x: Tensor) -> Tensor:
        """Return a slice of values in the dtype that the statistic is computed in."""
        raise NotImplementedError

    def statistics(self, inputs: Sequence[Summand]) -> list[tuple[Tensor, ...]]:
        """Return the mean of squares of each slice of values; one all-reduce."""
        squares = [self.values(one.tensor).pow(2) for one in inputs]
        return [(mean,) for mean in self.means(squares, [one.width for one in inputs])]


class AcrossHeadTorchRMSNorm(_RMSNorm, nn.RMSNorm):
    """A slice of a `torch.nn.RMSNorm`: computed in fp32 or more, returned in the input's dtype."""

    shape_attribute = "normalized_shape"

    def values(self, x: Tensor) -> Tensor:
        """Return half precision as fp32, the rest as it is."""
        return _widened(x)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's features, normalized; one all-reduce."""
        values, (mean,) = self.values(x), self.statistic(x)
        eps = torch.finfo(values.dtype).eps if self.eps is None else self.eps
        output = values * torch.rsqrt(mean + eps)
        if self.weight is not None:
            output = output * self.weight
        return output.to(x.dtype)


class AcrossHeadLayerNorm(LocalNorm, nn.LayerNorm):
    """A slice of a `torch.nn.LayerNorm`: computed in fp32 or more, returned in the input's dtype.

    Mean and variance are summed one after the other: their difference, from one sum, would lose digits.
    """

    shape_attribute = "normalized_shape"
    eps: float

    def statistics(self, inputs: Sequence[Summand]) -> list[tuple[Tensor, ...]]:
        """Return mean and variance of each slice of values; two all-reduces."""
        values, widths = [_widened(one.tensor) for one in inputs], [one.width for one in inputs]
        means = self.means(values, widths)
        squares = [(value - mean).pow(2) for value, mean in zip(values, means, strict=True)]
        return list(zip(means, self.means(squares, widths), strict=True))

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's features, normalized; two all-reduces."""
        mean, variance = self.statistic(input)
        output = (_widened(input) - mean) * torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            output = output * self.weight
        if self.bias is not None:
            output = output + self.bias
        return output.to(input.dtype)


class AcrossHeadDiffusersRMSNorm(_RMSNorm):
    """A slice of diffusers' `RMSNorm`: the statistic in fp32, the product in the weight's dtype if that is half."""

    shape_attribute = "dim"
    eps: float
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def values(self, x: Tensor) -> Tensor:
        """Return any values as fp32."""
        return x.float()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return this rank's features, normalized; one all-reduce."""
        (mean,) = self.statistic(hidden_states)
        output = hidden_states * torch.rsqrt(mean + self.eps)
        if self.weight is None:
            return output.to(hidden_states.dtype)
        if self.weight.dtype in _HALF:
            output = output.to(self.weight.dtype)
        output = output * self.weight
        return output if self.bias is None else output + self.bias
