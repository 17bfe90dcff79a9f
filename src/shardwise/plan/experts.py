"""The styles of a mixture of experts: one sum for all of them, and experts that are kept in one parameter.

Many experts read each token's features and what they give is added up, each scaled by the router. All of that is
linear in what their last layers leave, so the terms of the ranks are summed once, behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from shardwise.errors import ConfigError
from shardwise.plan.layout import Activation, Layout, Partial, Shard, divisors
from shardwise.plan.style import Style, StyleFault, are_blocks


@dataclass(frozen=True, init=False)
class SumOnce(Style):
    """Sum what the rowwise layers inside of a module leave once, where the module returns.

    For a mixture of experts, which would otherwise sum over the ranks for each expert. What the module does with
    the outputs of those layers must be linear in them: scaling, adding, sorting back. The check sees whether it is.

    Args:
        plan: What is inside: module patterns relative to the module, and styles. Colwise and rowwise layers (without
            a bias, which would be added on each rank) and `SliceExperts` may be there.
    """

    opaque: ClassVar[bool] = False
    gathers: ClassVar[bool] = True
    entries: tuple[tuple[str, object], ...]

    def __init__(self, plan: Mapping[str, object]) -> None:
        if not isinstance(plan, Mapping) or not plan:
            raise ConfigError(f"SumOnce: a plan of what is inside is needed, got {plan!r}")
        object.__setattr__(self, "entries", tuple(plan.items()))

    @property
    def plan(self) -> Mapping[str, object]:
        """What is inside: patterns relative to the module, and styles."""
        return dict(self.entries)

    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        """Cut no parameter: the styles inside do."""
        return {}

    def sums(self, module: nn.Module) -> int:
        """Complete the partial sums."""
        return 1

    def takes(self, ndim: int) -> tuple[Activation, ...]:
        """Take partial sums."""
        return (Partial(),)

    @property
    def label(self) -> str:
        """The constructor call."""
        inside = ", ".join(f"{key!r}: {getattr(style, 'label', repr(style))}" for key, style in self.entries)
        return f"SumOnce({{{inside}}})"


@dataclass(frozen=True)
class SliceExperts(Style):
    """Cut experts that a module keeps side by side in two parameters, one matrix for each expert.

    Each rank holds a part of every expert: some columns of its first matrix, the rows of its second that read them.
    What the module returns is a partial sum, so it must stand inside of `SumOnce`.

    Args:
        up: Name of the first parameter (experts x in x hidden), which may fuse several outputs.
        down: Name of the second (experts x hidden x out).
        blocks: Sizes of the fused outputs of `up` in proportion, e.g. `[1, 1]` for gate and up.
    """

    opaque: ClassVar[bool] = False
    works_inside: ClassVar[bool] = True
    up: str
    down: str
    blocks: Sequence[int] = (1,)

    def __post_init__(self) -> None:
        if not are_blocks(self.blocks):
            raise ConfigError(f"SliceExperts: blocks must be positive integers, got {self.blocks!r}")
        object.__setattr__(self, "blocks", tuple(self.blocks))

    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        """Cut the columns of every first matrix, and the rows of every second.

        Raises:
            StyleFault: the module has no such parameters, or they do not fit each other.
        """
        up, down = (module._parameters.get(name) for name in (self.up, self.down))
        if up is None or down is None or up.ndim != 3 or down.ndim != 3:
            held = ", ".join(f"{n} {list(p.shape)}" for n, p in module.named_parameters(recurse=False))
            raise StyleFault(
                "NoSuchParameter",
                f"{type(module).__name__} has no parameters {self.up!r} and {self.down!r} of three dims",
                f"its parameters are: {held or 'none'}",
            )
        unit, rest = divmod(up.shape[2], sum(self.blocks))
        if rest:
            raise StyleFault(
                "BadBlocks",
                f"blocks {list(self.blocks)} sum to {sum(self.blocks)}, which does not divide the {up.shape[2]} "
                f"columns of {self.up}",
                f"give blocks whose sum divides {up.shape[2]}",
            )
        columns = tuple(block * unit for block in self.blocks)
        return {self.up: Shard(2, columns), self.down: Shard(1, (down.shape[1],))}

    def faults(self, module: nn.Module, degree: int) -> Iterator[StyleFault]:
        """Yield a fault for each block that `degree` does not divide, and one if nothing sums behind the module."""
        if not self.inside:
            yield StyleFault(
                "NothingSums",
                f"{self.label} leaves a partial sum, and nothing completes it",
                "write it into the plan of a SumOnce({...}) on a module around this one",
            )
        for name, layout in self.layouts(module).items():
            assert isinstance(layout, Shard)
            for i in layout.indivisible(degree):
                size = layout.blocks[i]
                yield StyleFault(
                    "IndivisibleBlock",
                    f"block {i + 1} of {len(layout.blocks)} of {name} is {size} wide; {size} is not divisible by "
                    f"tp_degree {degree}",
                    f"use a degree that divides it: {', '.join(map(str, divisors(size)))}",
                )

    @property
    def label(self) -> str:
        """The constructor call."""
        arguments: list[Any] = [self.up, self.down, *([list(self.blocks)] if self.blocks != (1,) else [])]
        return f"SliceExperts({', '.join(map(repr, arguments))})"
