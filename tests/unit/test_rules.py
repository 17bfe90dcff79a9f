"""Every layout rule is a claim that its function commutes with cutting; here each claim is tried on real tensors.

For each registered function there is a way to draw a call of it: random shapes, sharded dim, blocks, degree.
Where the rule passes, the function is applied to each rank's pieces and must give that rank's piece of the
result; terms of a partial sum must add up to the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from random import Random
from typing import Any
from unittest import mock
from zlib import crc32

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.plan.layout import Activation, Partial, Shard, slice_blocks, view_shard
from shardwise.plan.repair import (
    Align,
    EqualBlocks,
    KeepWhole,
    PlanRowwise,
    RefineBlocks,
    Repair,
    ShardToo,
    SplitView,
)
from shardwise.plan.rules import RULES, WHOLE, Call, Mismatch, Rule, contract, elementwise, shape, tensors_in
from shardwise.plan.rules.repeats import CONSTANTS, FACTORS, repeats, view_repeats

TRIALS = 30
PASSES = 5
"""How many of the draws of a name must reach its rule with a shard and pass."""

# ---------------------------------------------------------------- the harness


def cut(tensor: Tensor, layout: Activation, rank: int, degree: int) -> Tensor:
    if not isinstance(layout, Shard):
        return tensor
    assert layout.dim < tensor.ndim
    assert layout.size == tensor.shape[layout.dim]
    pieces = [tensor.narrow(layout.dim, s.start, s.length) for s in layout.spans(rank, degree)]
    return torch.cat([tensor.narrow(layout.dim, 0, 0), *pieces], layout.dim)


Local = Callable[[tuple[Any, ...], list[Activation], list[Tensor]], tuple[Any, ...]]
"""(arguments with local tensors, layouts and whole values of the outputs) -> arguments as on a rank."""


@dataclass
class Case:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    local: Local | None = None


class Draw:
    """Random tensors with layouts, for one call at one degree.

    With `pieces`, a shard has so many different ones, and several ranks hold each; else each rank has its own. With
    `units`, the ranks hold unequal numbers of them, and what the code has on a rank is drawn for `rank`.
    """

    def __init__(
        self, name: str, seed: int, pieces: int | None = None, units: int = 0, rank: int = 0
    ) -> None:
        self.name = name
        self.random = Random(f"{name} {seed}")
        torch.manual_seed(crc32(f"{name} {seed}".encode()))
        self.degree = self.random.choice([2, 4]) if pieces is None else 4
        self.degree = 4 if units else self.degree
        self.pieces = units or pieces or self.degree
        self.copies = 1 if units else self.degree // self.pieces
        self.units, self.rank = units, rank
        self.known: dict[int, tuple[Tensor, Activation]] = {}
        self.terms: dict[int, list[Tensor]] = {}
        self.follows: dict[int, tuple[Tensor, int, int]] = {}
        self.zeros: dict[int, Tensor] = {}

    def shard_along(self, dim: int, blocks: tuple[int, ...]) -> Shard:
        return Shard(dim, blocks, self.copies, self.units)

    def part(self, size: int) -> int:
        """What a size or border along the sharded dim is on a rank."""
        return self.shard_along(0, ()).scaled(size, self.rank, self.degree)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, *options: Any) -> Any:
        return self.random.choice(options)

    def blocks(self, unit: int = 1) -> tuple[int, ...]:
        return tuple(self.pick(1, 1, 2, 3) * self.pieces * unit for _ in range(self.pick(1, 1, 2, 3)))

    def tensor(self, sizes: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
        if dtype == torch.bool:
            return torch.rand(list(sizes)) > 0.5
        return torch.randn(list(sizes), dtype=dtype)

    def put(self, tensor: Tensor, layout: Activation) -> Tensor:
        self.known[id(tensor)] = (tensor, layout)
        if isinstance(layout, Partial):
            terms = [torch.randn_like(tensor) for _ in range(self.degree - 1)]
            self.terms[id(tensor)] = [*terms, tensor - sum(terms)]
        return tensor

    def layout(self, tensor: Tensor) -> Activation:
        return self.known[id(tensor)][1] if id(tensor) in self.known else WHOLE

    def shard(self, tensor: Tensor) -> Shard:
        layout = self.layout(tensor)
        assert isinstance(layout, Shard)
        return layout

    def sharded(
        self,
        ndim: int | None = None,
        dims: Iterable[int] | None = None,
        sizes: dict[int, int] | None = None,
        unit: int = 1,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """A tensor sharded along one of `dims`; `sizes` are those of dims that are not cut."""
        ndim = ndim or self.pick(2, 3, 4)
        dim = self.pick(*(dims if dims is not None else range(ndim)))
        blocks = self.blocks(unit)
        full = [(sizes or {}).get(i, self.pick(1, 2, 3)) for i in range(ndim)]
        full[dim] = sum(blocks)
        return self.put(self.tensor(full, dtype), self.shard_along(dim, blocks))

    def operand(self, **how: Any) -> Tensor:
        """A sharded tensor, or now and then a partial sum of the same kind."""
        x = self.sharded(**how)
        partial = x.dtype.is_floating_point or x.dtype.is_complex
        return self.put(x, Partial()) if partial and self.chance(0.15) else x

    def nothing(self, sizes: Sequence[int]) -> Tensor:
        """A whole tensor of zeros, and known to be that."""
        tensor = torch.zeros(list(sizes), dtype=torch.float64)
        self.zeros[id(tensor)] = tensor
        return tensor

    def repeated(self, tensor: Tensor, dim: int, run: int | None = None) -> Tensor:
        """A whole tensor whose values repeat along `dim` in runs, by default one; on a rank the runs are local."""
        self.follows[id(tensor)] = (tensor, dim, run or tensor.shape[dim])
        return tensor

    def partner(self, x: Tensor, dtype: torch.dtype = torch.float64, like: Shard | None = None) -> Tensor:
        """A tensor to broadcast against `x`, whose shard (if it is not partial) is `like`."""
        shard = like or (self.layout(x) if isinstance(self.layout(x), Shard) else None)
        sizes = [size if self.chance(0.7) else 1 for size in x.shape]
        if shard is None:
            y = self.tensor(sizes, dtype)
            return self.put(y, Partial()) if dtype.is_floating_point and self.chance(0.5) else y
        assert isinstance(shard, Shard)
        kind = self.pick("same", "same", "one", "one", "short", "repeated", "runs", "whole", "other")
        sizes[shard.dim] = 1 if kind in ("one", "repeated") else x.shape[shard.dim]
        if kind == "runs":  # not always those of the blocks
            run = self.pick(shard.blocks[0], self.pieces)
            sizes[shard.dim] = -(-shard.size // run)
            y = self.tensor(sizes, dtype).repeat_interleave(run, shard.dim)
            return self.repeated(y.narrow(shard.dim, 0, shard.size).contiguous(), shard.dim, run)
        y = self.tensor(sizes, dtype)
        if kind == "same":
            return self.put(y, shard)
        if kind == "short":
            return self.tensor(sizes[shard.dim + 1 :], dtype)
        if kind == "repeated":
            sizes[shard.dim] = x.shape[shard.dim]
            return self.repeated(y.expand(sizes).contiguous(), shard.dim)
        return self.put(y, shard.of(self.pieces, shard.size - self.pieces)) if kind == "other" else y

    # -- of a case

    def call(self, case: Case, output: Any) -> Call:
        layouts = {i: layout for i, (_, layout) in self.known.items()}
        call = Call(self.name, case.args, case.kwargs, output, self.degree, layouts, nothing=set(self.zeros))
        for tensor in call.tensors:
            call.producers[id(tensor)] = ("the.producer",)
        for i, (tensor, dim, run) in self.follows.items():
            call.repeats[i] = tuple(run if d == dim else 1 for d in range(tensor.ndim))
        return call

    def piece(self, value: Any, rank: int) -> Any:
        if isinstance(value, Tensor):
            if id(value) in self.terms and isinstance(self.layout(value), Partial):
                return self.terms[id(value)][rank]
            if id(value) in self.follows:
                _, dim, run = self.follows[id(value)]
                rest = value.shape[dim] % run
                runs = Shard(dim, (run,) * (value.shape[dim] // run) + (rest,), units=self.units)
                return cut(value, runs, self.rank, self.degree if self.units else self.pieces)
            return cut(value, self.layout(value), rank, self.degree)
        if isinstance(value, (list, tuple)):
            return type(value)(self.piece(item, rank) for item in value)
        return value


VALUES_UNDEFINED = {"empty_like", "new_empty"}


def commutes(
    draw: Draw, case: Case, rule: Rule, on_ranks: Sequence[tuple[Draw, Case]] = ()
) -> list[Activation]:
    """Return the layouts that `rule` gives the outputs; raise if the function does not commute with cutting.

    The same case may be drawn for each rank, where the code has other numbers on each.

    Raises:
        Mismatch: the rule refuses the call.
        AssertionError: the rule is wrong.
    """
    output = case.function(*case.args, **case.kwargs)
    outputs = list(tensors_in(output))
    result = rule(draw.call(case, output))
    layouts = list(result) if isinstance(result, Sequence) else [result] * len(outputs)
    assert len(layouts) == len(outputs)
    sums: list[Any] = [0] * len(outputs)
    for rank in range(draw.degree):
        own, its = on_ranks[rank] if on_ranks else (draw, case)
        args = tuple(own.piece(arg, rank) for arg in its.args)
        args = its.local(args, layouts, outputs) if its.local else args
        try:
            local = list(tensors_in(its.function(*args, **its.kwargs)))
        except (RuntimeError, IndexError) as error:
            raise AssertionError(f"{draw.name} fails on a rank") from error
        assert len(local) == len(outputs)
        for i, (layout, whole) in enumerate(zip(layouts, outputs, strict=True)):
            same(
                local[i],
                cut(whole, layout, rank, draw.degree),
                draw.name,
                shape_only=isinstance(layout, Partial),
            )
            sums[i] = sums[i] + local[i] if isinstance(layout, Partial) else 0
    for layout, total, whole in zip(layouts, sums, outputs, strict=True):
        if isinstance(layout, Partial):
            same(total, whole, draw.name)
    return layouts


def same(found: Tensor, wanted: Tensor, name: str, shape_only: bool = False) -> None:
    assert found.shape == wanted.shape, name
    if not shape_only and name not in VALUES_UNDEFINED:
        close = {2: 0.05, 4: 1e-4}.get(wanted.element_size(), 1e-9)
        torch.testing.assert_close(found, wanted, equal_nan=True, rtol=close, atol=close)


def prove(name: str, rule: Rule, pieces: int | None = None, units: int = 0) -> int:
    """Try `rule` on random calls; return how many had a shard and passed."""
    passed = 0
    for seed in range(TRIALS):
        draws = (Draw(name, seed, pieces, units, rank) for rank in range(4 if units else 1))
        on_ranks = [(draw, DRAWS[name](draw)) for draw in draws]  # one after the other, from the same seed
        draw, case = on_ranks[0]
        tensors = list(tensors_in((case.args, case.kwargs)))
        if all(draw.layout(t) == WHOLE for t in tensors):
            continue
        try:
            commutes(draw, case, rule, on_ranks if units else ())
        except Mismatch:
            continue
        passed += any(isinstance(draw.layout(t), Shard) for t in tensors)
    return passed


# ---------------------------------------------------------------- how a call of each function is drawn

Drawing = Callable[[Draw], Case]
DRAWS: dict[str, Drawing] = {}


def draws(*names: str) -> Callable[[Drawing], Drawing]:
    def register(drawing: Drawing) -> Drawing:
        for name in names:
            assert name not in DRAWS, name
            DRAWS[name] = drawing
        return drawing

    return register


def named(name: str) -> Callable[..., Any]:
    """The function of this name; one that writes in place gets a copy."""
    in_place = name.endswith("_") and (not name.endswith("__") or name == "__ipow__")
    for owner in () if in_place or name.startswith("__") else (F, torch, torch.linalg):
        found = getattr(owner, name, None)
        if callable(found):
            return found
    method = getattr(Tensor, name)
    if not callable(method):
        return lambda x: getattr(x, name)
    return (lambda x, *args, **kwargs: method(x.clone(), *args, **kwargs)) if in_place else method


def size_of(layout: Activation, whole: Tensor, draw: Draw) -> list[int]:
    shape = tuple(whole.shape)
    return list(layout.local_shape(shape, draw.rank, draw.degree) if isinstance(layout, Shard) else shape)


@draws(*elementwise.LINEAR, *elementwise.LINEAR_IN_PLACE, *elementwise.UNARY, *elementwise.UNARY_IN_PLACE)
def draw_unary(draw: Draw) -> Case:
    of_bools = draw.name in ("__invert__", "bitwise_not")
    x = draw.operand(dtype=torch.bool if of_bools else torch.float64)
    args: tuple[Any, ...] = (x, 0.5) if draw.name == "fill_" else (x,)
    if "dropout" in draw.name:
        args = (x, draw.pick(0.0, 0.5), draw.chance(0.5))
    return Case(named(draw.name), args)


@draws(*elementwise.LINEAR_COMPLEX)
def draw_complex(draw: Draw) -> Case:
    return Case(named(draw.name), (draw.operand(dtype=torch.complex128),))


@draws(*elementwise.CASTS)
def draw_cast(draw: Draw) -> Case:
    x = draw.operand()
    more = {
        "to": lambda: draw.pick(torch.float32, torch.int32, draw.sharded(dtype=torch.float32)),
        "type": lambda: draw.pick(torch.float32, torch.int32),
        "type_as": lambda: draw.sharded(dtype=torch.float32),
    }
    return Case(getattr(Tensor, draw.name), (x, *([more[draw.name]()] if draw.name in more else [])))


@draws(*elementwise.LIKE, *elementwise.NEW)
def draw_constant(draw: Draw) -> Case:
    sizes = [[2, 3]] if draw.name.startswith("new") else []
    return Case(named(draw.name), (draw.operand(), *sizes, *([0.5] if "full" in draw.name else [])))


OF_BOOLS = {"__and__", "__or__", "__xor__", "bitwise_and", "bitwise_or"}
OF_THREE = {"addcmul", "addcdiv", "lerp", "clamp", "clip", "addcmul_", "addcdiv_", "lerp_", "clamp_"}
ARITHMETIC = (*elementwise.SUMS, *elementwise.PRODUCTS, *elementwise.QUOTIENTS)


@draws(*elementwise.BINARY, *elementwise.BINARY_IN_PLACE, *ARITHMETIC)
def draw_binary(draw: Draw) -> Case:
    dtype = torch.bool if draw.name in OF_BOOLS else torch.float64
    x = draw.operand(dtype=dtype)
    function = named(draw.name)
    if draw.name.startswith("masked_fill"):
        return Case(function, (x, draw.partner(x, torch.bool), 0.5))
    args = [x, draw.partner(x, dtype)]
    if draw.name in OF_THREE:
        args.append(draw.partner(x))
    elif draw.name == "where":
        args.insert(0, draw.partner(x, torch.bool))
    elif draw.name in ARITHMETIC and draw.chance(0.2):
        args[1] = 0.5
    elif draw.name in ("div", "divide") and draw.chance(0.5):
        return Case(function, tuple(args), {"rounding_mode": "floor"})
    if len(args) == 2 and draw.chance(0.25) and isinstance(args[1], Tensor) and args[1].shape == x.shape:
        args.reverse()
    return Case(function, tuple(args))


@draws("expand_as")
def draw_expand_as(draw: Draw) -> Case:
    x = draw.operand()
    return Case(Tensor.expand_as, (draw.partner(x), x))


@draws("broadcast_tensors")
def draw_broadcast_tensors(draw: Draw) -> Case:
    x = draw.operand()
    return Case(torch.broadcast_tensors, (x, draw.partner(x), draw.partner(x)))


def regrouped(draw: Draw, sizes: Sequence[int]) -> list[int]:
    """Another shape of as many elements, by splitting and merging neighbouring dims at random."""
    factors: list[int] = []
    for size in sizes:
        first = draw.pick(*[d for d in range(1, size + 1) if size % d == 0])
        factors += [first, size // first]
    result = [1]
    for factor in factors:
        if draw.chance(0.5):
            result.append(factor)
        else:
            result[-1] *= factor
    return result


@draws("view", "reshape")
def draw_view(draw: Draw) -> Case:
    x = draw.operand(unit=draw.pick(1, 2, 3, 4))
    if draw.name == "view" and draw.chance(0.2):
        return Case(Tensor.view, (x, draw.pick(torch.int64, torch.float32)))
    return Case(
        getattr(Tensor, draw.name),
        (x, regrouped(draw, x.shape)),
        local=lambda args, layouts, outputs: (args[0], size_of(layouts[0], outputs[0], draw)),
    )


@draws("flatten")
def draw_flatten(draw: Draw) -> Case:
    x = draw.operand()
    first = draw.random.randrange(x.ndim)
    return Case(torch.flatten, (x, first, draw.random.randrange(first, x.ndim)))


@draws("ravel")
def draw_ravel(draw: Draw) -> Case:
    return Case(torch.ravel, (draw.operand(),))


@draws("unflatten")
def draw_unflatten(draw: Draw) -> Case:
    x = draw.operand(unit=2)
    dim = draw.random.randrange(x.ndim)
    sizes = regrouped(draw, [x.shape[dim]])

    def local(args: tuple[Any, ...], layouts: list[Activation], outputs: list[Tensor]) -> tuple[Any, ...]:
        return args[0], dim, size_of(layouts[0], outputs[0], draw)[dim : dim + len(sizes)]

    return Case(torch.unflatten, (x, dim, sizes), local=local)


@draws("view_as", "reshape_as")
def draw_view_as(draw: Draw) -> Case:
    x = draw.operand(unit=2)
    other = torch.randn(*regrouped(draw, x.shape))
    layout = draw.layout(x)
    if isinstance(layout, Shard) and draw.chance(0.8):
        draw.put(other, view_shard(tuple(x.shape), tuple(other.shape), layout, draw.degree) or WHOLE)
    return Case(getattr(Tensor, draw.name), (x, other))


@draws("squeeze")
def draw_squeeze(draw: Draw) -> Case:
    x = draw.operand()
    dims = [(), (draw.random.randrange(x.ndim),), (tuple({draw.random.randrange(x.ndim), x.ndim - 1}),)]
    return Case(torch.squeeze, (x, *draw.pick(*dims)))


@draws("unsqueeze")
def draw_unsqueeze(draw: Draw) -> Case:
    x = draw.operand()
    return Case(torch.unsqueeze, (x, draw.random.randrange(-x.ndim - 1, x.ndim + 1)))


@draws(*shape.PERMUTATIONS)
def draw_permutation(draw: Draw) -> Case:
    x = draw.operand(ndim=2 if draw.name in ("t", "T") else None)
    order = draw.random.sample(range(x.ndim), x.ndim)
    args: tuple[Any, ...] = () if draw.name in ("t", "T", "mT") else (order[0], order[1])
    if draw.name == "permute":
        args = tuple(order) if draw.chance(0.5) else (order,)
    elif draw.name.startswith("move") and draw.chance(0.5):
        args = (tuple(order[:2]), (0, 1))
    function = getattr(Tensor, draw.name) if draw.name == "permute" else named(draw.name)
    return Case(function, (x, *args))


@draws(*shape.EXPANSIONS)
def draw_expand(draw: Draw) -> Case:
    x = draw.operand()
    sizes = [*draw.pick([], [2], [2, 1]), *(draw.pick(1, 3) if size == 1 else size for size in x.shape)]
    return Case(
        getattr(Tensor, draw.name),
        (x, sizes),
        local=lambda args, layouts, outputs: (args[0], size_of(layouts[0], outputs[0], draw)),
    )


@draws(*shape.REPETITIONS)
def draw_repeat(draw: Draw) -> Case:
    x = draw.operand()
    times = [draw.pick(1, 1, 2, 3) for _ in range(x.ndim + draw.pick(0, 1))]
    return Case(getattr(Tensor, draw.name), (x, times[1:] if draw.name == "tile" else times))


@draws("repeat_interleave")
def draw_repeat_interleave(draw: Draw) -> Case:
    x = draw.operand()
    dim = draw.pick(*range(-x.ndim, x.ndim))

    def local(args: tuple[Any, ...], layouts: list[Activation], outputs: list[Tensor]) -> tuple[Any, ...]:
        """A head that several ranks hold is repeated as often as a rank's queries read it."""
        (layout,) = layouts
        alone = isinstance(layout, Shard) and layout.copies < draw.copies
        return args[0], args[1] // draw.copies if alone else args[1], args[2]

    args = (x, draw.pick(1, 2, 3), draw.pick(dim, dim, dim, None))
    if draw.chance(0.2):
        args = (x, draw.pick(2, torch.tensor([2] * x.shape[dim])), dim)
    return Case(torch.repeat_interleave, args, local=local)


