"""The styles of `nn.Linear` and of convolutions: colwise, rowwise, and their forms for weights that fuse several parts.

A convolution is a Linear at each of its places: `weight` is out x in x kernel, and an activation has its features in
front of the dims that the kernel slides along (`feature_dim`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, ClassVar

from torch import nn
from torch.nn.modules.conv import _ConvNd

from shardwise.errors import ConfigError
from shardwise.plan.layout import Activation, Layout, Partial, Replicated, Shard, divisors
from shardwise.plan.style import Style, StyleFault, are_blocks

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""The classes of convolutions that the styles take."""


def sliding_dims(module: nn.Module) -> int:
    """Return how many dims of an activation come behind its features: those that a convolution slides along."""
    return len(module.kernel_size) if isinstance(module, _ConvNd) else 0


def feature_dim(module: nn.Module, ndim: int) -> int:
    """Return which dim of an activation of `ndim` dims holds the features that a Linear or a convolution reads."""
    return ndim - 1 - sliding_dims(module)


@dataclass(frozen=True)
class LinearStyle(Style):
    """A style of `nn.Linear` and of convolutions: what the ones below have in common.

    A subclass sets `dim`, the dim of `weight` (out x in) that is cut, and `sizes`, the module's own records of that
    size: of a Linear, or of a convolution.
    """

    plan_name: ClassVar[str]
    dim: ClassVar[int]
    sizes: ClassVar[tuple[str, ...]]
    packed_name: ClassVar[str]
    """What the style is called where the weight fuses several parts."""
    declared_attribute: ClassVar[str]
    """Attribute under which a model's `__init__` may store the absolute block sizes of a fused Linear."""
    works_inside: ClassVar[bool] = True

    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        """Cut `weight` along the style's dim; the bias follows it only where the output is cut."""
        self._check_target(module)
        assert isinstance(module, (nn.Linear, _ConvNd))  # checked above
        self._check_groups(module)
        size = module.weight.shape[self.dim]
        shard = self.shard(self.dim, self._blocks(module, size))
        self._check_declared(module, shard)
        layouts: dict[str, Layout] = {"weight": shard}
        if module.bias is not None:
            layouts["bias"] = shard if self.dim == 0 else Replicated()
        return layouts

    def _check_target(self, module: nn.Module) -> None:
        """Refuse what is not a plain Linear or convolution with a weight of its own."""
        kind = next((cls for cls in (nn.Linear, *CONVOLUTIONS) if isinstance(module, cls)), None)
        if kind is None or any(
            getattr(type(module), name, None) is not getattr(kind, name, None) for name in _COMPUTES
        ):
            own = " with a forward of its own" if kind else ""
            raise StyleFault(
                "NotALinear",
                f"the style {self.label} shards an nn.Linear or a convolution, "
                f"this module is a {type(module).__name__}{own}",
                "name the Linear inside it, or leave the module out of the plan",
            )
        if module._parameters.get("weight") is None:
            raise StyleFault(
                "NotPlainWeight",
                "the weight is computed from other parameters (a parametrization or weight norm)",
                "remove the parametrization first, or leave the module out of the plan",
            )

    def _check_groups(self, module: nn.Linear | _ConvNd) -> None:
        """Refuse a convolution whose outputs read some of its inputs only."""
        if isinstance(module, _ConvNd) and module.groups != 1:
            raise StyleFault(
                "GroupedConvolution",
                f"the style {self.label} shards a convolution that reads all of its channels, "
                f"this one has {module.groups} groups",
                f'use "{DepthwiseParallel.plan_name}" if each channel has a filter of its own, '
                "or leave the module out of the plan",
            )

    def shard_of(self, module: nn.Module) -> Shard:
        """Return how the weight is cut."""
        shard = self.layouts(module)["weight"]
        assert isinstance(shard, Shard)
        return shard

    def attributes(self, module: nn.Module, degree: int) -> dict[str, Shard]:
        """Return the module's own records of the size that is cut."""
        return {name: self.shard_of(module) for name in self.sizes if name in vars(module)}

    def faults(self, module: nn.Module, degree: int) -> Iterator[StyleFault]:
        """Yield one fault for each block that `degree` does not divide on its own."""
        shard = self.shard_of(module)
        for i in shard.indivisible(degree):
            good = divisors(gcd(*shard.blocks))
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

    def _blocks(self, module: nn.Linear | _ConvNd, size: int) -> tuple[int, ...]:
        return (size,)

    def _declared(self, module: nn.Linear | _ConvNd) -> tuple[int, ...]:
        """Return the block sizes that the model declares on the module; none is an empty tuple."""
        declared = getattr(module, self.declared_attribute, None) or ()
        if declared and not are_blocks(declared):
            raise StyleFault(
                "BadBlocks",
                f"{self.declared_attribute} is {declared!r}, not a list of positive integers",
                "set it to the absolute sizes in the model's __init__",
            )
        return tuple(declared)

    def _check_declared(self, module: nn.Linear | _ConvNd, shard: Shard) -> None:
        """Refuse a cut that ignores block borders which the model itself declares: it would run, and be wrong."""
        declared = self._declared(module)
        if sum(declared) != shard.size:
            return
        if not _borders(declared) <= _borders(shard.blocks):
            raise StyleFault(
                "PackedWeight",
                f"the module packs blocks of {list(declared)} ({self.declared_attribute}), "
                f"the plan cuts it in blocks of {list(shard.blocks)}",
                f"use {self.packed_name}() without blocks",
            )


