"""The sharding styles: each class says everything that one style means.

A style states which modules it takes, how their parameters are cut, which integer attributes become local,
and which runtime class does the work. The loader, the runtime and the reports ask the style; nobody else
branches on what kind a style is. Adding a style is adding a class here (or in `plan.linears`, `plan.slices`,
`plan.vocabulary`, `plan.experts`) and its runtime half in `runtime.modules.LOCAL_CLASSES`.

Uses `torch.nn` to recognise modules, and nothing of a process group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from shardwise.errors import ConfigError
from shardwise.plan.experts import SliceExperts, SumOnce
from shardwise.plan.layout import Layout, Replicated, Shard, divisors
from shardwise.plan.linears import (
    ColwiseParallel,
    DepthwiseParallel,
    LinearStyle,
    PackedColwiseParallel,
    PackedDepthwiseParallel,
    PackedRowwiseParallel,
    RowwiseParallel,
    RowwiseSplitInputParallel,
)
from shardwise.plan.slices import GatherOutput, SliceInput, SliceOutput, SliceParameter
from shardwise.plan.style import Style, StyleFault, indivisible_heads, is_count
from shardwise.plan.vocabulary import ColwiseGatherOutputParallel, EmbeddingRowwiseParallel

__all__ = [
    "STYLES",
    "AcrossHeadNorm",
    "ColwiseGatherOutputParallel",
    "ColwiseParallel",
    "DepthwiseParallel",
    "DivideAttributes",
    "EmbeddingRowwiseParallel",
    "GatherOutput",
    "IfPresent",
    "LinearStyle",
    "PackedColwiseParallel",
    "PackedDepthwiseParallel",
    "PackedRowwiseParallel",
    "PerHead",
    "RowwiseParallel",
    "RowwiseSplitInputParallel",
    "SliceExperts",
    "SliceInput",
    "SliceOutput",
    "SliceParameter",
    "Style",
    "StyleFault",
    "SumOnce",
    "as_style",
    "indivisible_heads",
    "is_count",
]


QUERIES_PER_KEY = ("num_key_value_groups", "num_queries_per_kv", "n_rep", "kv_groups")
"""Attribute names under which attentions keep how many query heads read one key and value head."""

CONFIG_PREFIX = "config."
"""What stands before the name of an entry of a model's configuration, where attributes are named."""

_OF_KEYS = re.compile(r"(?:^|_)(?:kv|key_value)(?:_|$)")


@dataclass(frozen=True, init=False)
class DivideAttributes(Style):
    """Divide integer attributes of a module, such as the head count that an attention reshapes by.

    Head counts of an attention whose projections are sharded are found and divided without an entry; an
    entry replaces what would be found. `DivideAttributes()` says that nothing is to be divided there.

    Args:
        names: Attributes set on the module itself. One that is None in some blocks is left alone there. Of a model,
            `"config.x"` is entry `x` of its configuration, for models that count heads by it in their forward.
    """

    opaque: ClassVar[bool] = False
    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)

    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        """Cut no parameter, but refuse a name that is not an integer attribute of the module."""
        for name in self.names:
            value = _held(module).get(name, ...)
            if value is not None and not is_count(value):
                counts = ", ".join(n for n, v in vars(module).items() if is_count(v)) or "none"
                raise StyleFault(
                    "NoSuchAttribute",
                    f"{type(module).__name__} has no integer attribute {name!r} of its own",
                    f"its integer attributes are: {counts}",
                )
        return {}

    def attributes(self, module: nn.Module, degree: int) -> dict[str, Shard]:
        """Return the names that hold a number on this module, and how each is divided."""
        own = _held(module)
        return {
            name: Shard(0, (own[name],), self._copies(name, degree), self.units)
            for name in self.names
            if own.get(name) is not None
        }

    def faults(self, module: nn.Module, degree: int) -> Iterator[StyleFault]:
        """Yield one fault for each attribute that its number of pieces does not divide."""
        for name, cut in self.attributes(module, degree).items():
            if cut.indivisible(degree):
                yield indivisible_heads(name, cut.size, degree)

    def _copies(self, name: str, degree: int) -> int:
        """Return on how many ranks each part of an attribute is: one, but for what counts key and value heads."""
        if self.copies == 1:
            return 1
        if name in QUERIES_PER_KEY:
            return degree // self.copies  # divided by the number of copies
        return self.copies if _OF_KEYS.search(name) else 1

    @property
    def label(self) -> str:
        """The constructor call."""
        return f"DivideAttributes({', '.join(map(repr, self.names))})"


