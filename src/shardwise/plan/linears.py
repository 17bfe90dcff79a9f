"""The styles of `nn.Linear`: colwise, rowwise, and their forms for weights that fuse several parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from shardwise.errors import ConfigError
from shardwise.plan.layout import Activation, Layout, Partial, Replicated, Shard, divisors
from shardwise.plan.style import Style, StyleFault, are_blocks


@dataclass(frozen=True)
class LinearStyle(Style):
    """A style of `nn.Linear`: what the four below have in common.

    A subclass sets `dim`, the dim of `weight` (out_features x in_features) that is cut, and `size_attribute`,
    the Linear's own record of that size.
    """

    plan_name: ClassVar[str]
    dim: ClassVar[int]
    size_attribute: ClassVar[str]
    declared_attribute: ClassVar[str]
    """Attribute under which a model's `__init__` may store the absolute block sizes of a fused Linear."""
    works_inside: ClassVar[bool] = True

    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        """Cut `weight` along the style's dim; the bias follows it only where the output is cut."""
        self._check_target(module)
        assert isinstance(module, nn.Linear)  # checked above
        size = module.weight.shape[self.dim]
        shard = self.shard(self.dim, self._blocks(module, size))
        self._check_declared(module, shard)
        layouts: dict[str, Layout] = {"weight": shard}
        if module.bias is not None:
            layouts["bias"] = shard if self.dim == 0 else Replicated()
        return layouts

    def _check_target(self, module: nn.Module) -> None:
        """Refuse what is not a plain Linear with a weight of its own."""
        if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            own = " with a forward of its own" if isinstance(module, nn.Linear) else ""
            raise StyleFault(
                "NotALinear",
                f"the style {self.label} shards an nn.Linear, this module is a {type(module).__name__}{own}",
                "name the Linear inside it, or leave the module out of the plan",
            )
        if module._parameters.get("weight") is None:
            raise StyleFault(
                "NotPlainWeight",
                "the weight is computed from other parameters (a parametrization or weight norm)",
                "remove the parametrization first, or leave the module out of the plan",
            )

    def shard_of(self, module: nn.Module) -> Shard:
        """Return how the weight is cut."""
        shard = self.layouts(module)["weight"]
        assert isinstance(shard, Shard)
        return shard

    def attributes(self, module: nn.Module, degree: int) -> dict[str, Shard]:
        """Return the Linear's own record of the size that is cut."""
        return {self.size_attribute: self.shard_of(module)}

    def faults(self, module: nn.Module, degree: int) -> Iterator[StyleFault]:
        """Yield one fault for each block that `degree` does not divide on its own."""
        shard = self.shard_of(module)
        good = [d for d in divisors(min(shard.blocks)) if not any(block % d for block in shard.blocks)]
        for i in shard.indivisible(degree):
            yield StyleFault(
                "IndivisibleBlock",
                f"block {i + 1} of {len(shard.blocks)} has {shard.blocks[i]} {'columns' if self.dim else 'rows'}; "
                f"{shard.blocks[i]} is not divisible by tp_degree {degree}",
                f"use a degree that divides every block: {', '.join(map(str, good))}",
            )

    @property
    def label(self) -> str:
        """The plain name of the style."""
        return f'"{self.plan_name}"'

    def _blocks(self, module: nn.Linear, size: int) -> tuple[int, ...]:
        return (size,)

    def _declared(self, module: nn.Linear) -> tuple[int, ...]:
        """Return the block sizes that the model declares on the Linear; none is an empty tuple."""
        declared = getattr(module, self.declared_attribute, None) or ()
        if declared and not are_blocks(declared):
            raise StyleFault(
                "BadBlocks",
                f"{self.declared_attribute} is {declared!r}, not a list of positive integers",
                "set it to the absolute sizes in the model's __init__",
            )
        return tuple(declared)

    def _check_declared(self, module: nn.Linear, shard: Shard) -> None:
        """Refuse a cut that ignores block borders which the model itself declares: it would run, and be wrong."""
        declared = self._declared(module)
        if sum(declared) != shard.size:
            return
        if not _borders(declared) <= _borders(shard.blocks):
            raise StyleFault(
                "PackedWeight",
                f"the Linear packs blocks of {list(declared)} ({self.declared_attribute}), "
                f"the plan cuts it in blocks of {list(shard.blocks)}",
                f"use {_PACKED_NAMES[self.dim]}() without blocks",
            )


@dataclass(frozen=True)
class ColwiseParallel(LinearStyle):
    """Shard the output features; each rank computes its slice of the output.

    `weight` and `bias` are cut along dim 0. Needs a whole input, leaves the output sharded along its last dim.
    """

    leaves_shard: ClassVar[bool] = True
    plan_name: ClassVar[str] = "colwise"
    dim: ClassVar[int] = 0
    size_attribute: ClassVar[str] = "out_features"
    declared_attribute: ClassVar[str] = "_tp_packed_col_blocks"

    def needs(self, module: nn.Module, ndim: int) -> Layout:
        """Ask for a whole input."""
        return Replicated()

    def leaves(self, module: nn.Module, shape: tuple[int, ...]) -> Layout:
        """Leave the last dim sharded."""
        return self.shard_of(module).at(len(shape) - 1)


