"""What the commonest functions return on the meta device, without torch's own way to it.

Torch finds the shape of a sum or a norm by a chain of Python functions, a hundred times as long as making the tensor;
that was half of what a forward without weights took. A shortcut is taken only where the output is plain: contiguous
floating tensors of one dtype, of shapes that fit. Everything else, errors above all, is left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def shortcut(function: Callable[..., Any], args: Any, kwargs: Any) -> Tensor | None:
    """Return what a function gives without running it, or None where it has to be run.

    Args:
        function: A torch function, as a torch-function mode sees it.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    make = _SHORTCUTS.get(function)
    if make is None or not args or not isinstance(args[0], Tensor) or not args[0].is_meta:
        return None
    return make(*args, **kwargs)


def _alike(*tensors: Any) -> bool:
    """Return whether values are meta tensors of one floating dtype."""
    return all(
        isinstance(t, Tensor) and t.is_meta and t.dtype.is_floating_point and t.dtype == tensors[0].dtype
        for t in tensors
    )


def _plain(*tensors: Any) -> bool:
    """Return whether values are contiguous meta tensors of one floating dtype."""
    return _alike(*tensors) and all(tensor.is_contiguous() for tensor in tensors)


def _new(like: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.empty(tuple(shape), dtype=like.dtype, device="meta")


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Return whether a shape is broadcast to another without changing that."""
    return len(shape) <= len(to) and all(
        a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False)
    )


def _binary(x: Tensor, y: Any, **options: Any) -> Tensor | None:
    if options or not _plain(x, *([y] if isinstance(y, Tensor) else [])):
        return None
    if type(y) in (int, float):
        return _new(x, x.shape)
    if not isinstance(y, Tensor):
        return None
    for one, other in ((x, y), (y, x)):
        if _broadcasts(other.shape, one.shape):
            return _new(x, one.shape)
    return None


def _unary(x: Tensor, *more: Any, **options: Any) -> Tensor | None:
    return _new(x, x.shape) if _plain(x) and not (more or options) else None


def _gelu(x: Tensor, approximate: str = "none") -> Tensor | None:
    return _new(x, x.shape) if _plain(x) and approximate in ("none", "tanh") else None


def _silu(x: Tensor, inplace: bool = False) -> Tensor | None:
    return _new(x, x.shape) if _plain(x) and not inplace else None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    fits = _plain(x, weight) and weight.ndim == 2 and x.ndim > 1 and x.shape[-1] == weight.shape[1]
    if not fits or (bias is not None and not (_plain(x, bias) and bias.shape == weight.shape[:1])):
        return None
    return _new(x, (*x.shape[:-1], weight.shape[0]))


def _norm(x: Tensor, normalized_shape: Any, *weights: Tensor | None) -> Tensor | None:
    shape = tuple(normalized_shape)
    fits = _plain(x) and 0 < len(shape) <= x.ndim and shape == x.shape[-len(shape) :]
    if not fits or any(w is not None and not (_plain(x, w) and w.shape == shape) for w in weights):
        return None
    return _new(x, x.shape)


def _layer_norm(
    x: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor | None:
    return _norm(x, normalized_shape, weight, bias)


def _rms_norm(
    x: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Tensor | None:
    return _norm(x, normalized_shape, weight)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if not _alike(q, k, v) or q.ndim != 4 or k.ndim != 4 or enable_gqa:
        return None
    if (*q.shape[:2], q.shape[3]) != (*k.shape[:2], k.shape[3]) or k.shape[:3] != v.shape[:3]:
        return None
    if attn_mask is not None:
        fits = _broadcasts(attn_mask.shape, (*q.shape[:3], k.shape[2]))
        if is_causal or not fits or not attn_mask.is_meta or attn_mask.dtype not in (torch.bool, q.dtype):
            return None
    return _new(q, (*q.shape[:3], v.shape[3]))


_BINARY = ("add", "div", "mul", "sub")
_UNARY = ("cos", "exp", "rsqrt", "sigmoid", "sin", "sqrt", "square", "tanh")

_SHORTCUTS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    F.gelu: _gelu,
    F.layer_norm: _layer_norm,
    F.linear: _linear,
    F.rms_norm: _rms_norm,
    F.scaled_dot_product_attention: _attention,
    F.silu: _silu,
    **{getattr(of, name): _binary for of in (torch, Tensor) for name in _BINARY},
    **{getattr(of, name): _unary for of in (torch, Tensor) for name in _UNARY},
}
