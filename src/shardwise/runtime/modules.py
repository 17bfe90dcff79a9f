"""The runtime half of each style: ordinary modules of a rank's size, with a collective where the mathematics needs one.

A planned Linear or norm becomes one of these by a change of class, so that its parameters, its state-dict keys
and `isinstance(module, nn.Linear)` stay as they were, and printing the model shows what is sharded. Modules
whose own work does not change get a hook. Norms are in `runtime.norms`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.functional import linear as matmul
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only

from shardwise.errors import Finding, PlanError
from shardwise.plan import styles
from shardwise.plan.layout import Shard, Span
from shardwise.plan.resolve import PlannedModule
from shardwise.runtime.collectives import enter_shard, reduce_partial, split_last_dim
from shardwise.runtime.gradients import sum_gradients, sum_gradients_of_copies
from shardwise.runtime.group import TensorParallelGroup
from shardwise.runtime.norms import LocalNorm
from shardwise.runtime.slices import InputSlice, OutputSlice
from shardwise.runtime.state import Refusal
from shardwise.runtime.together import Together


class LocalLinear(nn.Linear):
    """A rank's slice of a Linear.

    Attributes:
        tp_group: The ranks that hold the other slices.
        tp_planned: The module's entry in the resolved plan: its path, its style, and how its weight is cut.
        tp_shard: The layout of the whole weight (out_features x in_features).
        tp_spans: What this rank holds along the sharded dim.
        tp_inside: Whether a module around this one sums once, what it returns and the gradients of what it is given.
    """

    tp_group: TensorParallelGroup
    tp_planned: PlannedModule
    tp_shard: Shard
    tp_spans: Sequence[Span]
    tp_inside: bool

    @classmethod
    def adopt(cls, module: nn.Module, group: TensorParallelGroup, planned: PlannedModule) -> None:
        """Make `module`, a Linear whose parameters are local already, a module of this class."""
        shard = planned.layouts["weight"]
        assert isinstance(shard, Shard)
        module.__class__ = cls
        spans, inside = shard.spans(group.rank, group.degree), planned.style.inside
        vars(module).update(
            tp_group=group, tp_planned=planned, tp_shard=shard, tp_spans=spans, tp_inside=inside
        )
        sum_gradients_of_copies(module, shard, group)

    def extra_repr(self) -> str:
        """Return the local sizes, the layout of the weight, and the rank."""
        return f"{super().extra_repr()}, {self.tp_shard}, rank {self.tp_group.rank} of {self.tp_group.degree}"


class ColwiseLinear(LocalLinear):
    """Holds some rows of the weight: maps a whole input (..., in) to its slice of the output (..., out / degree).

    Attributes:
        tp_together: What waits for the norms of its attention, if they look at all heads.
    """

    tp_together: Together | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's output features; no communication."""
        whole = input if self.tp_inside else enter_shard(input, self.tp_group)
        output = matmul(whole, self.weight, self.bias)
        if self.tp_together is not None:
            self.tp_together.leave(self.tp_planned.path, output, self.tp_shard.size * self.tp_shard.copies)
        return output


class RowwiseLinear(LocalLinear):
    """Holds some columns of the weight: maps a slice of the input (..., in / degree) to the whole output (..., out).

    The bias is whole on each rank and is added after the reduction, once.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the whole output; one all-reduce, which inside of `SumOnce` is left to the module around.

        Raises:
            PlanError: the input is whole, where the plan promised a slice of it.
        """
        if input.shape[-1] != self.in_features:
            raise self._unexpected_input(input.shape[-1])
        terms = matmul(input, self.weight)
        if self.tp_inside:
            return terms
        output = reduce_partial(terms, self.tp_group)
        return output if self.bias is None else output + self.bias

    def _unexpected_input(self, width: int) -> PlanError:
        needs_whole = isinstance(self, RowwiseSplitInputLinear)
        wanted = (
            self.tp_shard.size if needs_whole else f"this rank's {self.in_features} of {self.tp_shard.size}"
        )
        finding = Finding(
            kind="WholeInputNeeded" if needs_whole else "ShardedInputNeeded",
            module=self.tp_planned.path,
            plan_key=self.tp_planned.plan_key,
            message=f"expects {wanted} input features, got {width}",
            fix='use "rowwise" if what produces its input leaves a shard'
            if needs_whole
            else 'use "rowwise_split_input" if its input is whole on every rank; '
            "otherwise shard what produces the input with a colwise style",
        )
        return PlanError([finding], "a tensor parallel model in its forward")


class RowwiseSplitInputLinear(RowwiseLinear):
    """A `RowwiseLinear` that is given the whole input (..., in) and takes its own slice of it."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the whole output; one all-reduce.

        Raises:
            PlanError: the input is a slice already. On every rank alike: slicing it again would fail on all but
                the first, which would wait for them in the reduction.
        """
        if input.shape[-1] != self.tp_shard.size:
            raise self._unexpected_input(input.shape[-1])
        return super().forward(split_last_dim(input, self.tp_spans, self.tp_group))


