"""How layouts pass through torch functions: one small rule per function.

A rule is a claim that its function commutes with cutting: applied to one rank's pieces it gives that rank's
piece of the result. It answers the layout of the outputs, or raises `Mismatch` with what would repair it. A
function without a rule is never guessed: the checker reports it where a shard reaches it. Functions whose
inputs are all whole need no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeVar

from torch import Tensor

from shardwise.plan.layout import Activation, Replicated
from shardwise.plan.repair import Repair

WHOLE = Replicated()


class Mismatch(Exception):
    """A function does not commute with the way its inputs are cut."""

    def __init__(self, message: str, fix: str = "", repair: Repair | None = None) -> None:
        super().__init__(message)
        self.message, self.fix, self.repair = message, fix, repair


@dataclass
class Call:
    """One call of a torch function, as a rule sees it: at least one tensor among its arguments is not whole.

    Attributes:
        name: Last part of the function's name: `"add"`, `"__getitem__"`, `"scaled_dot_product_attention"`.
        args, kwargs, output: Of the call, with whole (global) shapes.
        degree: Number of ranks.
        layouts: Layout of each tensor argument by its id; tensors that are not listed are whole.
        producers: Paths of the modules behind each tensor argument, by its id.
        repeats: For whole tensors, by id: how many trailing index steps of each dim do not change the value.
        nothing: Ids of the whole tensors that are known to be zeros, or to have no elements.
        rank: The one whose indices are asked for.
        shares: Which parts of uneven cuts that rank holds.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    degree: int
    layouts: dict[int, Activation] = field(default_factory=dict)
    producers: dict[int, tuple[str, ...]] = field(default_factory=dict)
    repeats: dict[int, tuple[int, ...]] = field(default_factory=dict)
    nothing: set[int] = field(default_factory=set)
    rank: int = 0
    shares: Collection[Fraction] = ()

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument that may be given by position or by name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def layout(self, tensor: Any) -> Activation:
        """Return the layout of a tensor argument."""
        return self.layouts.get(id(tensor), WHOLE)

    def source(self, tensor: Any) -> str:
        """Return who made a tensor, for messages."""
        return ", ".join(self.producers.get(id(tensor), ())[:4]) or "an input"

    def made_by(self, tensor: Any) -> tuple[str, ...]:
        """Return the modules behind a tensor, for repairs."""
        return self.producers.get(id(tensor), ())

    def repeated(self, tensor: Tensor) -> tuple[int, ...]:
        """Return how often each dim of a whole tensor repeats its values, innermost first; 1 where it does not."""
        return self.repeats.get(id(tensor), (1,) * tensor.ndim)

    def is_nothing(self, tensor: Tensor) -> bool:
        """Return whether a whole tensor is known to be zeros, which are a partial sum as well."""
        return id(tensor) in self.nothing

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments, those in lists and tuples included."""
        return list(tensors_in((self.args, self.kwargs)))


Result = Activation | Sequence[Activation]
"""One layout for all outputs of a call, or one for each."""

Rule = Callable[[Call], Result]
RULES: dict[str, Rule] = {}
"""Function name -> rule. Filled by the modules of this package."""

_R = TypeVar("_R", bound=Rule)


def rule(*names: str) -> Callable[[_R], _R]:
    """Register a function as the rule of the torch functions of these names."""

    def register(function: _R) -> _R:
        for name in names:
            assert name not in RULES, name
            RULES[name] = function
        return function

    return register


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, dicts and slices."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, slice):
        yield from tensors_in([value.start, value.stop, value.step])


from shardwise.plan.rules import contract, elementwise, index, reduce, scatter, shape  # noqa: E402, F401  # fill RULES
