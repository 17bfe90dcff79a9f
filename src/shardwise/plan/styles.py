"""The sharding styles: each class says everything that one style means.

A style states which modules it takes, how their parameters are cut, which integer attributes become local,
and which runtime class does the work. The loader, the runtime and the reports ask the style; nobody else
branches on what kind a style is. Adding a style is adding a class here and its runtime half in
`runtime.modules.LOCAL_CLASSES`.

Uses `torch.nn` to recognise modules, and nothing of a process group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeGuard

from torch import nn

from shardwise.errors import ConfigError
from shardwise.plan.layout import Layout, Replicated, Shard, divisors


class StyleFault(Exception):
    """A style met a module it cannot shard; `resolve` adds the place and turns it into a finding."""

    def __init__(self, kind: str, message: str, fix: str) -> None:
        super().__init__(message)
        self.kind, self.message, self.fix = kind, message, fix


@dataclass(frozen=True)
class Style:
    """How one module is shared between the ranks."""

    leaves_shard: ClassVar[bool] = False
    """Whether the module's output is a slice on each rank, so that what follows sees fewer features."""
    sums_gradients: ClassVar[bool] = False
    """Whether the module's whole parameters meet a slice, so that each rank knows a part of their gradient."""

    opaque: ClassVar[bool] = True
    """Whether the checker takes the style's word for what the module does, and does not look inside."""

    def needs(self, module: nn.Module, ndim: int) -> Layout | None:
        """Return the layout that the first input of `ndim` dims must have; None takes any."""
        return None

    def leaves(self, module: nn.Module, shape: tuple[int, ...]) -> Layout:
        """Return the layout of an output of the whole `shape`."""
        return Replicated()

    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        """Return the layout of each own parameter of `module`, by its name in the module.

        Raises:
            StyleFault: the style cannot be applied to this module.
        """
        raise NotImplementedError

    def attributes(self, module: nn.Module) -> tuple[str, ...]:
        """Return the integer attributes of `module` that are divided by the degree."""
        return ()

    def faults(self, module: nn.Module, degree: int) -> Iterator[StyleFault]:
        """Yield what keeps `degree` ranks from sharing `module` evenly."""
        yield from ()

    @property
    def label(self) -> str:
        """The style as a plan would spell it."""
        return repr(self)


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

    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        """Cut `weight` along the style's dim; the bias follows it only where the output is cut."""
        self._check_target(module)
        assert isinstance(module, nn.Linear)  # checked above
        size = module.weight.shape[self.dim]
        shard = Shard(self.dim, self._blocks(module, size))
        self._check_declared(module, shard)
        layouts: dict[str, Layout] = {"weight": shard}
        if module.bias is not None:
            layouts["bias"] = Shard(0, shard.blocks) if self.dim == 0 else Replicated()
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

    def blocks_of(self, module: nn.Module) -> tuple[int, ...]:
        """Return the sizes of the blocks in which the weight is cut."""
        shard = self.layouts(module)["weight"]
        assert isinstance(shard, Shard)
        return shard.blocks

    def attributes(self, module: nn.Module) -> tuple[str, ...]:
        """Return the Linear's own size attribute."""
        return (self.size_attribute,)

    def faults(self, module: nn.Module, degree: int) -> Iterator[StyleFault]:
        """Yield one fault for each block that `degree` does not divide on its own."""
        shard = Shard(self.dim, self.blocks_of(module))
        good = [d for d in divisors(min(shard.blocks)) if not shard.indivisible(d)]
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
        if declared and not _are_blocks(declared):
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
        return Shard(len(shape) - 1, self.blocks_of(module))


@dataclass(frozen=True)
class RowwiseParallel(LinearStyle):
    """Shard the input features; each rank computes a partial sum, one all-reduce completes it.

    `weight` is cut along dim 1; `bias` stays whole and is added once, after the reduction. Needs an input
    sharded along its last dim, as a colwise Linear leaves it; leaves a whole output.
    """

    plan_name: ClassVar[str] = "rowwise"
    dim: ClassVar[int] = 1
    size_attribute: ClassVar[str] = "in_features"
    declared_attribute: ClassVar[str] = "_tp_packed_row_blocks"

    def needs(self, module: nn.Module, ndim: int) -> Layout:
        """Ask for an input whose last dim is sharded in the blocks of the weight."""
        return Shard(ndim - 1, self.blocks_of(module))


@dataclass(frozen=True)
class RowwiseSplitInputParallel(RowwiseParallel):
    """Shard the input features of a Linear whose input is whole: each rank takes its own slice of the input.

    For a lone projection, such as an AdaLN modulation that reads the timestep embedding. Needs a whole
    input, leaves a whole output.
    """

    plan_name: ClassVar[str] = "rowwise_split_input"

    def needs(self, module: nn.Module, ndim: int) -> Layout:
        """Ask for a whole input."""
        return Replicated()


@dataclass(frozen=True)
class _Packed(LinearStyle):
    """The part that both packed styles share: where the block sizes come from."""

    blocks: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.blocks is None:
            return
        if not _are_blocks(self.blocks):
            raise ConfigError(f"{type(self).__name__}: blocks must be positive integers, got {self.blocks!r}")
        object.__setattr__(self, "blocks", tuple(self.blocks))

    @property
    def label(self) -> str:
        """The constructor call, e.g. `PackedColwiseParallel([1, 1])`."""
        return f"{type(self).__name__}({list(self.blocks) if self.blocks else ''})"

    def _blocks(self, module: nn.Linear, size: int) -> tuple[int, ...]:
        blocks = self.blocks or self._declared(module)
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


