"""The local modules: ordinary `nn.Linear`s of a rank's size, with a collective where the mathematics needs one.

A planned module becomes one of these by a change of class, so that its parameters, its state-dict keys and
`isinstance(module, nn.Linear)` stay as they were, and printing the model shows what is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn.functional import linear as matmul

from shardwise.errors import Finding, PlanError
from shardwise.plan import styles
from shardwise.plan.layout import Shard, Span
from shardwise.plan.resolve import PlannedModule
from shardwise.runtime.collectives import enter_shard, reduce_partial, split_last_dim
from shardwise.runtime.group import TensorParallelGroup


class LocalLinear(nn.Linear):
    """A rank's slice of a Linear.

    Attributes:
        tp_group: The ranks that hold the other slices.
        tp_planned: The module's entry in the resolved plan: its path, its style, and how its weight is cut.
        tp_shard: The layout of the whole weight (out_features x in_features).
        tp_spans: What this rank holds along the sharded dim.
    """

    tp_group: TensorParallelGroup
    tp_planned: PlannedModule
    tp_shard: Shard
    tp_spans: Sequence[Span]

    @classmethod
    def adopt(cls, linear: nn.Linear, group: TensorParallelGroup, planned: PlannedModule) -> None:
        """Make `linear`, whose parameters are local already, a module of this class."""
        shard = planned.layouts["weight"]
        assert isinstance(shard, Shard)
        linear.__class__ = cls
        spans = shard.spans(group.rank, group.degree)
        vars(linear).update(tp_group=group, tp_planned=planned, tp_shard=shard, tp_spans=spans)

    def extra_repr(self) -> str:
        """Return the local sizes, the layout of the weight, and the rank."""
        return f"{super().extra_repr()}, {self.tp_shard}, rank {self.tp_group.rank} of {self.tp_group.degree}"


class ColwiseLinear(LocalLinear):
    """Holds some rows of the weight: maps a whole input (..., in) to its slice of the output (..., out / degree)."""

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's output features; no communication."""
        return matmul(enter_shard(input, self.tp_group), self.weight, self.bias)


class RowwiseLinear(LocalLinear):
    """Holds some columns of the weight: maps a slice of the input (..., in / degree) to the whole output (..., out).

    The bias is whole on each rank and is added after the reduction, once.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the whole output; one all-reduce.

        Raises:
            PlanError: the input is whole, where the plan promised a slice of it.
        """
        if input.shape[-1] != self.in_features:
            raise self._unexpected_input(input.shape[-1])
        output = reduce_partial(matmul(input, self.weight), self.tp_group)
        return output if self.bias is None else output + self.bias

    def _unexpected_input(self, width: int) -> PlanError:
        whole = width == self.tp_shard.size
        finding = Finding(
            kind="WholeInput" if whole else "InputWidth",
            module=self.tp_planned.path,
            plan_key=self.tp_planned.plan_key,
            message=f"expects this rank's {self.in_features} of {self.tp_shard.size} input features, "
            f"got {'all of them' if whole else width}",
            fix='use "rowwise_split_input" if its input is whole on every rank; '
            "otherwise shard what produces the input with a colwise style",
        )
        return PlanError([finding], "a tensor parallel model in its forward")


class RowwiseSplitInputLinear(RowwiseLinear):
    """A `RowwiseLinear` that is given the whole input (..., in) and takes its own slice of it."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the whole output; one all-reduce."""
        return super().forward(split_last_dim(input, self.tp_spans, self.tp_group))


LOCAL_CLASSES: dict[type[styles.Style], type[LocalLinear]] = {
    styles.ColwiseParallel: ColwiseLinear,
    styles.PackedColwiseParallel: ColwiseLinear,
    styles.RowwiseParallel: RowwiseLinear,
    styles.PackedRowwiseParallel: RowwiseLinear,
    styles.RowwiseSplitInputParallel: RowwiseSplitInputLinear,
}
"""The runtime half of each style of Linears."""


def sum_gradients(module: nn.Module, group: TensorParallelGroup) -> None:
    """Sum the gradients of the module's whole parameters over the ranks, each of which uses them on its own heads."""
    for parameter in module.parameters(recurse=False):
        if parameter.requires_grad:
            parameter.register_hook(partial(_sum_gradient, group=group))  # type: ignore[no-untyped-call]


def _sum_gradient(grad: Tensor, group: TensorParallelGroup) -> Tensor:
    return reduce_partial(grad.clone(), group)


def adopt(module: nn.Module, group: TensorParallelGroup, planned: PlannedModule) -> None:
    """Make a module that holds this rank's parameters do this rank's part of the work, as its style says."""
    for name, value in planned.attributes.items():
        setattr(module, name, value)
    local_class = LOCAL_CLASSES.get(type(planned.style))
    if local_class is not None:
        assert isinstance(module, nn.Linear)  # the style took it
        local_class.adopt(module, group, planned)
    elif planned.style.sums_gradients:
        sum_gradients(module, group)
