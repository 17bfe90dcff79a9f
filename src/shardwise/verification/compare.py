"""One module in one process and on the ranks, side by side: the same call, module by module.

The whole module runs on its input. Each time one of its submodules has finished, the sharded counterpart is
called with the very input that the submodule had, and its output is compared. So a module's error is its own:
what went wrong before it, in the run, does not reach it.

Only modules that see whole tensors can be compared like this. Between a colwise and a rowwise layer the values
are slices; what lies there is judged by the smallest module around it. Which modules these are is not looked up
but seen: the sharded module runs first, and the shapes that its submodules take and give are those of the whole
one, or they are not. Inside of a module that sums once, shapes are those of the whole and values are terms of a sum:
it is judged as a whole.

All ranks do the same in the same order; the collectives of the sharded modules meet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shardwise.errors import PlanError, ShardwiseError
from shardwise.runtime.modules import terms_of_sums
from shardwise.verification.bound import relative_error, rounding_bound, tensors
from shardwise.verification.report import ModuleError
from shardwise.verification.rounding import unrounded

Shapes = tuple[tuple[int, ...], ...]
CallId = tuple[str, int]
"""A module's path, and which of its calls."""


@dataclass(frozen=True)
class Call:
    """The input of one call of a module, and the state of the random numbers that it may draw."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    random: Tensor = field(default_factory=torch.get_rng_state)

    def copy(self, change: Callable[[Tensor], Tensor] = torch.clone) -> Call:
        """Return the call with each tensor replaced by `change` of it, a copy by default."""
        args, kwargs = tree_map(
            lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, (self.args, dict(self.kwargs))
        )
        return replace(self, args=args, kwargs=kwargs)

    def widened(self, dtype: torch.dtype) -> Call:
        """Return the call in fp32, where it is in `dtype`; so are dtypes that it names."""

        def widen(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return leaf.float() if leaf.dtype == dtype else leaf
            return torch.float32 if leaf is dtype else leaf

        args, kwargs = tree_map(widen, (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)

    def of(self, module: nn.Module) -> Any:
        """Call `module` with a copy of the input, as a module may write into it, and the same random numbers."""
        call = self.copy()
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.random)
            return module(*call.args, **call.kwargs)

    @property
    def shapes(self) -> Shapes:
        """The shapes of the tensors in it."""
        return _shapes((self.args, dict(self.kwargs)))


@dataclass(frozen=True)
class Trio:
    """The same module three times: in one process, on the ranks, and in fp32 where those two are not."""

    path: str
    whole: nn.Module
    sharded: nn.Module
    exact: nn.Module | None
    dtype: torch.dtype
    degree: int


@dataclass
class _Seen:
    """The shapes a sharded module took, and those it gave; None if it raised."""

    inputs: Shapes
    outputs: Shapes | None = None


@torch.no_grad()
def compare(trio: Trio, call: Call) -> list[ModuleError]:
    """Return a row for every call of a module in `trio` that sees whole tensors, children first.

    What a model of fp32 rounds to half precision in its own code is left unrounded, everywhere alike.

    Raises:
        Exception: what the whole module raises; a sharded one that raises is a row with an infinite error.
    """
    with unrounded(trio.dtype):
        return _compare(trio, call)


def _compare(trio: Trio, call: Call) -> list[ModuleError]:
    seen, terms = _shapes_on_ranks(trio.sharded, call), set(terms_of_sums(trio.sharded))
    rows: list[ModuleError] = []

    def finished(name: str, module: nn.Module, turn: CallId, its: Call, output: Any) -> None:
        shapes = seen.get(turn)
        if (
            shapes
            and name not in terms
            and shapes.inputs == its.shapes
            and shapes.outputs in (None, _shapes(output))
            and tensors(output)
        ):
            rows.append(_row(trio, name, module, its, output))

    with watch(trio.whole, finished):
        call.of(trio.whole)
    return rows


def _row(trio: Trio, name: str, whole: nn.Module, call: Call, output: Any) -> ModuleError:
    """Return what one sharded module makes of a call that the whole one answered with `output`."""
    actual, note = _attempt(trio.sharded.get_submodule(name), call)
    alone, expected = None, output
    if trio.exact is not None:
        expected = call.widened(trio.dtype).of(trio.exact.get_submodule(name))
        alone, _ = relative_error(output, expected)
    error, difference = (inf, note) if note else relative_error(actual, expected)
    bound = rounding_bound(whole, trio.dtype, trio.degree, alone)
    path = ".".join(filter(None, (trio.path, name)))
    return ModuleError(path, type(whole).__name__, error, bound, alone, note=difference)


def _attempt(module: nn.Module, call: Call) -> tuple[Any, str]:
    """Return the module's output and "", or None and what it raised. The ranks raise alike: their shapes are."""
    try:
        return call.of(module), ""
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except ShardwiseError as error:
        if not isinstance(error, PlanError):
            raise
        return None, str(error)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _shapes_on_ranks(sharded: nn.Module, call: Call) -> dict[CallId, _Seen]:
    """Run the sharded module and return the shapes that each of its modules took and gave, as far as it got."""
    seen: dict[CallId, _Seen] = {}

    def started(turn: CallId, its: Call) -> None:
        seen[turn] = _Seen(its.shapes)

    def finished(name: str, module: nn.Module, turn: CallId, its: Call, output: Any) -> None:
        seen[turn].outputs = _shapes(output)

    with watch(sharded, finished, started):
        _attempt(sharded, call)
    return seen


@contextmanager
def watch(
    model: nn.Module,
    finished: Callable[[str, nn.Module, CallId, Call, Any], None],
    started: Callable[[CallId, Call], None] | None = None,
) -> Iterator[None]:
    """Tell of every call of a module inside the context: when it starts, and when it has an output."""
    turns: Counter[str] = Counter()
    running: list[tuple[CallId, Call]] = []

    def enter(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        turn, call = (name, turns[name]), Call(args, kwargs).copy()
        turns[name] += 1
        running.append((turn, call))
        if started is not None:
            started(turn, call)

    def leave(name: str, module: nn.Module, output: Any) -> None:
        turn, call = running.pop()
        finished(name, module, turn, call, output)

    handles = [
        handle for name, module in model.named_modules() for handle in _hook(name, module, enter, leave)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(name: str, module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> list[Any]:
    return [
        module.register_forward_pre_hook(lambda _, args, kwargs: enter(name, args, kwargs), with_kwargs=True),
        module.register_forward_hook(lambda module, _, output: leave(name, module, output)),
    ]


def _shapes(tree: object) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in tensors(tree))


def worst(runs: Sequence[Sequence[ModuleError]]) -> tuple[ModuleError, ...]:
    """Return one row for each module, in the order of the first rank: the worst of its calls on the worst rank."""
    found: dict[str, ModuleError] = {}
    for rank, rows in enumerate(runs):
        for row in rows:
            if row.path not in found or row.excess > found[row.path].excess:
                found[row.path] = replace(row, rank=rank)
    return tuple(found.values())
