"""FlexAttention, which refuses the meta device, for the check: the same shapes, as a function that has a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
    """Let FlexAttention of meta tensors be plain attention."""
    stand_in = partial(_attention, flex_attention.flex_attention)
    with mock.patch.object(flex_attention, "flex_attention", stand_in):
        yield


def _attention(original: Callable[..., Any], query: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return attention of each head; which keys a query sees is left out, as it changes no shape.

    Raises:
        NotImplementedError: what a head sees may depend on its number, which is another one on a rank.
    """
    if not query.is_meta:
        return original(query, *args, **kwargs)
    call = signature(original).bind(query, *args, **kwargs).arguments
    more = [name for name in ("score_mod", "return_lse", "return_aux") if call.get(name)]
    if more or _tells_heads_apart(call.get("block_mask")):
        what = ", ".join(more) or "a mask that depends on the head"
        raise NotImplementedError(f"FlexAttention with {what} cannot be followed")
    scale, grouped = call.get("scale"), call.get("enable_gqa", False)
    return F.scaled_dot_product_attention(query, call["key"], call["value"], scale=scale, enable_gqa=grouped)


def _tells_heads_apart(mask: Any) -> bool:
    """Return whether a block mask has blocks for each head, or its function reads the number of the head."""
    if mask is None:
        return False
    batch, head, query, key = (torch.zeros((), dtype=torch.long) for _ in range(4))
    with _Watch(head) as watch:
        mask.mask_mod(batch, head, query, key)
    return watch.seen or mask.kv_num_blocks.shape[1] > 1  # type: ignore[no-any-return]


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