def _held(module: nn.Module) -> dict[str, Any]:
    """Return what a module holds under a name: its own attributes, and the entries of its configuration."""
    config = getattr(module, "config", None)
    entries = config.items() if isinstance(config, Mapping) else ()
    return {**vars(module), **{f"{CONFIG_PREFIX}{key}": value for key, value in entries}}


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


@dataclass(frozen=True)
class AcrossHeadNorm(Style):
    """Shard a norm that looks at all heads together, as Wan and LTX have on queries and keys.

    `weight` and `bias` are cut along dim 0; its statistic is summed over the ranks. Takes `torch.nn.RMSNorm`,
    `torch.nn.LayerNorm` and diffusers' `RMSNorm` over one dim. Needs an input whose last dim is sharded, as a
    colwise Linear leaves it, and leaves its output so.
    """

    plan_name: ClassVar[str] = "across_head_norm"
    leaves_shard: ClassVar[bool] = True

    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        """Cut every parameter: a weight, and perhaps a bias, of one number per feature; there may be none."""
        return {name: self.shard_of(module) for name, _ in module.named_parameters(recurse=False)}

    def shard_of(self, module: nn.Module) -> Shard:
        """Return how the features are cut.

        Raises:
            StyleFault: the module is not an RMSNorm of a known formula over one dim.
        """
        return self.shard(0, (self._width(module),))

    def sums(self, module: nn.Module) -> int:
        """Sum the statistic: the mean of squares, and before it the mean of a LayerNorm."""
        return 2 if isinstance(module, nn.LayerNorm) else 1

    def needs(self, module: nn.Module, ndim: int) -> Layout:
        """Ask for an input whose last dim is sharded."""
        return self.shard_of(module).at(ndim - 1)

    def leaves(self, module: nn.Module, shape: tuple[int, ...]) -> Layout:
        """Leave the last dim sharded."""
        return self.shard_of(module).at(len(shape) - 1)

    def faults(self, module: nn.Module, degree: int) -> Iterator[StyleFault]:
        """Yield a fault if the features cannot be cut for `degree` ranks."""
        width = self._width(module)
        if self.shard_of(module).indivisible(degree):
            yield StyleFault(
                "IndivisibleNorm",
                f"the norm is over {width} features; {width} is not divisible by tp_degree {degree}",
                f"use a degree that divides it: {', '.join(map(str, divisors(width)))}",
            )

    @property
    def label(self) -> str:
        """The plain name of the style."""
        return f'"{self.plan_name}"'

    def _width(self, module: nn.Module) -> int:
        """Return how many features the norm is over.

        Raises:
            StyleFault: the module is not an RMSNorm of a known formula over one dim.
        """
        shape: tuple[int, ...] = ()
        if type(module).forward in (nn.RMSNorm.forward, nn.LayerNorm.forward):
            assert isinstance(module, (nn.RMSNorm, nn.LayerNorm))
            shape = tuple(module.normalized_shape)
        elif f"{type(module).__module__}.{type(module).__qualname__}" == _DIFFUSERS_NORM:
            shape = tuple(getattr(module, "dim", ()))
        if len(shape) != 1:
            over = f" over {len(shape)} dims" if shape else ""
            raise StyleFault(
                "NotAKnownNorm",
                f"the style {self.label} shards an RMSNorm of torch or diffusers, or a LayerNorm, over one dim, "
                f"this module is a {type(module).__name__}{over}",
                "leave the module out of the plan, and what comes before it whole",
            )
        return shape[0]


_DIFFUSERS_NORM = "diffusers.models.normalization.RMSNorm"  # known by name: diffusers is not imported here


@dataclass(frozen=True)
class IfPresent:
    """A style for modules that only some configurations of a model have.

    A plan key that matches nothing is an error, unless its value is wrapped in this: `IfPresent("colwise")`.
    Every other check stays.

    Args:
        style: What a plan may write without the wrapper.
    """

    style: object


STYLES: dict[str, Style] = {
    style.plan_name: style
    for style in (
        ColwiseParallel(),
        RowwiseParallel(),
        RowwiseSplitInputParallel(),
        DepthwiseParallel(),
        AcrossHeadNorm(),
        EmbeddingRowwiseParallel(),
        ColwiseGatherOutputParallel(),
    )
}
"""The styles that a plan may name by a string."""


def as_style(value: object) -> Style:
    """Return the style that a plan's value means: a `Style`, a name, a packed marker of diffusers, or one `IfPresent`.

    Raises:
        StyleFault: `value` is none of these.
    """
    if isinstance(value, IfPresent):
        return as_style(value.style)
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
        "PackedDepthwiseParallel, DivideAttributes, SliceInput, SliceOutput, SliceParameter, SumOnce, IfPresent",
    )