@draws("cat", "concat", "concatenate", "stack", "vstack")
def draw_join(draw: Draw) -> Case:
    x = draw.operand(ndim=1 if draw.name == "vstack" and draw.chance(0.1) else None)
    dim, layout = 0 if draw.name == "vstack" else draw.random.randrange(x.ndim), draw.layout(x)
    others = []
    for _ in range(draw.pick(1, 2)):
        y = draw.tensor(x.shape)
        kind = draw.pick("same", "same", "same", "whole", "repeated", "blocks", "nothing")
        if kind == "nothing":
            y = draw.nothing(x.shape)
        elif isinstance(layout, Partial):
            draw.put(y, layout if kind == "same" else WHOLE)
        elif kind == "repeated":
            y = draw.repeated(y.narrow(layout.dim, 0, 1).expand(y.shape).contiguous(), layout.dim)
        elif kind == "blocks" and dim == layout.dim and draw.name != "stack" and x.ndim > 1:
            y = draw.tensor([2 * size if i == dim else size for i, size in enumerate(x.shape)])
            draw.put(y, layout.of(*layout.blocks, *layout.blocks))
        elif kind != "whole":
            draw.put(y, layout)
        others.append(y)
    tensors = draw.random.sample([x, *others], len(others) + 1)
    if draw.name not in ("stack", "vstack") and draw.chance(0.1):
        tensors.append(torch.empty(0, dtype=x.dtype))
    return Case(named(draw.name), (tensors,) if draw.name == "vstack" else (tensors, dim))


