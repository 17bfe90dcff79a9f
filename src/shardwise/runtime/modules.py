"""The runtime half of each style: ordinary modules of a rank's size, with a collective where the mathematics needs one.

A planned Linear, convolution or norm becomes one of these by a change of class, so that its parameters, its
state-dict keys and `isinstance(module, nn.Linear)` stay as they were, and printing the model shows what is sharded.
Modules whose own work does not change get a hook. Norms are in `runtime.norms`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from shardwise.plan.linears import CONVOLUTIONS, sliding_dims
from shardwise.plan.resolve import PlannedModule
from shardwise.runtime.collectives import enter_layer, enter_shard, leave_layer, reduce_partial, split
from shardwise.runtime.gradients import sum_gradients, sum_gradients_of_copies
from shardwise.runtime.group import TensorParallelGroup
from shardwise.runtime.norms import LocalNorm
from shardwise.runtime.slices import InputSlice, OutputSlice
from shardwise.runtime.state import Refusal
from shardwise.runtime.together import Together
from shardwise.runtime.vocabulary import Vocabulary


class LocalLayer(nn.Module):
    """A rank's slice of a Linear or a convolution.

    Attributes:
        tp_group: The ranks that hold the other slices.
        tp_planned: The module's entry in the resolved plan: its path, its style, and how its weight is cut.
        tp_shard: The layout of the whole weight (out x in).
        tp_spans: What this rank holds along the sharded dim.
        tp_inside: Whether a module around this one sums once, what it returns and the gradients of what it is given.
        tp_sliding: How many dims of its input come behind the features: those that a convolution slides along.
    """

    tp_group: TensorParallelGroup
    tp_planned: PlannedModule
    tp_shard: Shard
    tp_spans: Sequence[Span]
    tp_inside: bool
    tp_sliding: int
    weight: Tensor
    bias: nn.Parameter
    _conv_forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    @classmethod
    def adopt(cls, module: nn.Module, group: TensorParallelGroup, planned: PlannedModule) -> None:
        """Make `module`, a layer whose parameters are local already, do what this class does."""
        shard = planned.layouts["weight"]
        assert isinstance(shard, Shard)
        module.__class__ = cls.of(module)
        spans, inside = shard.spans(group.rank, group.degree), planned.style.inside
        vars(module).update(
            tp_group=group, tp_planned=planned, tp_shard=shard, tp_spans=spans, tp_inside=inside
        )
        vars(module).update(tp_sliding=sliding_dims(module))
        sum_gradients_of_copies(module, shard, group)

    @classmethod
    def of(cls, module: nn.Module) -> type[LocalLayer]:
        """Return the class that is both this one and the class that computes as `module` does."""
        (found,) = (local for base, local in _LAYERS[cls].items() if isinstance(module, base))
        return found

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the whole weight."""
        shape, dim = tuple(self.weight.shape), self.tp_shard.dim
        return (*shape[:dim], self.tp_shard.size, *shape[dim + 1 :])

    def forward(self, input: Tensor, adapt: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        """Return the layer's output, or this rank's slice of it.

        What an adapter adds belongs between the steps: a sum over the ranks then covers both.

        Args:
            input: What the layer is given, on all ranks.
            adapt: Returns what takes the place of this rank's product, by what entered and the product.
        """
        own = self.enter(input)
        output = self.product(own)
        return self.leave(output if adapt is None else adapt(own, output))

    def enter(self, input: Tensor) -> Tensor:
        """Return what this rank's part of the weight is applied to."""
        return input

    def product(self, own: Tensor) -> Tensor:
        """Return what this rank's part of the weight, and its bias where that is cut too, make of what entered."""
        return self._multiply(own, self.bias)

    def leave(self, output: Tensor) -> Tensor:
        """Return what the layer returns, of what this rank's part of the weight made."""
        return output

    def _multiply(self, own: Tensor, bias: Tensor | None) -> Tensor:
        return (self._conv_forward if self.tp_sliding else matmul)(own, self.weight, bias)

    def extra_repr(self) -> str:
        """Return the local sizes, the layout of the weight, and the rank."""
        return f"{super().extra_repr()}, {self.tp_shard}, rank {self.tp_group.rank} of {self.tp_group.degree}"


class Colwise(LocalLayer):
    """Holds some rows of the weight: maps a whole input (..., in) to its slice of the output (..., out / degree).

    Attributes:
        tp_together: What waits for the norms of its attention, if they look at all heads.
    """

    tp_together: Together | None = None

    def enter(self, input: Tensor) -> Tensor:
        """Return the whole input; no communication but in backward."""
        return input if self.tp_inside else enter_layer(input, self.tp_group)

    def leave(self, output: Tensor) -> Tensor:
        """Return this rank's output features."""
        if self.tp_together is not None:
            self.tp_together.leave(self.tp_planned.path, output, self.tp_shard.size * self.tp_shard.copies)
        return output


class Rowwise(LocalLayer):
    """Holds some columns of the weight: maps a slice of the input (..., in / degree) to the whole output (..., out).

    The bias is whole on each rank and is added after the reduction, once.
    """

    def enter(self, input: Tensor) -> Tensor:
        """Return this rank's slice of the input.

        Raises:
            PlanError: the input is whole, where the plan promised a slice of it.
        """
        own, width = sum(span.length for span in self.tp_spans), input.shape[-1 - self.tp_sliding]
        if width != own:
            fix = (
                'use "rowwise_split_input" if its input is whole on every rank; '
                "otherwise shard what produces the input with a colwise style"
            )
            wanted = f"this rank's {own} of {self.tp_shard.size}"
            raise self._unexpected_input("ShardedInputNeeded", wanted, width, fix)
        return input

    def product(self, own: Tensor) -> Tensor:
        """Return this rank's term of the output."""
        return self._multiply(own, None)

    def leave(self, output: Tensor) -> Tensor:
        """Return the whole output; one all-reduce, which inside of `SumOnce` is left to the module around."""
        if self.tp_inside:
            return output
        whole = leave_layer(output, self.tp_group)
        return whole if self.bias is None else whole + self._aligned(self.bias)

    def _aligned(self, bias: Tensor) -> Tensor:
        """Return a bias as it is added to an output, whose features may not be its last dim."""
        return bias.view(-1, *[1] * self.tp_sliding) if self.tp_sliding else bias

    def _unexpected_input(self, kind: str, wanted: object, width: int, fix: str) -> PlanError:
        message = f"expects {wanted} input features, got {width}"
        finding = Finding(kind, self.tp_planned.path, message, fix, self.tp_planned.plan_key)
        return PlanError([finding], "a tensor parallel model in its forward")


class RowwiseSplitInput(Rowwise):
    """A `Rowwise` layer that is given the whole input (..., in) and takes its own slice of it."""

    def enter(self, input: Tensor) -> Tensor:
        """Return this rank's slice of the whole input.

        Raises:
            PlanError: the input is a slice already. On every rank alike: slicing it again would fail on all but
                the first, which would wait for them in the reduction.
        """
        dim = -1 - self.tp_sliding
        if input.shape[dim] != self.tp_shard.size:
            fix = 'use "rowwise" if what produces its input leaves a shard'
            raise self._unexpected_input("WholeInputNeeded", self.tp_shard.size, input.shape[dim], fix)
        return split(input, dim, self.tp_spans, self.tp_group)


class ColwiseGather(Colwise):
    """A `Colwise` layer behind which every rank has the whole output (..., out)."""

    def leave(self, output: Tensor) -> Tensor:
        """Return the output features of all ranks, put together; one all-reduce."""
        (span,) = self.tp_spans
        return gather(output, span, self.tp_shard, self.tp_group)


def gather(own: Tensor, span: Span, shard: Shard, group: TensorParallelGroup) -> Tensor:
    """Return the whole of which each rank has a span of the last dim: each lays it into zeros, and the sum is taken."""
    return leave_layer(pad(own, (span.start, shard.size - span.stop)), group)


class Depthwise(LocalLayer):
    """Holds the filters of some channels: maps a slice of the channels to the same slice of the output."""


class ColwiseLinear(Colwise, nn.Linear):
    """A `Colwise` layer of a Linear."""


class RowwiseLinear(Rowwise, nn.Linear):
    """A `Rowwise` layer of a Linear."""


class RowwiseSplitInputLinear(RowwiseSplitInput, nn.Linear):
    """A `RowwiseSplitInput` layer of a Linear."""


class ColwiseGatherLinear(ColwiseGather, nn.Linear):
    """A `ColwiseGather` layer of a Linear."""


_LAYERS: dict[type[LocalLayer], dict[type[nn.Module], type[LocalLayer]]] = {
    Colwise: {nn.Linear: ColwiseLinear},
    Rowwise: {nn.Linear: RowwiseLinear},
    RowwiseSplitInput: {nn.Linear: RowwiseSplitInputLinear},
    ColwiseGather: {nn.Linear: ColwiseGatherLinear},
    Depthwise: {},
}
for _half, _classes in _LAYERS.items():
    for _base in CONVOLUTIONS:  # ColwiseConv2d and so on: names in this module, so that they can be pickled
        _name = f"{_half.__name__}{_base.__name__}"
        _classes[_base] = globals()[_name] = type(_name, (_half, _base), {"__module__": __name__})


class GradientSum:
    """What a module gets that each rank applies, whole, to its own heads: its gradients are summed over the ranks.

    The module keeps its class, and has the ranks as `tp_sums_gradients`, for what is put around it.
    """

    @classmethod
    def adopt(cls, module: nn.Module, group: TensorParallelGroup, planned: PlannedModule) -> None:
        """Sum the gradients of the module's parameters from now on."""
        sum_gradients(module, group)
        vars(module)["tp_sums_gradients"] = group


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
        return gather(output, span, self.shard, self.group)


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
    styles.ColwiseParallel: Colwise,
    styles.PackedColwiseParallel: Colwise,
    styles.RowwiseParallel: Rowwise,
    styles.PackedRowwiseParallel: Rowwise,
    styles.RowwiseSplitInputParallel: RowwiseSplitInput,
    styles.ColwiseGatherOutputParallel: ColwiseGather,
    styles.EmbeddingRowwiseParallel: Vocabulary,
    styles.DepthwiseParallel: Depthwise,
    styles.PackedDepthwiseParallel: Depthwise,
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
    hint = f"{entry} in its configuration is that of one rank; save_pretrained writes that of the whole model"
    vars(module)["save_config"] = Refusal("save_config", type(module).__name__, hint)