@dataclass(frozen=True)
class ColwiseParallel(LinearStyle):
    """Shard the output features; each rank computes its slice of the output.

    `weight` and `bias` are cut along dim 0. Needs a whole input, leaves the features of the output sharded.
    """

    leaves_shard: ClassVar[bool] = True
    plan_name: ClassVar[str] = "colwise"
    dim: ClassVar[int] = 0
    sizes: ClassVar[tuple[str, ...]] = ("out_features", "out_channels")
    packed_name: ClassVar[str] = "PackedColwiseParallel"
    declared_attribute: ClassVar[str] = "_tp_packed_col_blocks"

    def needs(self, module: nn.Module, ndim: int) -> Layout:
        """Ask for a whole input."""
        return Replicated()

    def leaves(self, module: nn.Module, shape: tuple[int, ...]) -> Layout:
        """Leave the features sharded."""
        return self.shard_of(module).at(feature_dim(module, len(shape)))


@dataclass(frozen=True)
class RowwiseParallel(LinearStyle):
    """Shard the input features; each rank computes a partial sum, one all-reduce completes it.

    `weight` is cut along dim 1; `bias` stays whole and is added once, after the reduction. Needs an input
    whose features are sharded, as a colwise Linear leaves them; leaves a whole output. Inside of `SumOnce` it leaves
    the partial sum, and may have no bias.
    """

    plan_name: ClassVar[str] = "rowwise"
    dim: ClassVar[int] = 1
    sizes: ClassVar[tuple[str, ...]] = ("in_features", "in_channels")
    packed_name: ClassVar[str] = "PackedRowwiseParallel"
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
        """Ask for an input whose features are sharded in the blocks of the weight."""
        return self.shard_of(module).at(feature_dim(module, ndim))


@dataclass(frozen=True)
class RowwiseSplitInputParallel(RowwiseParallel):
    """Shard the input features of a layer whose input is whole: each rank takes its own slice of the input.

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
class DepthwiseParallel(ColwiseParallel):
    """Shard the channels of a convolution that filters each of them on its own; no communication.

    `weight` and `bias` are cut along dim 0, and so are the groups. Needs an input whose channels are sharded, as a
    colwise convolution leaves them, and leaves its output so.
    """

    plan_name: ClassVar[str] = "depthwise"
    sizes: ClassVar[tuple[str, ...]] = ("in_channels", "out_channels", "groups")
    packed_name: ClassVar[str] = "PackedDepthwiseParallel"

    def needs(self, module: nn.Module, ndim: int) -> Layout:
        """Ask for an input whose channels are sharded in the blocks of the weight."""
        return self.shard_of(module).at(feature_dim(module, ndim))

    def _check_groups(self, module: nn.Linear | _ConvNd) -> None:
        """Refuse a module that does not have one filter for each channel."""
        if isinstance(module, nn.Linear) or not module.in_channels == module.out_channels == module.groups:
            sizes = (
                ""
                if isinstance(module, nn.Linear)
                else (f" of {module.in_channels} to {module.out_channels} channels in {module.groups} groups")
            )
            raise StyleFault(
                "NotDepthwise",
                f"the style {self.label} shards a convolution with one filter for each channel, "
                f"this module is a {type(module).__name__}{sizes}",
                'use "colwise" or "rowwise" if it has one group, or leave the module out of the plan',
            )


@dataclass(frozen=True)
class _Packed(LinearStyle):
    """The part that the packed styles share: where the block sizes come from."""

    blocks: Sequence[int] | Callable[[Any], Sequence[int]] | None = None

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

    def _blocks(self, module: nn.Linear | _ConvNd, size: int) -> tuple[int, ...]:
        blocks = self._given(module) or self._declared(module)
        if not blocks:
            raise StyleFault(
                "NoBlocks",
                f"{self.label} has no blocks, and the module has no {self.declared_attribute}",
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

    def _given(self, module: nn.Linear | _ConvNd) -> Sequence[int] | None:
        """Return the blocks of the plan, if it has some."""
        if not callable(self.blocks):
            return self.blocks
        blocks = self.blocks(module)
        if not are_blocks(blocks):
            raise StyleFault(
                "BadBlocks",
                f"{self.label} gives {blocks!r} for this module, not a list of positive integers",
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


@dataclass(frozen=True)
class PackedDepthwiseParallel(_Packed, DepthwiseParallel):
    """Depthwise behind a convolution that fuses several outputs: each block of channels is cut on its own.

    Args:
        blocks: Sizes of the fused parts in proportion, those of the convolution that makes them, e.g. `[1, 1]`.
            Their sum must divide the channels. Or a function of the module that returns them.
    """


_COMPUTES = ("forward", "_conv_forward")  # what a class would lose that has its own


def _borders(blocks: tuple[int, ...]) -> set[int]:
    """Return the offsets at which a block ends."""
    return {sum(blocks[: i + 1]) for i in range(len(blocks))}
