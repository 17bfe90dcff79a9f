"""FlexAttention, which refuses the meta device, for the check: the same shapes, as a function that has a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from inspect import signature
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention
from torch.overrides import TorchFunctionMode

from shardwise.plan.rules import tensors_in


@contextmanager
def plain_flex_attention() -> Iterator[None]:
    """Let FlexAttention of meta tensors be plain attention, and block masks be made of them."""
    stand_in = partial(_attention, flex_attention.flex_attention)
    own: Any = getattr(flex_attention, _TRANSPOSE, None)
    with (
        mock.patch.object(flex_attention, "flex_attention", stand_in),
        mock.patch.object(flex_attention, _TRANSPOSE, partial(_transposed, own), create=True),
    ):
        yield


_TRANSPOSE = "_transpose_ordered"
"""torch's own function that lists, for its backward, the blocks of queries that each block of keys is seen by."""


def _transposed(original: Callable[..., Any], numbers: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return tables of the transposed shapes; torch makes them head by head in a way that no layout can follow."""
    if not indices.is_meta:
        return original(numbers, indices)  # type: ignore[no-any-return]
    return indices[..., 0, :], indices.transpose(-2, -1)


def _attention(original: Callable[..., Any], query: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return attention of each head; which keys a query sees is left out, as it changes no shape.

    Raises:
        NotImplementedError: what a head sees may depend on its number, which is another one on a rank.
    """
    if not query.is_meta:
        return original(query, *args, **kwargs)
    call = signature(original).bind(query, *args, **kwargs).arguments
    mask = call.get("block_mask")
    more = [name for name in ("score_mod", "return_lse", "return_aux") if call.get(name)]
    if more or _reads_the_head(mask):
        what = ", ".join(more) or "a mask that depends on the head"
        raise NotImplementedError(f"FlexAttention with {what} cannot be followed")
    scale, grouped = call.get("scale"), call.get("enable_gqa", False)
    return F.scaled_dot_product_attention(
        query, call["key"], call["value"], attn_mask=_heads_of(mask), scale=scale, enable_gqa=grouped
    )


def _reads_the_head(mask: Any) -> bool:
    """Return whether the function of a block mask reads the number of the head."""
    if mask is None:
        return False
    batch, head, query, key = (torch.zeros((), dtype=torch.long) for _ in range(4))
    with _Watch(head) as watch:
        mask.mask_mod(batch, head, query, key)
    return watch.seen  # type: ignore[no-any-return]


def _heads_of(mask: Any) -> Tensor | None:
    """Return a mask that has the heads of a block mask, and how they lie on the ranks: one number for each head."""
    if mask is None:
        return None
    parts = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    tables: list[Tensor] = [part.flatten(2)[:, :, :1, None] >= 0 for part in parts if part is not None]
    return reduce(torch.logical_and, tables)


class _Watch(TorchFunctionMode):
    """Sees whether any function takes a tensor.

    Attributes:
        seen: Whether one has.
    """

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.seen = False
        self._tensor = tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function and look at its arguments."""
        self.seen |= any(tensor is self._tensor for tensor in tensors_in((args, kwargs or {})))
        return func(*args, **(kwargs or {}))