class GradientSum:
    """What a module gets that each rank applies, whole, to its own heads: its gradients are summed over the ranks."""

    @classmethod
    def adopt(cls, module: nn.Module, group: TensorParallelGroup, planned: PlannedModule) -> None:
        """Sum the gradients of the module's parameters from now on."""
        sum_gradients(module, group)


@dataclass(frozen=True)
class OutputGather:
    """A forward hook that puts together the slices that a module returns.

    Each rank's slice is laid into zeros and the sum is taken: one all-reduce for each tensor that is cut.

    Attributes:
        shard: How the last dim of what is cut lies on the ranks; other tensors stay as they are.
        group: The ranks that have the other slices.
    """

    shard: Shard
    group: TensorParallelGroup

    @classmethod
    def adopt(cls, module: nn.Module, group: TensorParallelGroup, planned: PlannedModule) -> None:
        """Return whole tensors from now on."""
        assert isinstance(planned.style, styles.GatherOutput)
        module.register_forward_hook(cls(planned.style.shard(0, (planned.style.width,)), group))

    def __call__(self, module: nn.Module, args: object, output: object) -> object:
        """Return the output with each slice made whole."""
        if isinstance(output, tuple | list):
            return type(output)(self(module, args, part) for part in output)
        (span,) = self.shard.spans(self.group.rank, self.group.degree)
        if not isinstance(output, Tensor) or output.shape[-1] != span.length:
            return output
        return reduce_partial(pad(output, (span.start, self.shard.size - span.stop)), self.group)


@dataclass(frozen=True)
class OutputSum:
    """Hooks that sum what a module returns over the ranks, and the gradients of what it is given.

    Between the two each rank has its own terms, of values and of gradients.

    Attributes:
        group: The ranks that have the other terms.
    """

    group: TensorParallelGroup

    @classmethod
    def adopt(cls, module: nn.Module, group: TensorParallelGroup, planned: PlannedModule) -> None:
        """Sum what the module returns from now on."""
        hooks = cls(group)
        module.register_forward_pre_hook(hooks.enter, with_kwargs=True)
        module.register_forward_hook(hooks)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments, whose gradients will be summed."""
        return tree_map_only(Tensor, partial(enter_shard, group=self.group), (args, kwargs))

    def __call__(self, module: nn.Module, args: object, output: object) -> object:
        """Return the sums; one all-reduce for each tensor."""
        return tree_map_only(Tensor, partial(reduce_partial, group=self.group), output)


def terms_of_sums(model: nn.Module) -> Iterator[str]:
    """Yield the paths of the modules inside of those that sum once: what they return may be one rank's terms."""
    for path, module in model.named_modules():
        if any(isinstance(hook, OutputSum) for hook in module._forward_hooks.values()):
            prefix = f"{path}." if path else ""
            yield from (prefix + name for name, _ in module.named_modules() if name)


class RuntimeHalf(Protocol):
    """What does the work of a style on the ranks."""

    @classmethod
    def adopt(cls, module: nn.Module, group: TensorParallelGroup, planned: PlannedModule) -> None:
        """Make `module`, whose parameters and attributes are local already, do this rank's part of the work."""


LOCAL_CLASSES: dict[type[styles.Style], type[RuntimeHalf]] = {
    styles.ColwiseParallel: ColwiseLinear,
    styles.PackedColwiseParallel: ColwiseLinear,
    styles.RowwiseParallel: RowwiseLinear,
    styles.PackedRowwiseParallel: RowwiseLinear,
    styles.RowwiseSplitInputParallel: RowwiseSplitInputLinear,
    styles.AcrossHeadNorm: LocalNorm,
    styles.PerHead: GradientSum,
    styles.SliceOutput: OutputSlice,
    styles.SliceInput: InputSlice,
    styles.GatherOutput: OutputGather,
    styles.SumOnce: OutputSum,
}
"""The runtime half of each style that needs one: some only cut parameters, or divide attributes."""


def adopt(module: nn.Module, group: TensorParallelGroup, planned: PlannedModule) -> None:
    """Make a module that holds this rank's parameters do this rank's part of the work, as its style says."""
    for name, value in planned.values(group.rank, group.degree).items():
        _set(module, name, value)
    half = LOCAL_CLASSES.get(type(planned.style))
    if half is not None:
        half.adopt(module, group, planned)


def _set(module: nn.Module, name: str, value: int) -> None:
    """Set an attribute, or an entry of the model's configuration, which is then no longer one to save."""
    entry = name.removeprefix(styles.CONFIG_PREFIX)
    if entry == name:
        setattr(module, name, value)
        return
    register: Any = module.register_to_config  # of diffusers' models, as the configuration is
    register(**{entry: value})
    hint = f"{entry} in its configuration is that of one rank; save the model before sharding it"
    vars(module)["save_config"] = Refusal("save_config", type(module).__name__, hint)