@dataclass(frozen=True)
class PackedColwiseParallel(_Packed, ColwiseParallel):
    """Colwise for a Linear that fuses several outputs, such as gate and up, or q, k and v.

    Args:
        blocks: Sizes of the fused outputs in proportion, e.g. `[1, 1]` for equal halves. Their sum must
            divide the output features. Left out, the absolute sizes are read from the Linear's
            `_tp_packed_col_blocks`.
    """


@dataclass(frozen=True)
class PackedRowwiseParallel(_Packed, RowwiseParallel):
    """Rowwise for a Linear whose input is a concatenation of sharded tensors, such as attention and MLP.

    Args:
        blocks: Sizes of the concatenated inputs in proportion, e.g. `[1, 3]`. Their sum must divide the
            input features. Left out, the absolute sizes are read from the Linear's `_tp_packed_row_blocks`.
    """


@dataclass(frozen=True, init=False)
class DivideAttributes(Style):
    """Divide integer attributes of a module, such as the head count that an attention reshapes by.

    Head counts of an attention whose projections are sharded are found and divided without an entry; an
    entry replaces what would be found. `DivideAttributes()` says that nothing is to be divided there.

    Args:
        names: Attributes set on the module itself. One that is None in some blocks is left alone there.
    """

    opaque: ClassVar[bool] = False
    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)

    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        """Cut no parameter, but refuse a name that is not an integer attribute of the module."""
        for name in self.names:
            value = vars(module).get(name, ...)
            if value is not None and not is_count(value):
                counts = ", ".join(n for n, v in vars(module).items() if is_count(v)) or "none"
                raise StyleFault(
                    "NoSuchAttribute",
                    f"{type(module).__name__} has no integer attribute {name!r} of its own",
                    f"its integer attributes are: {counts}",
                )
        return {}

    def attributes(self, module: nn.Module) -> tuple[str, ...]:
        """Return the names that hold a number on this module."""
        return tuple(name for name in self.names if vars(module).get(name) is not None)

    def faults(self, module: nn.Module, degree: int) -> Iterator[StyleFault]:
        """Yield one fault for each attribute that `degree` does not divide."""
        for name in self.attributes(module):
            if getattr(module, name) % degree:
                yield indivisible_heads(name, getattr(module, name), degree)

    @property
    def label(self) -> str:
        """The constructor call."""
        return f"DivideAttributes({', '.join(map(repr, self.names))})"


@dataclass(frozen=True)
class PerHead(Style):
    """A module that each rank applies to its own heads: its parameters are whole, their gradients are summed.

    Found for the query and key norms of an attention whose heads are divided; a plan need not name it.
    """

    opaque: ClassVar[bool] = False
    sums_gradients: ClassVar[bool] = True

    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        """Leave every parameter whole."""
        return {name: Replicated() for name, _ in module.named_parameters(recurse=False)}


STYLES: dict[str, Style] = {
    style.plan_name: style for style in (ColwiseParallel(), RowwiseParallel(), RowwiseSplitInputParallel())
}
"""The styles that a plan may name by a string."""

_PACKED_NAMES = {0: "PackedColwiseParallel", 1: "PackedRowwiseParallel"}


def is_count(value: object) -> TypeGuard[int]:
    """Return whether `value` is a positive integer, and not a flag."""
    return type(value) is int and value > 0


def indivisible_heads(name: str, count: int, degree: int) -> StyleFault:
    """Return the fault that says which degrees a head count allows."""
    return StyleFault(
        "IndivisibleHeads",
        f"{name} is {count}; {count} is not divisible by tp_degree {degree}",
        f"use a degree that divides it: {', '.join(map(str, divisors(count)))}",
    )


def as_style(value: object) -> Style:
    """Return the style that a plan's value means: a `Style`, a name, or a packed marker of diffusers.

    Raises:
        StyleFault: `value` is none of these.
    """
    if isinstance(value, Style):
        return value
    if isinstance(value, str) and value in STYLES:
        return STYLES[value]
    for packed in (PackedColwiseParallel, PackedRowwiseParallel):
        # diffusers declares its own plans with markers of the same names; they mean the same.
        if type(value).__name__ == packed.__name__:
            try:
                return packed(getattr(value, "blocks", None))
            except ConfigError as error:
                raise StyleFault("BadBlocks", str(error), "give positive integers") from error
    raise StyleFault(
        "UnknownStyle",
        f"{value!r} is not a sharding style",
        f"use one of {', '.join(map(repr, STYLES))}, PackedColwiseParallel, PackedRowwiseParallel, "
        "DivideAttributes",
    )


def _are_blocks(value: object) -> TypeGuard[Sequence[int]]:
    return isinstance(value, (list, tuple)) and bool(value) and all(is_count(block) for block in value)


def _borders(blocks: tuple[int, ...]) -> set[int]:
    """Return the offsets at which a block ends."""
    return {sum(blocks[: i + 1]) for i in range(len(blocks))}
