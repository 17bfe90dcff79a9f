"""The styles that cut tensors along a dim: what a module is given or returns, or a parameter that it holds itself.

They may be written for any module. Which slice is a rank's own follows from the size of the dim, as everywhere, by
`Shard.spans`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar

from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.plan.layout import Activation, Layout, Replicated, Shard, divisors
from shardwise.plan.style import Style, StyleFault

Dim = int | Callable[[nn.Module], int]
"""A dim that is cut, negative ones from the end, or a named function of the module that returns it."""


@dataclass(frozen=True)
class _Slice(Style):
    """What both styles share that cut values, and no parameter."""

    dim: Dim

    def __post_init__(self) -> None:
        if type(self.dim) is not int and not callable(self.dim):
            name = type(self).__name__
            raise ConfigError(f"{name}: dim must be an integer or a function of the module, got {self.dim!r}")

    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        """Cut no parameter."""
        return {}

    def cut(self, module: nn.Module, shape: tuple[int, ...]) -> Shard:
        """Return how a tensor of this shape is cut.

        Raises:
            StyleFault: it has no such dim.
        """
        dim = self.dim(module) if callable(self.dim) else self.dim
        if not -len(shape) <= dim < len(shape):
            raise StyleFault(
                "NoSuchDim",
                f"a tensor of shape {list(shape)} has no dim {dim}",
                "name a dim of every tensor that is cut",
            )
        dim %= len(shape)
        return self.shard(dim, (shape[dim],))

    def each(self, value: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Return a value with each tensor in it changed.

        Raises:
            StyleFault: it holds something else.
        """
        if isinstance(value, Tensor):
            return change(value)
        if type(value) in (list, tuple):
            return type(value)(self.each(item, change) for item in value)
        if type(value) is dict:
            return {key: self.each(item, change) for key, item in value.items()}
        raise StyleFault(
            "NotATensor",
            f"a {type(value).__name__} is not a tensor, and no dict, list or tuple of them",
            "take the entry out, or name what holds only tensors",
        )


@dataclass(frozen=True)
class SliceOutput(_Slice):
    """Cut what a module returns: each rank goes on with its own slice of a tensor that it computed whole.

    For a rotary table that is laid over all heads, as LTX has. The module itself stays as it is.

    Args:
        dim: The dim that is cut, in each tensor of the output; negative counts from the end. Or a named function of
            the module that returns it, where the layout follows the configuration.
    """

    leaves_shard: ClassVar[bool] = True

    def leaves(self, module: nn.Module, shape: tuple[int, ...]) -> Layout:
        """Leave the style's dim sharded.

        Raises:
            StyleFault: the output has no such dim.
        """
        return self.cut(module, shape)

    @property
    def label(self) -> str:
        """The constructor call."""
        return f"SliceOutput({getattr(self.dim, '__name__', self.dim)})"


@dataclass(frozen=True, init=False)
class SliceInput(_Slice):
    """Cut what a module is given: each rank goes on with its own slice of tensors that its caller has whole.

    For what comes with the inputs of a model and is laid over heads: a cache of keys and values, a rotary table.
    What the module writes into its slice is written into the caller's tensor. The module itself stays as it is.

    Args:
        names: Arguments of the module's forward: tensors, or dicts, lists and tuples of them. None is left alone.
        dim: The dim that is cut, as that of `SliceOutput`.
    """

    opaque: ClassVar[bool] = False
    slices_input: ClassVar[bool] = True
    names: tuple[str, ...]

    def __init__(self, *names: str, dim: Dim) -> None:
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "dim", dim)
        self.__post_init__()

    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        """Cut no parameter, but refuse a name that is not an argument of the module's forward."""
        known = list(signature(module.forward).parameters)
        for name in self.names:
            if name not in known:
                raise StyleFault(
                    "NoSuchArgument",
                    f"the forward of {type(module).__name__} has no argument {name!r}",
                    f"its arguments are: {', '.join(known)}",
                )
        return {}

    def each_argument(
        self, module: nn.Module, args: Any, kwargs: Any, change: Callable[[Tensor], Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call of `module` with each tensor that the style names changed.

        Raises:
            StyleFault: an argument that the style names is something else.
        """

        def changed(name: str, value: Any) -> Any:
            return value if value is None or name not in self.names else self.each(value, change)

        order = [*signature(module.forward).parameters, *[""] * len(args)]
        return (
            tuple(changed(name, value) for name, value in zip(order, args, strict=False)),
            {name: changed(name, value) for name, value in kwargs.items()},
        )

    @property
    def label(self) -> str:
        """The constructor call."""
        dim = getattr(self.dim, "__name__", self.dim)
        return f"SliceInput({', '.join(map(repr, self.names))}, dim={dim})"


@dataclass(frozen=True)
class SliceParameter(Style):
    """Cut a parameter that a module holds itself, such as one number or one table per head.

    The module's code is watched like any other: what it makes of the parameter is a slice too.

    Args:
        name: The parameter's name in the module.
        dim: The dim that is cut; negative counts from the end.
    """

    opaque: ClassVar[bool] = False
    name: str
    dim: int

    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        """Cut the one parameter.

        Raises:
            StyleFault: the module has no such parameter, or the parameter no such dim.
        """
        parameter = module._parameters.get(self.name)
        if parameter is None or not -parameter.ndim <= self.dim < parameter.ndim:
            held = ", ".join(f"{n} {list(p.shape)}" for n, p in module.named_parameters(recurse=False))
            raise StyleFault(
                "NoSuchParameter",
                f"{type(module).__name__} has no parameter {self.name!r} of its own with a dim {self.dim}",
                f"its parameters are: {held or 'none'}",
            )
        dim = self.dim % parameter.ndim
        return {self.name: self.shard(dim, (parameter.shape[dim],))}

    def faults(self, module: nn.Module, degree: int) -> Iterator[StyleFault]:
        """Yield a fault if `degree` does not divide the dim."""
        (layout,), size = self.layouts(module).values(), module.get_parameter(self.name).shape[self.dim]
        if isinstance(layout, Shard) and layout.indivisible(degree):
            yield StyleFault(
                "IndivisibleParameter",
                f"{self.name} has {size} entries along dim {self.dim}; {size} is not divisible by tp_degree {degree}",
                f"use a degree that divides it: {', '.join(map(str, divisors(size)))}",
            )

    @property
    def label(self) -> str:
        """The constructor call."""
        return f"SliceParameter({self.name!r}, {self.dim})"


@dataclass(frozen=True)
class GatherOutput(Style):
    """Put together the slices that a module returns, so that what follows sees whole tensors.

    Found for attentions with an adapter that adds to their output; a plan need not name it.

    Args:
        width: Full size of the last dim of what is cut. Other tensors stay as they are.
    """

    opaque: ClassVar[bool] = False
    gathers: ClassVar[bool] = True
    width: int

    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        """Cut no parameter."""
        return {}

    def takes(self, ndim: int) -> tuple[Activation, ...]:
        """Take what is cut along its last dim, and what is whole."""
        return Replicated(), self.shard(ndim - 1, (self.width,))