@dataclass(frozen=True)
class RowwiseParallel(LinearStyle):
    """Shard the input features; each rank computes a partial sum, one all-reduce completes it.

    `weight` is cut along dim 1; `bias` stays whole and is added once, after the reduction. Needs an input
    sharded along its last dim, as a colwise Linear leaves it; leaves a whole output. Inside of `SumOnce` it leaves
    the partial sum, and may have no bias.
    """

    plan_name: ClassVar[str] = "rowwise"
    dim: ClassVar[int] = 1
    size_attribute: ClassVar[str] = "in_features"
    declared_attribute: ClassVar[str] = "_tp_packed_row_blocks"

    def sums(self, module: nn.Module) -> int:
        """Complete the partial sums, unless the module around it does."""
        return 0 if self.inside else 1

    def leaves(self, module: nn.Module, shape: tuple[int, ...]) -> Activation:
        """Leave a whole output, or inside of `SumOnce` a partial sum."""
        return Partial() if self.inside else Replicated()

    def faults(self, module: nn.Module, degree: int) -> Iterator[StyleFault]:
        """Yield the faults of the blocks, and one for a bias that would be added on each rank."""
        yield from super().faults(module, degree)
        if self.inside and module.bias is not None:
            yield StyleFault(
                "BiasInside",
                f"{self.label} inside of SumOnce has a bias, which would be added once on each rank",
                "take the layer out of SumOnce",
            )

    def needs(self, module: nn.Module, ndim: int) -> Layout:
        """Ask for an input whose last dim is sharded in the blocks of the weight."""
        return self.shard_of(module).at(ndim - 1)


@dataclass(frozen=True)
class RowwiseSplitInputParallel(RowwiseParallel):
    """Shard the input features of a Linear whose input is whole: each rank takes its own slice of the input.

    For a lone projection, such as an AdaLN modulation that reads the timestep embedding. Needs a whole
    input, leaves a whole output. Stays whole where the degree does not divide the input: an embedder of text must
    not forbid a degree that divides the heads.
    """

    may_stay_whole: ClassVar[bool] = True
    plan_name: ClassVar[str] = "rowwise_split_input"
    works_inside: ClassVar[bool] = False

    def needs(self, module: nn.Module, ndim: int) -> Layout:
        """Ask for a whole input."""
        return Replicated()


@dataclass(frozen=True)
class _Packed(LinearStyle):
    """The part that both packed styles share: where the block sizes come from."""

    blocks: Sequence[int] | Callable[[nn.Linear], Sequence[int]] | None = None

    def __post_init__(self) -> None:
        if self.blocks is None or callable(self.blocks):
            return
        if not are_blocks(self.blocks):
            raise ConfigError(f"{type(self).__name__}: blocks must be positive integers, got {self.blocks!r}")
        object.__setattr__(self, "blocks", tuple(self.blocks))

    @property
    def label(self) -> str:
        """The constructor call, e.g. `PackedColwiseParallel([1, 1])`."""
        given: object = self.blocks or ""
        if isinstance(self.blocks, tuple):
            given = list(self.blocks)
        return f"{type(self).__name__}({getattr(given, '__name__', given)})"

    def _blocks(self, module: nn.Linear, size: int) -> tuple[int, ...]:
        blocks = self._given(module) or self._declared(module)
        if not blocks:
            raise StyleFault(
                "NoBlocks",
                f"{self.label} has no blocks, and the Linear has no {self.declared_attribute}",
                f"pass blocks, or set {self.declared_attribute} to the absolute sizes in the model's __init__",
            )
        unit, rest = divmod(size, sum(blocks))
        if rest:
            raise StyleFault(
                "BadBlocks",
                f"blocks {list(blocks)} sum to {sum(blocks)}, which does not divide dim {self.dim} of {size}",
                f"give blocks whose sum divides {size}",
            )
        return tuple(block * unit for block in blocks)

    def _given(self, module: nn.Linear) -> Sequence[int] | None:
        """Return the blocks of the plan, if it has some."""
        if not callable(self.blocks):
            return self.blocks
        blocks = self.blocks(module)
        if not are_blocks(blocks):
            raise StyleFault(
                "BadBlocks",
                f"{self.label} gives {blocks!r} for this Linear, not a list of positive integers",
                "return the sizes of its blocks",
            )
        return blocks


@dataclass(frozen=True)
class PackedColwiseParallel(_Packed, ColwiseParallel):
    """Colwise for a Linear that fuses several outputs, such as gate and up, or q, k and v.

    Args:
        blocks: Sizes of the fused outputs in proportion, e.g. `[1, 1]` for equal halves. Their sum must
            divide the output features. Where they follow the config, a function of the Linear that returns
            them. Left out, the absolute sizes are read from the Linear's `_tp_packed_col_blocks`.
    """


@dataclass(frozen=True)
class PackedRowwiseParallel(_Packed, RowwiseParallel):
    """Rowwise for a Linear whose input is a concatenation of sharded tensors, such as attention and MLP.

    Args:
        blocks: Sizes of the concatenated inputs in proportion, e.g. `[1, 3]`. Their sum must divide the
            input features. Where they follow the config, a function of the Linear that returns them. Left out,
            the absolute sizes are read from the Linear's `_tp_packed_row_blocks`.
    """


_PACKED_NAMES = {0: "PackedColwiseParallel", 1: "PackedRowwiseParallel"}


def _borders(blocks: tuple[int, ...]) -> set[int]:
    """Return the offsets at which a block ends."""
    return {sum(blocks[: i + 1]) for i in range(len(blocks))}