@draws("split", "split_with_sizes", "tensor_split", "chunk")
def draw_split(draw: Draw) -> Case:
    x = draw.operand()
    layout = draw.layout(x)
    dim = layout.dim if isinstance(layout, Shard) and draw.chance(0.7) else draw.random.randrange(x.ndim)
    along = isinstance(layout, Shard) and layout.dim == dim
    sizes = list(layout.blocks) if isinstance(layout, Shard) and along else [1] * x.shape[dim]
    if draw.chance(0.2):
        sizes = [1, x.shape[dim] - 1]
    how: Any = sizes
    if draw.name == "chunk" or (draw.name == "tensor_split" and draw.chance(0.5)):
        return Case(named(draw.name), (x, draw.pick(1, 2, 3, len(sizes)), dim))
    if draw.name == "tensor_split":
        how = list(accumulate(sizes))[:-1]
    elif draw.name == "split" and draw.chance(0.3):
        how = sizes[0]

    def local(args: tuple[Any, ...], layouts: list[Activation], outputs: list[Tensor]) -> tuple[Any, ...]:
        divided = draw.part(how) if isinstance(how, int) else [draw.part(size) for size in how]
        return args[0], divided if along else how, dim

    function = getattr(Tensor, draw.name)
    return Case(function, (x, how, dim), local=local)


@draws("glu")
def draw_glu(draw: Draw) -> Case:
    x = draw.operand(unit=draw.pick(1, 2))
    layout = draw.layout(x)
    if isinstance(layout, Shard) and draw.chance(0.7):
        x = torch.cat([x, x], layout.dim)
        draw.put(x, layout.of(*layout.blocks, *layout.blocks))
    even = [dim for dim in range(x.ndim) if x.shape[dim] % 2 == 0]
    return Case(F.glu, (x, draw.pick(*even)))


def slice_of(draw: Draw, shard: Shard) -> tuple[slice, slice]:
    """A slice of a sharded dim, and the slice that the code takes on a rank."""
    borders = [0, *accumulate(shard.blocks)]
    start, stop = sorted(draw.random.sample(borders, 2))
    part, kind = draw.part, draw.pick("all", "all", "part", "part", "strided", "negative", "odd")
    if kind == "all":
        return slice(None), slice(None)
    if kind == "strided":
        bounds = slice(draw.pick(0, 1), None, 2)
        return bounds, bounds
    if kind == "odd":
        return slice(1, stop), slice(1, max(1, part(stop)))
    if kind == "negative":
        size = shard.size
        return slice(start - size, stop), slice(-part(size - start), part(stop))
    return slice(start, stop), slice(part(start), part(stop))


@draws("narrow")
def draw_narrow(draw: Draw) -> Case:
    x = draw.operand()
    layout = draw.layout(x)
    dim = draw.random.randrange(x.ndim)
    if not isinstance(layout, Shard) or dim != layout.dim:
        return Case(torch.narrow, (x, dim, 0, 1))
    bounds, local = slice_of(draw, layout)
    (start, stop, _), (low, high, _) = bounds.indices(layout.size), local.indices(draw.part(layout.size))
    args = (dim, low, high - low)
    return Case(torch.narrow, (x, dim, start, stop - start), local=lambda a, layouts, outputs: (a[0], *args))


@draws("unbind")
def draw_unbind(draw: Draw) -> Case:
    x = draw.operand()
    return Case(torch.unbind, (x, draw.random.randrange(-x.ndim, x.ndim)))


@draws("select")
def draw_select(draw: Draw) -> Case:
    x = draw.operand()
    return Case(torch.select, (x, draw.random.randrange(-x.ndim, x.ndim), 0))


@draws("index_select")
def draw_index_select(draw: Draw) -> Case:
    x = draw.operand()
    return Case(torch.index_select, (x, draw.random.randrange(-x.ndim, x.ndim), torch.tensor([0, 0, 0])))


@draws("gather")
def draw_gather(draw: Draw) -> Case:
    x = draw.operand()
    layout, dim = draw.layout(x), draw.random.randrange(x.ndim)
    index = torch.randint(x.shape[dim], [2 if i == dim else size for i, size in enumerate(x.shape)])
    kind = draw.pick("same", "same", "repeated", "whole", "narrow")
    if isinstance(layout, Shard) and dim != layout.dim:
        if kind == "same":
            draw.put(index, layout)
        elif kind != "whole":
            index = index.narrow(layout.dim, 0, 1).clone()
        if kind == "repeated":
            sizes = [layout.size if i == layout.dim else size for i, size in enumerate(index.shape)]
            index = draw.repeated(index.expand(sizes).contiguous(), layout.dim)
    return Case(torch.gather, (x, dim, index))


