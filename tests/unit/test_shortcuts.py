"""Shortcuts on the meta device: each gives what torch gives, or leaves the call to torch."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.plan import shortcuts
from shardwise.plan.shortcuts import shortcut

TRIALS = 40


class Draw:
    """Random meta tensors: plain ones, and now and then others."""

    def __init__(self, seed: str) -> None:
        self.random = Random(seed)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def sizes(self, ndim: int) -> list[int]:
        return [self.random.choice([1, 2, 3, 5]) for _ in range(ndim)]

    def tensor(self, *sizes: int) -> Tensor:
        dtype = self.random.choice([torch.bfloat16, torch.float64, torch.int64]) if self.chance(0.1) else None
        device = "cpu" if self.chance(0.05) else "meta"
        if len(sizes) > 1 and self.chance(0.15):
            return torch.ones(sizes[::-1], dtype=dtype, device=device).permute(*range(len(sizes))[::-1])
        return torch.ones(sizes, dtype=dtype, device=device)

    def near(self, sizes: list[int]) -> list[int]:
        """Sizes that broadcast with others, most of the time."""
        near = [size if self.chance(0.7) else 1 for size in sizes[self.random.choice([0, 0, 1]) :]]
        return [size + 1 if self.chance(0.05) else size for size in near]


Case = tuple[tuple[Any, ...], dict[str, Any]]


def _binary(draw: Draw) -> Case:
    sizes = draw.sizes(draw.random.choice([1, 2, 3, 4]))
    x, y = draw.tensor(*sizes), draw.tensor(*draw.near(sizes))
    args = draw.random.choice([(x, y), (x, y), (y, x), (x, 3), (x, 0.5), (x, True), (x, 1j)])
    return args, {"out": None} if draw.chance(0.05) else {}


def _unary(draw: Draw) -> Case:
    return (draw.tensor(*draw.sizes(3)),), {}


def _gelu(draw: Draw) -> Case:
    return _unary(draw)[0], draw.random.choice([{}, {"approximate": "tanh"}])


def _silu(draw: Draw) -> Case:
    return _unary(draw)[0], draw.random.choice([{}, {"inplace": True}])


def _linear(draw: Draw) -> Case:
    *lead, inside = draw.sizes(draw.random.choice([1, 2, 3, 4]))
    outside = 4
    weight = draw.tensor(*draw.near([outside, inside]))
    bias = draw.random.choice([None, draw.tensor(outside), draw.tensor(3)])
    return (draw.tensor(*lead, inside), weight, bias), {}


def _norm(draw: Draw, biased: bool) -> Case:
    sizes = draw.sizes(3)
    shape = sizes[-draw.random.choice([1, 1, 2]) :]
    names = ["weight", "bias"] if biased else ["weight"]
    weights = {name: draw.random.choice([None, draw.tensor(*shape)]) for name in names}
    if draw.chance(0.1):
        shape = [7]
    return (draw.tensor(*sizes), shape), {**weights, "eps": 1e-6}


def _attention(draw: Draw) -> Case:
    batch, heads, queries, keys, width = *draw.sizes(2), 5, 7, 4
    q, k, v = (draw.tensor(batch, heads, n, width) for n in (queries, keys, keys))
    mask = draw.random.choice([None, draw.tensor(*draw.near([batch, heads, queries, keys]))])
    return (q, k, v), {"attn_mask": mask, "is_causal": draw.chance(0.1)}


CASES: dict[Callable[..., Any], Callable[[Draw], Case]] = {
    F.gelu: _gelu,
    F.layer_norm: lambda draw: _norm(draw, biased=True),
    F.linear: _linear,
    F.rms_norm: lambda draw: _norm(draw, biased=False),
    F.scaled_dot_product_attention: _attention,
    F.silu: _silu,
    **{getattr(of, name): _binary for of in (torch, Tensor) for name in shortcuts._BINARY},
    **{getattr(of, name): _unary for of in (torch, Tensor) for name in shortcuts._UNARY},
}


def _compare(function: Callable[..., Any], seed: str) -> bool:
    """Return whether a random call is cut short; then it has to give what torch gives."""
    args, kwargs = CASES[function](Draw(seed))
    short = shortcut(function, args, kwargs)
    if short is None:
        return False
    whole = function(*args, **kwargs)
    assert (short.shape, short.dtype, short.device) == (whole.shape, whole.dtype, whole.device), (
        args,
        kwargs,
    )
    # Behind attention the kernels' strides are set in any case.
    if function is not F.scaled_dot_product_attention:
        assert short.is_contiguous() == whole.is_contiguous(), (args, kwargs)
    return True


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__qualname__)
def test_shortcut_gives_what_torch_gives_and_leaves_the_rest_to_it(function: Callable[..., Any]) -> None:
    taken = [_compare(function, f"{function} {trial}") for trial in range(TRIALS)]
    assert sum(taken) > TRIALS // 10
    assert not all(taken)


def test_every_shortcut_is_tried() -> None:
    assert set(shortcuts._SHORTCUTS) == set(CASES)


def test_the_comparison_sees_a_shortcut_that_ignores_a_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortcuts, "_plain", shortcuts._alike)
    x = torch.ones(3, 5, device="meta").T
    short = shortcut(torch.add, (x, 1), {})
    assert short is not None
    assert short.is_contiguous() != torch.add(x, 1).is_contiguous()


def test_other_functions_are_left_to_torch() -> None:
    x = torch.ones(3, 5, device="meta")
    assert shortcut(torch.softmax, (x, -1), {}) is None
    assert shortcut(torch.add, (torch.ones(3), 1), {}) is None  # it has values
