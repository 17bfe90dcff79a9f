"""Where rounding ends and a mistake begins: the bound, and the error it is put to.

Sharding changes the order in which products are added, and nothing else. A sum of `products` that is
added in another order moves by about `sqrt(products)` units of the dtype's `eps`; `degree` partial sums are each
rounded once more before they are added. So, for a module in all,

    bound = MARGIN * eps * (sqrt(products) + degree)

relative to the largest absolute value of the output. `products` is the width of the whole module, not a rank's part of
it: the input features of each Linear and convolution in it, added up. It grows with the number of layers, as errors
do that pass through one layer after another. `eps` is never finer than that of fp32: diffusers' models compute
norms and rotary embeddings in fp32, whatever their dtype.

In half precision `eps` is so coarse that a mistake can hide below any such bound. There, both the ranks and one
process are compared with fp32 (same weights, same input), and the ranks may be

    HALF_RATIO * (distance of one process) + HALF_FLOOR * eps * sqrt(degree)

away from it. The floor is for what the ranks do and one process does not: rounding partial sums.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from math import inf, sqrt

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

MARGIN = 4.0
"""14 times the largest error of a right plan over the shipped families at degrees 2 and 4; mistakes are 10^4 bounds."""

HALF_RATIO = 1.5
HALF_FLOOR = 1.0
"""Twice what was measured."""

HALF = (torch.bfloat16, torch.float16)
"""The dtypes that are judged by their distance to fp32."""


def rounding_bound(whole: nn.Module, dtype: torch.dtype, degree: int, one_process: float | None) -> float:
    """Return up to which error a sharded module may be called equal to `whole`; see the head of this file.

    Args:
        whole: The module of one process; its weights may be on any device, meta too.
        dtype: What the module computes in.
        degree: Number of ranks.
        one_process: In half precision, the distance of `whole` to fp32.
    """
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    if one_process is not None:
        return HALF_RATIO * one_process + HALF_FLOOR * eps * sqrt(degree)
    return MARGIN * eps * (sqrt(products(whole)) + degree)


def products(module: nn.Module) -> int:
    """Return over how many products one path through the module sums: the input sizes of its weights, added up."""
    return sum(p.numel() // p.shape[0] for p in module.parameters() if p.dim() >= 2 and len(p))


def relative_error(actual: object, expected: object) -> tuple[float, str]:
    """Return how far the tensors in `actual` are from those in `expected`, and what differs where it is infinite.

    The largest absolute difference of each tensor is relative to the largest absolute value expected in it.
    """
    ours, theirs = tensors(actual), tensors(expected)
    if len(ours) != len(theirs):
        return inf, f"{len(ours)} output tensors instead of {len(theirs)}"
    errors = [_error(a, e) for a, e in zip(ours, theirs, strict=True)]
    return max(errors, key=lambda error: error[0], default=(0.0, ""))


def tensors(tree: object) -> list[Tensor]:
    """Return the tensors in nested containers and dataclasses, in order."""
    found: list[Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors([getattr(leaf, field.name) for field in fields(leaf)])
    return found


def _error(actual: Tensor, expected: Tensor) -> tuple[float, str]:
    if actual.shape != expected.shape:
        return inf, f"an output of shape {list(actual.shape)} instead of {list(expected.shape)}"
    if not expected.numel():
        return 0.0, ""
    if not (expected.is_floating_point() or expected.is_complex()):
        return (0.0, "") if torch.equal(actual, expected) else (inf, "other integers or booleans")
    a, e = (torch.view_as_real(t) if t.is_complex() else t for t in (actual, expected))
    a, e = a.double(), e.double()
    # NaN and infinity count as equal to themselves: a mask of -inf is no mistake.
    difference = torch.where((a == e) | (a.isnan() & e.isnan()), 0.0, (a - e).abs()).max().item()
    if difference == 0:
        return 0.0, ""
    scale = e[e.isfinite()].abs().max().item() if e.isfinite().any() else 0.0
    if not difference < inf or scale == 0:
        return inf, "values that are not finite, or not zero, where one process has others"
    return difference / scale, ""
