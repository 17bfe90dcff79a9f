"""Hooks that cut values where they enter or leave a module: each rank goes on with its own slice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwise.errors import Finding, PlanError
from shardwise.plan.resolve import PlannedModule
from shardwise.plan.styles import SliceInput, SliceOutput, StyleFault
from shardwise.runtime.collectives import enter_shard
from shardwise.runtime.group import TensorParallelGroup


@dataclass(frozen=True)
class _Slicer:
    """What both hooks share.

    Attributes:
        planned: The module's entry in the resolved plan; its style names the dim.
        group: The ranks that take the other slices.
    """

    planned: PlannedModule
    group: TensorParallelGroup

    def _slice(self, module: nn.Module, tensor: Tensor) -> Tensor:
        style, degree = self.planned.style, self.group.degree
        assert isinstance(style, SliceInput | SliceOutput)
        shard = style.cut(module, tuple(tensor.shape))
        if shard.indivisible(degree):
            raise StyleFault(
                "IndivisibleSlice",
                f"a tensor has {shard.size} along dim {shard.dim}, which tp_degree {degree} does not divide",
                "take the entry out, or use a degree that divides it",
            )
        (span,) = shard.spans(self.group.rank, degree)
        return enter_shard(tensor, self.group).narrow(shard.dim, span.start, span.length)

    def _refusal(self, fault: StyleFault) -> PlanError:
        message = f"{self.planned.style.label} cannot be applied: {fault.message}"
        finding = Finding(fault.kind, self.planned.path, message, fault.fix, self.planned.plan_key)
        return PlanError([finding], "a tensor parallel model in its forward")


class OutputSlice(_Slicer):
    """A forward hook that takes this rank's slice of each tensor that a module returns."""

    @classmethod
    def adopt(cls, module: nn.Module, group: TensorParallelGroup, planned: PlannedModule) -> None:
        """Slice what the module returns from now on."""
        module.register_forward_hook(cls(planned, group))

    def __call__(self, module: nn.Module, args: object, output: object) -> object:
        """Return the slices: of a tensor, or of each tensor of a tuple, list or dict.

        Raises:
            PlanError: the output is something else, or the degree does not divide it.
        """
        style = self.planned.style
        assert isinstance(style, SliceOutput)
        try:
            return style.each(output, lambda tensor: self._slice(module, tensor))
        except StyleFault as fault:
            raise self._refusal(fault) from fault


class InputSlice(_Slicer):
    """A forward pre-hook that takes this rank's slice of the tensors that a module is given by some names."""

    @classmethod
    def adopt(cls, module: nn.Module, group: TensorParallelGroup, planned: PlannedModule) -> None:
        """Slice what the module is given from now on."""
        module.register_forward_pre_hook(cls(planned, group), with_kwargs=True)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments with the slices.

        Raises:
            PlanError: an argument is no tensor and holds none, or the degree does not divide it.
        """
        style = self.planned.style
        assert isinstance(style, SliceInput)
        try:
            return style.each_argument(module, args, kwargs, lambda tensor: self._slice(module, tensor))
        except StyleFault as fault:
            raise self._refusal(fault) from fault
