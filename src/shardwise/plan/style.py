"""What every sharding style is: the questions that a module's plan entry answers, and the fault it may raise.

The styles themselves are in `plan.linears` and `plan.styles`. No process group, and no torch beyond the type
of a module.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeGuard

from torch import nn

from shardwise.plan.layout import Activation, Layout, Replicated, Shard, divisors


class StyleFault(Exception):
    """A style met a module it cannot shard; `resolve` adds the place and turns it into a finding."""

    def __init__(self, kind: str, message: str, fix: str) -> None:
        super().__init__(message)
        self.kind, self.message, self.fix = kind, message, fix


@dataclass(frozen=True)
class Style:
    """How one module is shared between the ranks.

    Attributes:
        copies: How many neighbouring ranks hold each piece. More than one only for key and value heads that are
            fewer than the ranks; found when a plan is resolved, never written in it.
        units: Number of heads, or of pieces of a feed-forward, that the ranks share unevenly, or 0; found as well,
            if the user allows it.
        inside: Whether a module around this one sums once for all that is inside (`SumOnce`): then partial sums are
            left to it, and so are those of gradients.
    """

    copies: int = field(default=1, init=False, repr=False)
    units: int = field(default=0, init=False, repr=False)
    inside: bool = field(default=False, init=False, repr=False)

    leaves_shard: ClassVar[bool] = False
    """Whether the module's output is a slice on each rank, so that what follows sees fewer features."""
    sums_gradients: ClassVar[bool] = False
    """Whether the module's whole parameters meet a slice, so that each rank knows a part of their gradient."""

    gathers: ClassVar[bool] = False
    """Whether slices or partial sums that the module's code returns are whole behind it."""

    works_inside: ClassVar[bool] = False
    """Whether the module can stand inside of one that sums once."""

    may_stay_whole: ClassVar[bool] = False
    """Whether the module is left whole where the degree does not divide it: nothing else depends on its cut."""

    slices_input: ClassVar[bool] = False
    """Whether the module's code sees slices of tensors that its caller has whole."""

    opaque: ClassVar[bool] = True
    """Whether the checker takes the style's word for what the module does, and does not look inside."""

    def needs(self, module: nn.Module, ndim: int) -> Layout | None:
        """Return the layout that the first input of `ndim` dims must have; None takes any."""
        return None

    def leaves(self, module: nn.Module, shape: tuple[int, ...]) -> Activation:
        """Return the layout of an output of the whole `shape`."""
        return Replicated()

    def takes(self, ndim: int) -> tuple[Activation, ...]:
        """Return the layouts of `ndim` dims that the module's code may return, if the style makes them whole."""
        return ()

    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        """Return the layout of each own parameter of `module`, by its name in the module.

        Raises:
            StyleFault: the style cannot be applied to this module.
        """
        raise NotImplementedError

    def sums(self, module: nn.Module) -> int:
        """Return how many sums over the ranks one call of the module makes."""
        return 0

    def attributes(self, module: nn.Module, degree: int) -> dict[str, Shard]:
        """Return the integer attributes of `module` that are divided, each as a dim of that size and its cut."""
        return {}

    def shard(self, dim: int, blocks: tuple[int, ...]) -> Shard:
        """Return the cut of a dim that the style makes."""
        return Shard(dim, blocks, self.copies, self.units)

    def shared_by(self, copies: int) -> Style:
        """Return the style where each key and value head is held by `copies` neighbouring ranks."""
        return self._with("copies", copies)

    def shared_in(self, units: int) -> Style:
        """Return the style where each rank holds some of so many units of each block, not all ranks as many."""
        return self._with("units", units)

    def put_inside(self) -> Style:
        """Return the style of a module inside of one that sums once.

        Raises:
            StyleFault: it cannot stand there.
        """
        if not self.works_inside:
            raise StyleFault(
                "NotInside",
                f"{self.label} cannot stand inside of SumOnce",
                'write "colwise", "rowwise", their packed forms or SliceExperts there, and leave the rest whole',
            )
        return self._with("inside", True)

    def _with(self, name: str, value: object) -> Style:
        changed = copy.copy(self)
        object.__setattr__(changed, name, value)
        return changed

    def faults(self, module: nn.Module, degree: int) -> Iterator[StyleFault]:
        """Yield what keeps `degree` ranks from sharing `module` evenly."""
        yield from ()

    @property
    def plan(self) -> Mapping[str, object]:
        """What the style plans inside of its module: patterns relative to it, and styles."""
        return {}

    @property
    def label(self) -> str:
        """The style as a plan would spell it."""
        return repr(self)


def is_count(value: object) -> TypeGuard[int]:
    """Return whether `value` is a positive integer, and not a flag."""
    return type(value) is int and value > 0


def indivisible_heads(name: str, count: int, degree: int) -> StyleFault:
    """Return the fault that says which degrees a head count allows."""
    return StyleFault(
        "IndivisibleHeads",
        f"{name} is {count}; {count} is not divisible by tp_degree {degree}",
        f"use a degree that divides it: {', '.join(map(str, divisors(count)))}"
        + (", or TensorParallelConfig(uneven=True)" if count > degree else ""),
    )


def are_blocks(value: object) -> TypeGuard[Sequence[int]]:
    """Return whether `value` is a list of block sizes."""
    return isinstance(value, (list, tuple)) and bool(value) and all(is_count(block) for block in value)
