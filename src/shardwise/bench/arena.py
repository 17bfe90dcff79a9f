"""Memory that is in place before a load begins, as that of a device is: no page is mapped while it is filled."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64


class Arena:
    """Gives out pieces of one block of memory that has been written to, one after another."""

    def __init__(self, nbytes: int) -> None:
        self._block = torch.zeros(nbytes, dtype=torch.uint8)
        self._block.fill_(1)  # zeros alone may be pages that do not exist yet
        self._used = 0

    def empty(self, shape: Any, *, dtype: torch.dtype, device: Any = None) -> Tensor:
        """Return the next piece, as `torch.empty` would return new memory."""
        start, end = self._used, self._used + prod(shape) * dtype.itemsize
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        return self._block[start:end].view(dtype).view(shape)

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor, in the next piece."""
        return self.empty(tuple(tensor.shape), dtype=tensor.dtype).copy_(tensor.detach())