@draws("embedding")
def draw_embedding(draw: Draw) -> Case:
    table = draw.operand(ndim=2)
    index = torch.randint(table.shape[0], draw.pick((3,), (2, 3)))
    if draw.chance(0.4):  # the indices are cut instead, or too
        table = draw.tensor([5, 3]) if draw.chance(0.8) else table
        blocks = draw.blocks()
        index = draw.put(torch.randint(table.shape[0], (2, sum(blocks))), draw.shard_along(1, blocks))
    return Case(F.embedding, (index, table))


@draws("scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_add", "index_add_")
def draw_add_rows(draw: Draw) -> Case:
    x = draw.operand()
    layout, dim = draw.layout(x), draw.random.randrange(x.ndim)
    rows = 2 * x.shape[dim] if not isinstance(layout, Shard) or dim != layout.dim else x.shape[dim]
    sizes = [rows if i == dim else size for i, size in enumerate(x.shape)]
    source = draw.put(draw.tensor(sizes), draw.pick(layout, layout, layout, WHOLE))
    if isinstance(layout, Partial) and draw.chance(0.3):
        x = draw.nothing(x.shape)
    index = torch.randint(x.shape[dim], sizes)
    kind = draw.pick("same", "same", "repeated", "repeated", "whole", "partial")
    if draw.name.startswith("index"):
        index = torch.randint(x.shape[dim], [rows])
    elif isinstance(layout, Shard) and dim != layout.dim and kind == "same":
        draw.put(index, layout)
    elif isinstance(layout, Shard) and dim != layout.dim and kind == "repeated":
        index = draw.repeated(index.narrow(layout.dim, 0, 1).expand(sizes).contiguous(), layout.dim)
    elif kind == "partial":
        draw.known[id(index)] = (index, draw.pick(WHOLE, WHOLE, Partial()))
    reduce = [draw.pick("sum", "sum", "sum", "amax")] if "reduce" in draw.name else []
    return Case(named(draw.name), (x, dim, index, source, *reduce))


def index_of(draw: Draw, x: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """An index of `x`, and the one that the code has on a rank."""
    layout = draw.layout(x)
    whole: list[Any] = []
    local: list[Any] = []
    for dim, size in enumerate(x.shape):
        if draw.chance(0.15):
            whole.append(None)
            local.append(None)
        if isinstance(layout, Shard) and dim == layout.dim and draw.chance(0.9):
            entry, other = slice_of(draw, layout)
        else:
            tensor = torch.randint(size, draw.pick((2,), (2, 2), ()))
            mask = torch.arange(size) % 2 == 0
            entry = draw.pick(slice(None), slice(None), slice(0, 1), 0, -1, tensor, [0, 0], mask)
            other = entry
        whole.append(entry)
        local.append(other)
    if draw.chance(0.3) and whole[-1] == slice(None) == local[-1]:
        whole[-1] = local[-1] = Ellipsis
    elif draw.chance(0.3) and whole[0] == slice(None) == local[0]:
        whole[0] = local[0] = Ellipsis
    return tuple(whole), tuple(local)


@draws("__getitem__")
def draw_getitem(draw: Draw) -> Case:
    x = draw.operand()
    whole, local = index_of(draw, x)
    return Case(Tensor.__getitem__, (x, whole), local=lambda args, layouts, outputs: (args[0], local))


def write(x: Tensor, index: Any, value: Any) -> Tensor:
    x = x.clone()
    x[index] = value
    return x


@draws("__setitem__")
def draw_setitem(draw: Draw) -> Case:
    x = draw.sharded()
    # An index that names a place twice would leave open which value stays there.
    whole, local = next(
        index
        for index in (index_of(draw, x) for _ in range(99))
        if not any(isinstance(e, list | Tensor) for e in index[0])
    )
    value: Any = 0.5
    try:
        slot = RULES["__getitem__"](draw.call(Case(write, (x, whole)), None))
    except Mismatch:
        slot = None
    if isinstance(slot, Shard) and draw.chance(0.8):
        place = torch.empty_like(x[whole])
        value = draw.partner(place, like=slot)
    if draw.chance(0.1):
        x, value = draw.put(x, WHOLE), draw.put(torch.randn_like(x), draw.layout(x))
        whole = local = (Ellipsis,)
    return Case(write, (x, whole, value), local=lambda args, layouts, outputs: (args[0], local, args[2]))


ONE_DIM = {"argmax", "argmin", "median", "prod", "max", "min"}
REDUCTIONS = (
    "sum mean all amax amin any argmax argmin count_nonzero logsumexp median prod std std_mean var var_mean"
)


@draws(*REDUCTIONS.split(), "norm", "vector_norm", "max", "min")
def draw_reduction(draw: Draw) -> Case:
    x = draw.operand()
    if draw.name in ("max", "min") and draw.chance(0.4):
        return Case(named(draw.name), (x, draw.partner(x)))
    dims: Any = draw.random.randrange(-x.ndim, x.ndim)
    if draw.name not in ONE_DIM and draw.chance(0.3):
        dims = tuple({dims % x.ndim, 0})
    kwargs = {"keepdim": draw.chance(0.5)} if draw.name != "count_nonzero" else {}
    if draw.name.startswith(("std", "var")):
        kwargs["correction"] = 0
    if draw.chance(0.1) and draw.name not in ONE_DIM and draw.name != "logsumexp":
        return Case(named(draw.name), (x,))
    order = [2] if draw.name in ("norm", "vector_norm") else []
    by_name = draw.chance(0.5)
    return Case(
        named(draw.name),
        (x, *order, *([] if by_name else [dims])),
        kwargs | ({"dim": dims} if by_name else {}),
    )


@draws(
    "softmax",
    "log_softmax",
    "cumprod",
    "cummax",
    "logcumsumexp",
    "cumsum",
    "cumsum_",
    "sort",
    "argsort",
    "diff",
    "topk",
)
def draw_along(draw: Draw) -> Case:
    x = draw.operand()
    dim = draw.random.randrange(-x.ndim, x.ndim)
    first = [1] if draw.name in ("topk", "diff") else []
    if draw.name in ("sort", "argsort", "topk", "diff") and draw.chance(0.3):
        return Case(getattr(torch, draw.name), (x, *first))
    return Case(named(draw.name), (x, *first, dim))


@draws("normalize")
def draw_normalize(draw: Draw) -> Case:
    x = draw.operand()
    return Case(F.normalize, (x, 2.0, *draw.pick([], [draw.random.randrange(-x.ndim, x.ndim)])))


@draws("flip")
def draw_flip(draw: Draw) -> Case:
    x = draw.operand()
    dims = draw.random.sample(range(x.ndim), draw.pick(1, 2))
    return Case(Tensor.flip, (x, *draw.pick(dims, [dims])))


@draws("roll")
def draw_roll(draw: Draw) -> Case:
    x = draw.operand()
    return Case(torch.roll, (x, 1, *draw.pick([], *[[dim] for dim in range(x.ndim)])))


@draws("layer_norm", "rms_norm")
def draw_layer_norm(draw: Draw) -> Case:
    x = draw.operand(ndim=draw.pick(3, 4))
    sizes = tuple(x.shape[draw.pick(1, 2) :])
    return Case(named(draw.name), (x, sizes, *draw.pick([], [torch.randn(*sizes, dtype=x.dtype)])))


@draws("group_norm", "instance_norm", "batch_norm")
def draw_group_norm(draw: Draw) -> Case:
    x = draw.operand(ndim=4, dims=(0, 0, 0, 1, 2), sizes={1: 4, 2: 3, 3: 3})
    more: tuple[Any, ...] = (2,) if draw.name == "group_norm" else ()
    if draw.name == "batch_norm":
        channels = x.shape[1]
        stats = [torch.rand(channels, dtype=x.dtype) + 0.5 for _ in range(4)]
        more = (*stats, draw.chance(0.2))
        return Case(lambda x, m, v, *rest: F.batch_norm(x, m.clone(), v.clone(), *rest), (x, *more))
    return Case(named(draw.name), (x, *more))


@draws("pad")
def draw_pad(draw: Draw) -> Case:
    x = draw.operand()
    sizes = [draw.pick(0, 0, 1, 2) for _ in range(2 * draw.random.randrange(1, x.ndim + 1))]
    return Case(F.pad, (x, sizes, *draw.pick([], ["constant", 0.5])))


@draws("tril", "triu")
def draw_triangle(draw: Draw) -> Case:
    return Case(getattr(torch, draw.name), (draw.operand(ndim=draw.pick(3, 4)),))


@draws("view_as_real")
def draw_view_as_real(draw: Draw) -> Case:
    return Case(torch.view_as_real, (draw.operand(dtype=torch.complex128),))


@draws("view_as_complex")
def draw_view_as_complex(draw: Draw) -> Case:
    return Case(torch.view_as_complex, (draw.operand(ndim=3, dims=(0, 1), sizes={2: 2}),))


@draws("interpolate", "pixel_shuffle", "pixel_unshuffle")
def draw_picture(draw: Draw) -> Case:
    x = draw.operand(ndim=4, unit=4, dims=(0, 0, 1, 2), sizes={1: 4, 2: 4, 3: 4})
    return Case(named(draw.name), (x, None, 2) if draw.name == "interpolate" else (x, 2))


@draws(*(f"{kind}_pool{places}d" for kind in ("avg", "max", "adaptive_avg") for places in (1, 2, 3)))
def draw_pool(draw: Draw) -> Case:
    places = int(draw.name[-2])
    ndim = places + draw.pick(1, 2)
    x = draw.operand(
        ndim=ndim, dims=(0, 0, 0, ndim - places - 1, ndim - 1), sizes=dict.fromkeys(range(1, ndim), 4)
    )
    return Case(named(draw.name), (x, 2))


@draws("linear")
def draw_linear(draw: Draw) -> Case:
    x = draw.operand()
    bias = draw.pick([], [draw.tensor([5])])
    return Case(F.linear, (x, draw.tensor([5, x.shape[-1]]), *bias))


@draws(*(f"conv{kind}{places}d" for kind in ("", "_transpose") for places in (1, 2, 3)))
def draw_convolution(draw: Draw) -> Case:
    places = int(draw.name[-2])
    ndim = places + draw.pick(1, 2, 2, 2)
    dims = (0, 0, 0, 1, ndim - 1) if ndim == places + 2 else (0, 1)
    x = draw.operand(ndim=ndim, dims=dims, sizes=dict.fromkeys(range(1, ndim), 3))
    channels = x.shape[ndim - places - 1]
    sizes = (channels, 4) if "transpose" in draw.name else (4, channels)
    bias = draw.pick([], [draw.tensor([4])])
    return Case(named(draw.name), (x, draw.tensor([*sizes, *[2] * places]), *bias))


def lettered(draw: Draw, inputs: Sequence[str]) -> list[Tensor]:
    """Tensors with these dims, of which one letter is cut, or one tensor is a partial sum."""
    letter, blocks = draw.pick(*sorted(set("".join(inputs)))), draw.blocks()
    sizes = {c: draw.pick(1, 2, 3) for c in "".join(inputs)} | {letter: sum(blocks)}
    tensors = [draw.tensor([sizes[c] for c in letters]) for letters in inputs]
    if draw.chance(0.15):
        draw.put(draw.pick(*tensors), Partial())
        return tensors
    for letters, tensor in zip(inputs, tensors, strict=True):
        if letter in letters and not draw.chance(0.1):
            draw.put(tensor, draw.shard_along(letters.index(letter), blocks))
    return tensors


@draws("matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "mv")
def draw_product(draw: Draw) -> Case:
    pairs = {
        "bmm": [("bmk", "bkn")],
        "mm": [("mk", "kn")],
        "mv": [("mk", "k")],
    }.get(
        draw.name,
        [("bmk", "bkn"), ("abmk", "abkn"), ("abmk", "bkn"), ("mk", "abkn"), ("bmk", "kn"), ("k", "bkn"), ("bmk", "k"),
         ("mk", "kn")],
    )  # fmt: skip
    x, y = lettered(draw, draw.pick(*pairs))
    return Case(named(draw.name), (y, x) if draw.name == "__rmatmul__" else (x, y))


@draws("addmm", "baddbmm")
def draw_add_product(draw: Draw) -> Case:
    x, y = lettered(draw, ("mk", "kn") if draw.name == "addmm" else ("bmk", "bkn"))
    output = x @ y
    try:
        layout = RULES["matmul"](Draw.call(draw, Case(torch.matmul, (x, y)), output))
    except (Mismatch, AssertionError):
        layout = WHOLE
    like = layout if isinstance(layout, Shard) else None
    return Case(named(draw.name), (draw.partner(output, like=like), x, y), {"beta": draw.pick(0.0, 1.0)})


EQUATIONS = ["bhqd,bhkd->bhqk", "bhqd,bhkd->bqk", "bsd,hd->bsh", "ij,j->i", "ij,jk", "bij, bjk , bkl -> bil",
             "ii->i", "bii,b->bi", "...i,i->..."]  # fmt: skip


@draws("einsum")
def draw_einsum(draw: Draw) -> Case:
    equation = draw.pick(*EQUATIONS)
    inputs = equation.replace(" ", "").replace("...", "b").partition("->")[0].split(",")
    tensors = lettered(draw, inputs)
    return Case(torch.einsum, (equation, *draw.pick(tensors, [tensors])))


@draws("scaled_dot_product_attention")
def draw_attention(draw: Draw) -> Case:
    dim = draw.pick(0, 1, 1, 1, 1, 2)
    shared = draw.pick(1, 1, 2) if dim == 1 else 1
    blocks = draw.blocks()
    sizes = [2, 2, 5, 4]
    sizes[dim] = sum(blocks)
    repeated = draw.shard_along(dim, tuple(block * shared for block in blocks))
    shard = replace(repeated, copies=1) if shared > 1 else repeated
    q = draw.put(draw.tensor([size * (shared if i == 1 else 1) for i, size in enumerate(sizes)]), shard)
    k, v = (draw.put(draw.tensor(sizes), draw.shard_along(dim, blocks)) for _ in range(2))
    if draw.chance(0.1):
        draw.put(draw.pick(q, k, v), draw.pick(WHOLE, Partial()))
    length, layout = q.shape[2], draw.layout(q)
    mask = draw.pick(None, draw.tensor([length, k.shape[2]]), draw.tensor([1, 1, length, k.shape[2]]))
    if mask is not None and isinstance(layout, Shard) and dim < 2 and draw.chance(0.6):
        mask = draw.partner(draw.tensor([*q.shape[:3], k.shape[2]]), like=layout)
        mask = mask if mask.ndim > 1 else None
    options = {"enable_gqa": shared > 1, "dropout_p": draw.pick(0.0, 0.0, 0.0, 0.0, 0.5)}
    return Case(
        F.scaled_dot_product_attention,
        (q, k, v, mask),
        options | ({"is_causal": True} if mask is None else {}),
    )


# ---------------------------------------------------------------- the claims


def test_every_registered_function_is_drawn() -> None:
    assert set(DRAWS) == set(RULES)


@pytest.mark.parametrize("name", sorted(RULES))
def test_rule_commutes_with_cutting(name: str) -> None:
    assert prove(name, RULES[name]) >= PASSES


@pytest.mark.parametrize("name", sorted(RULES))
def test_rule_commutes_with_cutting_where_two_ranks_hold_each_piece(name: str) -> None:
    assert prove(name, RULES[name], pieces=2) >= PASSES


EVEN = {
    "conv1d",
    "conv2d",
    "conv3d",
    "glu",
    "group_norm",
    *(f"{kind}_pool{n}d" for kind in ("avg", "max") for n in (1, 2, 3)),
}
"""Functions whose draws need more than one piece, for even sizes."""


@pytest.mark.parametrize("name", sorted(RULES.keys() - EVEN))
def test_rule_commutes_with_cutting_where_all_ranks_hold_the_only_piece(name: str) -> None:
    assert prove(name, RULES[name], pieces=1) >= PASSES


@pytest.mark.parametrize("name", sorted(RULES))
def test_rule_commutes_with_cutting_where_the_ranks_hold_unequal_numbers(name: str) -> None:
    assert prove(name, RULES[name], units=6) >= PASSES


def keep(call: Call) -> Activation:
    """A wrong rule for most: the layout of the first tensor."""
    return call.layout(call.tensors[0])


@pytest.mark.parametrize(
    "name",
    ["__getitem__", "view", "cat", "stack", "split", "softmax", "flip", "sum", "linear", "layer_norm", "matmul",
     "einsum", "relu", "squeeze", "unsqueeze", "permute", "repeat", "repeat_interleave", "select", "pad", "group_norm",
     "vstack", "scatter_add", "index_add_",
     "add", "add_", "__setitem__", "gather", "baddbmm", "conv2d", "interpolate", "scaled_dot_product_attention", "glu",
     "embedding"],
)  # fmt: skip
def test_wrong_rule_is_noticed(name: str) -> None:
    with pytest.raises(AssertionError):
        prove(name, keep)


def one_block(call: Call) -> Any:
    """A rule that forgets the blocks."""
    result = RULES[call.name](call)
    several = isinstance(result, Sequence)
    merged = [
        Shard(s.dim, (s.size,)) if isinstance(s, Shard) else s for s in (result if several else [result])
    ]
    return merged if several else merged[0]


@pytest.mark.parametrize("name", ["view", "cat", "split", "repeat", "exp", "add", "matmul", "sum", "permute"])
def test_rule_that_forgets_blocks_is_noticed(name: str) -> None:
    with pytest.raises(AssertionError):
        prove(name, one_block)


def forget_copies(call: Call) -> Any:
    """A rule that takes each piece for one rank's own."""
    result = RULES[call.name](call)
    layouts = result if isinstance(result, Sequence) else [result]
    forgotten = [replace(s, copies=1) if isinstance(s, Shard) else s for s in layouts]
    return forgotten if isinstance(result, Sequence) else forgotten[0]


@pytest.mark.parametrize("name", ["view", "cat", "split", "repeat", "exp", "add", "permute", "__getitem__"])
def test_rule_that_forgets_copies_is_noticed(name: str) -> None:
    with pytest.raises(AssertionError):
        prove(name, forget_copies, pieces=2)


def forget_units(call: Call) -> Any:
    """A rule that takes all ranks' numbers for equal."""
    result = RULES[call.name](call)
    layouts = result if isinstance(result, Sequence) else [result]
    forgotten = [replace(s, units=0) if isinstance(s, Shard) else s for s in layouts]
    return forgotten if isinstance(result, Sequence) else forgotten[0]


@pytest.mark.parametrize("name", ["view", "cat", "split", "repeat", "exp", "add", "permute", "__getitem__"])
def test_rule_that_forgets_unequal_numbers_is_noticed(name: str) -> None:
    with pytest.raises(AssertionError):
        prove(name, forget_units, units=6)


@pytest.mark.parametrize("name", ["matmul", "einsum"])
def test_sum_over_pieces_that_several_ranks_hold_is_refused_because_it_would_count_them_twice(
    name: str,
) -> None:
    with pytest.raises(AssertionError), mock.patch.object(contract, "keep_single"):
        prove(name, RULES[name], pieces=2)


def test_attention_over_several_shared_heads_is_refused_because_each_rank_reads_one_of_them() -> None:
    with pytest.raises(AssertionError), mock.patch.object(Shard, "pieces_are_single", return_value=True):
        prove("scaled_dot_product_attention", RULES["scaled_dot_product_attention"], pieces=2)


def repeat_of_head(shard: Shard, times: int, degree: int, repeated: bool = True) -> Activation:
    """The layout of heads (2, 4, 8) repeated along a new dim and joined with it, as key heads are."""
    x = torch.randn(2, 4, times, 8)
    factors = {id(x): (1, 1, times if repeated else 1, 1)}
    call = Call("flatten", (x, 1, 2), {}, x.flatten(1, 2), degree, {id(x): shard}, {}, factors)
    return RULES["flatten"](call)  # type: ignore[return-value]


def test_shared_head_that_is_repeated_for_its_queries_is_each_ranks_own_afterwards() -> None:
    heads = Shard(1, (4,), copies=2)
    assert repeat_of_head(heads, times=6, degree=8) == Shard(1, (24,))
    assert repeat_of_head(heads, times=6, degree=8, repeated=False) == Shard(1, (24,), 2)
    assert repeat_of_head(heads, times=3, degree=8) == Shard(1, (12,), 2)  # two ranks cannot share three
    assert repeat_of_head(heads, times=6, degree=4) == Shard(1, (24,), 2)  # two heads on a rank


@pytest.mark.parametrize("name", ["mul", "multiply"])
def test_partial_sum_may_be_either_factor(name: str) -> None:
    for layouts in [(Partial(), WHOLE), (WHOLE, Partial())]:
        draw = Draw(name, 0)
        x, y = (draw.put(torch.randn(3, 4, dtype=torch.float64), layout) for layout in layouts)
        assert commutes(draw, Case(torch.mul, (x, y)), RULES[name]) == [Partial()]


# ---------------------------------------------------------------- refusals


def refused(
    name: str,
    args: tuple[Any, ...],
    made: Sequence[tuple[Tensor, Activation, str]],
    function: Callable[..., Any] | None = None,
    degree: int = 2,
    **kwargs: Any,
) -> Mismatch:
    """How the call is refused; `made` says what is not whole, and which module made what."""
    output = None if name == "__setitem__" else (function or named(name))(*args, **kwargs)
    call = Call(name, args, kwargs, output, degree)
    for tensor, layout, producer in made:
        call.layouts[id(tensor)], call.producers[id(tensor)] = layout, (producer,)
    with pytest.raises(Mismatch) as caught:
        RULES[name](call)
    mismatch = caught.value
    assert any(layout == WHOLE or producer in mismatch.message for _, layout, producer in made)
    assert mismatch.fix
    return mismatch


X, Y = torch.randn(2, 8), torch.randn(2, 8)
ROWS, COLUMNS, HALVES = Shard(0, (2,)), Shard(1, (8,)), Shard(1, (4, 4))
HEADS = torch.randn(2, 4, 6, 8)
SQUARE = torch.randn(8, 8)
A, B = "blocks.0.to_q", "blocks.0.to_k"

UNARY_REFUSALS: dict[str, tuple[str, tuple[Any, ...], Activation, str, Repair]] = {
    "partial": ("gelu", (X,), Partial(), "gelu is not linear and is given a partial sum", KeepWhole((A,), "gelu")),
    "rounded": ("to", (X, torch.int32), Partial(), "to is not linear", KeepWhole((A,), "to")),
    "biased": ("linear", (X, torch.ones(3, 8), torch.ones(3)), Partial(), "not linear", KeepWhole((A,), "linear")),
    "constant": ("add", (X, 1.0), Partial(), "adds 1.0 on each rank to a partial", KeepWhole((A,), "add")),
    "bias": ("add", (X, Y), Partial(), "adds a replicated tensor of (2, 8)", KeepWhole((A,), "add")),
    "inverse": ("div", (1.0, X), Partial(), "not linear", KeepWhole((A,), "div")),
    "sum": ("sum", (X, 1), COLUMNS, "sum reduces over the sharded dim", KeepWhole((A,), "sum")),
    "softmax": ("softmax", (X, -1), COLUMNS, "softmax runs along the sharded dim", KeepWhole((A,), "softmax")),
    "norm": ("rms_norm", (X, (8,)), COLUMNS, "rms_norm normalises over", KeepWhole((A,), "rms_norm")),
    "pad": ("pad", (X, (1, 0)), COLUMNS, "pad pads the sharded dim", KeepWhole((A,), "pad")),
    "random": ("dropout", (X, 0.5), COLUMNS, "dropout draws random numbers", KeepWhole((A,), "dropout")),
    "view": ("reshape", (X, (4, 4)), Shard(1, (2, 6)), "reshape of (2, 8) as (4, 4) breaks shard(dim 1, blocks 2+6)",
             SplitView((A,), (2, 8), (4, 4), Shard(1, (2, 6)))),
    "squeeze": ("squeeze", (X, 0), ROWS, "squeeze of (2, 8)", SplitView((A,), (2, 8), (2, 8), ROWS)),
    "bytes": ("view", (X, torch.int16), COLUMNS, "breaks shard(dim 1)", SplitView((A,), (2, 8), (2, 16), COLUMNS)),
    "flattened": ("repeat_interleave", (X, 2), COLUMNS, "flattens", KeepWhole((A,), "repeat_interleave")),
    "unequally": ("repeat_interleave", (X, torch.ones(8, dtype=torch.int), 1), COLUMNS, "repeats unequally",
                  KeepWhole((A,), "repeat_interleave")),
    "split": ("split", (X, [2, 6], 1), COLUMNS, "split into [2, 6] cuts through", RefineBlocks((A,), (8,), (2, 6))),
    "chunk": ("chunk", (X, 2, 1), COLUMNS, "chunk into [4, 4] cuts through", RefineBlocks((A,), (8,), (4, 4))),
    "glu": ("glu", (X,), COLUMNS, "glu into [4, 4] cuts through", RefineBlocks((A,), (8,), (4, 4))),
    "uneven": ("glu", (X,), Shard(1, (2, 2, 4)), "halves with blocks [2, 2] and [4]",
               RefineBlocks((A,), (2, 2, 4), (4, 4))),
    "slice": ("__getitem__", (X, (..., slice(2, 6))), HALVES, "slice [2:6] cuts through shard(dim 1, blocks 4+4)",
              RefineBlocks((A,), (4, 4), (2, 4, 2))),
    "narrow": ("narrow", (X, 1, 0, 3), HALVES, "narrow into [3, 5] cuts", RefineBlocks((A,), (4, 4), (3, 5))),
    "stride": ("__getitem__", (X, (..., slice(0, None, 8))), COLUMNS, "slice [0:8:8] cuts",
               KeepWhole((A,), "__getitem__")),
    "unbind": ("unbind", (X, 1), COLUMNS, "unbind takes single indices", EqualBlocks((A,), 8)),
    "index": ("__getitem__", (X, (slice(None), 3)), COLUMNS, "single indices of the sharded dim", EqualBlocks((A,), 8)),
    "apart": ("__getitem__", (HEADS, (torch.tensor([0]), slice(None), torch.tensor([0]))), Shard(1, (4,)),
              "several tensors that are not side by side", KeepWhole((A,), "__getitem__")),
    "gather": ("gather", (X, 1, torch.zeros(2, 8, dtype=torch.long)), COLUMNS, "picks indices of",
               KeepWhole((A,), "gather")),
    "conv": ("conv1d", (HEADS[0], torch.randn(3, 6, 1)), Shard(1, (6,)), "filters along", KeepWhole((A,), "conv1d")),
    "weights": ("einsum", ("ij,kj->ik", X, Y), COLUMNS, "einsum combines shard(dim 1)",
                ShardToo((), 1, 2, COLUMNS)),
    "diagonal": ("einsum", ("ii->i", SQUARE), Shard(0, (8,)), "diagonal", KeepWhole((A,), "einsum")),
    "ellipsis": ("einsum", ("...i->...", X), COLUMNS, "ellipsis", KeepWhole((A,), "einsum")),
    "nonzero": ("where", (X > 0,), COLUMNS, "lists the indices", KeepWhole((A,), "where")),
    "heads": ("scaled_dot_product_attention", (HEADS, HEADS.clone(), HEADS.clone()), Shard(1, (4,)),
              "with whole k from an input, v from an input", ShardToo((), 1, 4, Shard(1, (4,)))),
}  # fmt: skip


@pytest.mark.parametrize("case", UNARY_REFUSALS)
def test_refusal_names_the_producer_and_carries_its_repair(case: str) -> None:
    name, args, layout, text, repair = UNARY_REFUSALS[case]
    x = next(tensors_in(args))
    function = getattr(Tensor, name) if name in ("view", "split", "__getitem__") else None
    mismatch = refused(name, args, [(x, layout, A)], function)
    assert text in mismatch.message
    assert A in mismatch.message
    assert mismatch.repair == repair


BINARY_REFUSALS: dict[str, tuple[str, tuple[Any, ...], Activation, Activation, str, Repair]] = {
    "blocks": ("mul", (X, Y), COLUMNS, HALVES, f"combines shard(dim 1) from {A} with shard(dim 1, blocks 4+4) from {B}",
               Align((A,), COLUMNS, (B,), HALVES)),
    "whole": ("add", (X, Y), COLUMNS, WHOLE, f"with a whole tensor of (2, 8) from {B}",
              ShardToo((B,), 1, 2, COLUMNS)),
    "in place": ("add_", (Y, X[:, :1]), WHOLE, ROWS, f"writes shard(dim 0) from {B} into replicated of (2, 8)",
                 ShardToo((A,), 0, 2, ROWS)),
    "cat": ("cat", ([X, Y], 1), COLUMNS, WHOLE, f"puts shard(dim 1) from {A} beside a whole tensor of (2, 8) from {B}",
            ShardToo((B,), 1, 2, COLUMNS)),
    "stack": ("stack", ([X, Y],), COLUMNS, WHOLE, "stack combines", ShardToo((B,), 1, 2, COLUMNS)),
    "picked": ("index_select", (X, 1, torch.tensor([0, 1])), WHOLE, Shard(0, (2,)), "beside its operand",
               KeepWhole((B,), "index_select")),
    "shape": ("view_as", (X, Y), COLUMNS, WHOLE, "the shape of replicated", KeepWhole((A,), "view_as")),
    "write whole": ("__setitem__", (X, ..., Y), COLUMNS, WHOLE, f"writes a whole tensor of (2, 8) from {B}",
                    ShardToo((B,), 1, 2, COLUMNS)),
    "write blocks": ("__setitem__", (X, ..., Y), COLUMNS, HALVES, f"writes shard(dim 1, blocks 4+4) from {B}",
                     Align((B,), HALVES, (A,), COLUMNS)),
    "write into whole": ("__setitem__", (X, ..., Y), WHOLE, COLUMNS, f"writes shard(dim 1) from {B} into replicated",
                         KeepWhole((B,), "__setitem__")),
    "write partial": ("__setitem__", (X, ..., Y), COLUMNS, Partial(), f"a partial sum from {B}",
                      KeepWhole((B,), "__setitem__")),
    "cat blocks": ("cat", ([X, Y],), COLUMNS, HALVES, f"with shard(dim 1, blocks 4+4) from {B}",
                                Align((A,), COLUMNS, (B,), HALVES)),
    "cat partial": ("cat", ([X, Y],), COLUMNS, Partial(), f"a partial sum from {B}", KeepWhole((B,), "cat")),
    "expand partial": ("expand_as", (X, Y), Partial(), COLUMNS, f"a partial sum from {A}",
                       KeepWhole((A,), "expand_as")),
    "square of partial": ("mul", (X, Y), Partial(), Partial(), f"a partial sum from {A}", KeepWhole((A,), "mul")),
    "product of partials": ("matmul", (X, SQUARE), Partial(), Partial(), f"a partial sum from {A}",
                            KeepWhole((A,), "matmul")),
    "linear": ("linear", (X, SQUARE), COLUMNS, WHOLE, f"unplanned Linear {B} is fed shard(dim 1) from {A}",
               PlanRowwise(B, (8,))),
    "matmul": ("matmul", (X, SQUARE), COLUMNS, WHOLE, f"a whole tensor of (8, 8) from {B}",
               ShardToo((B,), 0, 2, Shard(0, (8,)))),
    "two letters": ("matmul", (X, SQUARE), ROWS, COLUMNS, "matmul combines", Align((A,), ROWS, (B,), COLUMNS)),
}  # fmt: skip


@pytest.mark.parametrize("case", BINARY_REFUSALS)
def test_refusal_names_both_producers_and_carries_its_repair(case: str) -> None:
    name, args, first, second, text, repair = BINARY_REFUSALS[case]
    x, y = tensors_in(args)
    mismatch = refused(name, args, [(x, first, A), (y, second, B)])
    assert text in mismatch.message
    assert mismatch.repair == repair


@pytest.mark.parametrize(
    ("layouts", "mask", "text", "repair"),
    [
        ([Shard(1, (4,)), Shard(1, (2, 2)), Shard(1, (4,)), WHOLE], None, "with shard(dim 1, blocks 2+2) from k",
         Align(("q",), Shard(1, (4,)), ("k",), Shard(1, (2, 2)))),
        ([Shard(1, (4,))] * 3 + [WHOLE], (4, 6, 6), "whole mask of (4, 6, 6) from mask",
         ShardToo(("mask",), 0, 3, Shard(0, (4,)))),
        ([Shard(1, (4,))] * 3 + [Shard(0, (2, 2))], (4, 6, 6), "a mask that is shard(dim 0, blocks 2+2) from mask",
         Align(("q",), Shard(1, (4,)), ("mask",), Shard(0, (2, 2)))),
        ([WHOLE] * 3 + [Shard(0, (4,))], (4, 6, 6), "the mask is shard(dim 0) from mask",
         KeepWhole(("mask",), "scaled_dot_product_attention")),
        ([Shard(2, (6,))] * 3 + [WHOLE], None, "attends over the sharded dim",
         KeepWhole(("q",), "scaled_dot_product_attention")),
        ([Shard(1, (4,))] * 3 + [Partial()], (6, 6), "partial sum from mask",
         KeepWhole(("mask",), "scaled_dot_product_attention")),
    ],
)  # fmt: skip
def test_attention_refusal_says_which_operand(
    layouts: list[Activation], mask: tuple[int, ...] | None, text: str, repair: Repair
) -> None:
    tensors = [torch.randn(2, 4, 6, 8) for _ in "qkv"] + [torch.randn(mask or (6, 6))]
    args = tuple(tensors[: 3 + (mask is not None)])
    made = list(zip(args, layouts, ["q", "k", "v", "mask"], strict=False))
    mismatch = refused("scaled_dot_product_attention", args, made)
    assert text in mismatch.message
    assert mismatch.repair == repair


# ---------------------------------------------------------------- views


@pytest.mark.parametrize(
    ("source", "target", "shard", "degree", "result"),
    [
        pytest.param((2, 5, 32), (2, 5, 4, 8), Shard(2, (32,)), 4, Shard(2, (4,)), id="heads-split"),
        pytest.param((2, 5, 4, 8), (2, 5, 32), Shard(2, (4,)), 4, Shard(2, (32,)), id="heads-joined"),
        pytest.param(
            (2, 4, 5, 8), (8, 5, 8), Shard(1, (4,)), 2, Shard(0, (4, 4)), id="batch-and-heads-joined"
        ),
        pytest.param(
            (8, 5, 8), (2, 4, 5, 8), Shard(0, (4, 4)), 2, Shard(1, (4,)), id="batch-and-heads-split"
        ),
        pytest.param((2, 5, 96), (2, 5, 3, 4, 8), Shard(2, (32, 32, 32)), 4, Shard(3, (4,)), id="fused-qkv"),
        pytest.param((2, 5, 96), (2, 5, 3, 4, 8), Shard(2, (96,)), 2, None, id="fused-qkv-cut-as-one"),
        pytest.param(
            (2, 5, 96), (2, 5, 4, 3, 8), Shard(2, (96,)), 4, Shard(2, (4,)), id="heads-outside-of-qkv"
        ),
        pytest.param((2, 5, 96), (2, 5, 2, 6, 8), Shard(2, (32, 64)), 2, None, id="unequal-blocks-stacked"),
        pytest.param((1, 5, 240), (1, 5, 30, 8), Shard(2, (240,)), 4, None, id="30-heads-on-4-ranks"),
        pytest.param(
            (1, 5, 240), (1, 5, 30, 8), Shard(2, (240,)), 2, Shard(2, (30,)), id="30-heads-on-2-ranks"
        ),
        pytest.param((4, 6), (24,), Shard(0, (4,)), 2, Shard(0, (24,)), id="leading-dim-joined"),
        pytest.param((0, 4), (0, 2, 2), Shard(1, (4,)), 2, None, id="no-elements"),
    ],
)
def test_view_rule(
    source: tuple[int, ...], target: tuple[int, ...], shard: Shard, degree: int, result: Shard | None
) -> None:
    if source[0]:
        assert view_shard(source, target, shard, degree) == result


def factorings(number: int, ndim: int) -> Iterable[tuple[int, ...]]:
    if ndim == 1:
        yield (number,)
        return
    for first in (d for d in range(1, number + 1) if number % d == 0):
        yield from ((first, *rest) for rest in factorings(number // first, ndim - 1))


@pytest.mark.parametrize("number", [16, 24])
def test_view_rule_is_right_for_every_view_of_a_small_tensor(number: int) -> None:
    flat, seen = torch.arange(number), 0
    shapes = [s for ndim in (1, 2, 3) for s in factorings(number, ndim)]
    cuts = [(s, d, b) for s in shapes for d in range(len(s)) for b in cuttings(s[d]) if s[d] > 1]
    for source, dim, blocks in cuts:
        pieces = [cut(flat.reshape(source), Shard(dim, blocks), rank, 2) for rank in range(2)]
        for target in shapes:
            result = view_shard(source, target, Shard(dim, blocks), 2)
            if result is not None:
                seen += 1
                wanted = [cut(flat.reshape(target), result, rank, 2).flatten() for rank in range(2)]
                assert all(torch.equal(a.flatten(), b) for a, b in zip(pieces, wanted, strict=True))
                assert view_shard(target, source, result, 2) is not None
    assert seen > 1000


def cuttings(size: int) -> Iterable[tuple[int, ...]]:
    """Some ways to cut a dim in blocks that two ranks divide."""
    yield from ((size // n,) * n for n in (1, 2, 3, 4) if size % (2 * n) == 0)
    if size % 2 == 0 and size > 4:
        yield (2, size - 2)


@pytest.mark.parametrize(
    ("bounds", "blocks"),
    [
        ((0, 12, 1), (4, 8)),
        ((4, 12, 1), (8,)),
        ((0, 4, 1), (4,)),
        ((4, 4, 1), ()),
        ((0, 6, 1), None),
        ((2, 12, 1), None),
        ((1, 12, 2), (2, 4)),
        ((0, 8, 2), None),
        ((0, 12, 4), None),
    ],
)
def test_slice_keeps_whole_blocks_only(bounds: tuple[int, int, int], blocks: tuple[int, ...] | None) -> None:
    assert slice_blocks(Shard(0, (4, 8)), *bounds, degree=2) == blocks


# ---------------------------------------------------------------- repeats


def constant_in_runs(tensor: Tensor, factors: tuple[int, ...]) -> bool:
    runs = [in_runs(tensor, dim, r) for dim, r in enumerate(factors)]
    return all(torch.allclose(tensor, run, rtol=1e-4, equal_nan=True) for run in runs)


def in_runs(tensor: Tensor, dim: int, length: int) -> Tensor:
    """The tensor with each run of `length` indices set to its first."""
    return tensor.index_select(dim, torch.arange(tensor.shape[dim]) // length * length)


def drawn_repeats(name: str, seed: int) -> tuple[Tensor, tuple[int, ...] | None]:
    """The result of a function of whole tensors that repeat their values, and its claimed factors."""
    draw = Draw(name, seed)
    case = DRAWS[name](draw)
    factors = {}
    for tensor in tensors_in((case.args, case.kwargs)):
        if name == "__getitem__" and tensor is not case.args[0]:
            continue  # an index
        chosen = [draw.pick(1, size, *(d for d in (2, 4) if size % d == 0)) for size in tensor.shape]
        for dim, length in enumerate(chosen):
            tensor.copy_(in_runs(tensor, dim, length))
        factors[id(tensor)] = tuple(chosen)
    output = case.function(*case.args, **case.kwargs)
    return output, repeats(Call(name, case.args, case.kwargs, output, draw.degree, repeats=factors))


REPEATING = sorted((FACTORS.keys() | CONSTANTS | {"__setitem__"}) & RULES.keys() - VALUES_UNDEFINED)


@pytest.mark.parametrize("name", REPEATING)
def test_repeats_are_real(name: str) -> None:
    found = 0
    for seed in range(80 if name == "__getitem__" else 20):  # most indices repeat nothing
        output, factors = drawn_repeats(name, seed)
        if factors is not None:
            assert constant_in_runs(output, factors)
            found += any(r > 1 for r in factors)
    assert found >= PASSES


def test_false_repeats_are_noticed() -> None:
    assert not constant_in_runs(torch.arange(4.0), (2,))
    assert constant_in_runs(torch.tensor([1.0, 1.0, 2.0, 2.0]), (2,))


@pytest.mark.parametrize("name", ["zeros", "ones", "full"])
def test_new_constant_repeats_all_along(name: str) -> None:
    assert repeats(Call(name, ((2, 3),), {}, torch.zeros(2, 3), 2)) == (2, 3)


def test_nothing_is_known_to_repeat_in_random_numbers_ranges_and_lists() -> None:
    x = torch.zeros(4)
    assert repeats(Call("split", (x, 2), {}, x.split(2), 2, repeats={id(x): (4,)})) is None
    assert repeats(Call("dropout", (x,), {}, x, 2, repeats={id(x): (4,)})) is None
    assert repeats(Call("arange", (4,), {}, torch.arange(4), 2)) is None


@pytest.mark.parametrize(
    ("source", "target", "factors", "result"),
    [
        ((2, 4, 6), (8, 6), (1, 4, 1), (4, 1)),
        ((8, 6), (2, 4, 6), (4, 1), (1, 4, 1)),
        ((8, 6), (4, 2, 6), (4, 1), (2, 2, 1)),
        ((2, 4, 6), (2, 24), (1, 4, 6), (1, 24)),
        ((2, 4, 6), (2, 24), (1, 4, 1), (1, 1)),
        ((2, 4, 6), (2, 24), (1, 1, 6), (1, 6)),
        ((0, 4), (4, 0), (1, 4), (1, 1)),
    ],
)
def test_view_keeps_runs(
    source: tuple[int, ...], target: tuple[int, ...], factors: tuple[int, ...], result: tuple[int, ...]
) -> None:
    assert view_repeats(source, target, factors) == result


def test_mask_expanded_over_heads_meets_sharded_heads() -> None:
    q = torch.randn(2, 4, 6, 8)
    mask = torch.randn(2, 1, 6, 6)
    wide = mask.expand(2, 4, 6, 6)
    factors = repeats(Call("expand", (mask, 2, 4, 6, 6), {}, wide, 2))
    assert factors == (1, 4, 1, 1)
    shard = Shard(1, (4,))
    call = Call(
        "scaled_dot_product_attention", (q, q, q, wide), {}, q, 2, {id(q): shard}, {}, {id(wide): factors}
    )
    assert RULES[call.name](call) == shard


def _masked_scores(mask: Tensor, factor: int) -> Activation:
    """Scores of 3 samples of 4 heads, which are merged into one dim, and a mask of them that repeats in runs."""
    scores = torch.randn(12, 5, 5)
    call = Call("add", (scores, mask), {}, scores, 2, {id(scores): Shard(0, (4, 4, 4))})
    call.repeats[id(mask)] = (factor, 1, 1)
    return RULES[call.name](call)


def test_mask_repeated_for_each_head_of_a_sample_meets_the_heads_of_all_samples() -> None:
    mask = torch.randn(3, 5, 5)
    wide = mask.repeat_interleave(4, dim=0)
    assert repeats(Call("repeat_interleave", (mask, 4), {"dim": 0}, wide, 2)) == (4, 1, 1)
    assert _masked_scores(wide, 4) == Shard(0, (4, 4, 4))


@pytest.mark.parametrize("factor", [1, 2, 3, 6])
def test_mask_whose_values_change_within_a_sample_does_not(factor: int) -> None:
    with pytest.raises(Mismatch):
        _masked_scores(torch.randn(12, 5, 5), factor)


@pytest.mark.parametrize("name", ["add", "mul", "lerp"])
def test_runs_that_are_not_those_of_the_blocks_are_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elementwise, "repeats_along_blocks", lambda blocks, run: True)
    with pytest.raises(AssertionError):
        prove(name, RULES[name])
