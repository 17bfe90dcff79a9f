"""What a rank computes of a batch, and whether that may be done: the samples must not depend on each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shardwise.errors import UnsupportedState
from shardwise.runtime.group import TensorParallelGroup


@dataclass(frozen=True)
class Like:
    """The shape, dtype and device of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        """Return those of a tensor."""
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        """Return a contiguous tensor with any values."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def __str__(self) -> str:
        """Return dtype and shape, which are the same on all ranks."""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True)
class Outputs:
    """What a model returns for inputs of some shapes, but for the values of the tensors."""

    leaves: tuple[Any, ...]
    """`Like` in place of each tensor."""
    spec: TreeSpec

    @classmethod
    def of(cls, outputs: Any) -> Outputs:
        """Return what is known of a model once it has returned `outputs`."""
        leaves, spec = tree_flatten(outputs)
        return cls(tuple(Like.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves), spec)

    @property
    def likes(self) -> list[Like]:
        """Those of the tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Like)]

    def empty(self) -> list[Tensor]:
        """Return memory for the tensors."""
        return [like.empty() for like in self.likes]

    def tensors(self, outputs: Any) -> list[Tensor]:
        """Return the tensors in `outputs`, contiguous.

        Raises:
            UnsupportedState: they are others than before.
        """
        tensors = [leaf.contiguous() for leaf in tree_flatten(outputs)[0] if isinstance(leaf, Tensor)]
        found, known = ([str(like) for like in likes] for likes in (map(Like.of, tensors), self.likes))
        if found != known:
            raise UnsupportedState(
                f"a model returned {', '.join(found)} for inputs of the shapes for which it returned "
                f"{', '.join(known)} before: its calls cannot be dealt to ranks, which must know what to expect"
            )
        return tensors

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """Return what the model returns, with these tensors."""
        given = iter(tensors)
        return tree_unflatten(
            [next(given) if isinstance(leaf, Like) else leaf for leaf in self.leaves], self.spec
        )

    def __str__(self) -> str:
        """Return dtypes and shapes."""
        return ", ".join(map(str, self.likes))


@dataclass(frozen=True)
class Share:
    """The samples of a batch that a rank computes."""

    batch: int
    start: int
    length: int

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any], group: TensorParallelGroup) -> Share | None:
        """Return this rank's share of what a model is given, or None if the ranks do not divide the batch.

        The first argument is what is denoised: a tensor whose dim 0 is the batch, or a list of a tensor per sample.
        """
        first = next(iter([*args, *kwargs.values()]), None)
        batch = (
            len(first) if isinstance(first, Tensor | list) and (isinstance(first, list) or first.dim()) else 0
        )
        if batch == 0 or batch % group.degree:
            return None
        length = batch // group.degree
        return cls(batch, group.rank * length, length)

    def cut(self, value: Any) -> Any:
        """Return this share of every tensor and list of tensors in `value` that has an entry for each sample."""
        if isinstance(value, Tensor):
            return value.narrow(0, self.start, self.length) if self._is_batch(value) else value
        if isinstance(value, dict):
            return {key: self.cut(item) for key, item in value.items()}
        if type(value) not in (list, tuple):
            return value
        if len(value) == self.batch and not any(map(self._is_batch, value)) and _tensors(value):
            return value[self.start : self.start + self.length]
        return type(value)(self.cut(item) for item in value)

    def _is_batch(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 0 and len(value) == self.batch

    def parts(self, outputs: Any, whole: Outputs) -> list[Tensor]:
        """Return the tensors that a model returned for this share, to be joined over the ranks.

        Raises:
            UnsupportedState: they do not become those of the whole batch.
        """
        tensors = [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, Tensor)]
        if (
            len(tensors) == self.length and len(whole.likes) == self.batch
        ):  # a list with a tensor for each sample
            wanted = [like.shape for like in whole.likes[self.start : self.start + self.length]]
            alike = len({like.shape for like in whole.likes}) == 1
        else:
            wanted = [torch.Size((self.length, *like.shape[1:])) for like in whole.likes]
            alike = all(like.shape[:1] == (self.batch,) for like in whole.likes)
        if not alike or [t.shape for t in tensors] != wanted:
            raise UnsupportedState(f"for a part of the batch it returns {[tuple(t.shape) for t in tensors]}")
        return tensors

    def join(self, parts: Sequence[Tensor], whole: Outputs, group: TensorParallelGroup) -> list[Tensor]:
        """Return the tensors of the whole batch, the same on every rank."""
        if len(parts) == len(whole.likes):
            return [_gather(part, group) for part in parts]
        return list(_gather(torch.stack(list(parts)), group).unbind())


def distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the norm of the difference over that of what is expected, the largest of all tensors."""
    errors = [
        ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()
        for a, b in zip(found, expected, strict=True)
    ]
    return max(errors, default=0.0)


def rounding(tensors: Sequence[Tensor]) -> float:
    """Return how far apart a batch may be computed whole and in parts: other kernels round in another order.

    Measured in fp32 up to 2e-6; samples that depend on each other are apart by much of their size.
    """
    eps = [torch.finfo(tensor.dtype).eps for tensor in tensors if tensor.is_floating_point()]
    return max(8 * max(eps, default=0.0), 1e-4)


def _tensors(value: Sequence[Any]) -> bool:
    return all(isinstance(item, Tensor) for item in value)


def _gather(part: Tensor, group: TensorParallelGroup) -> Tensor:
    rows = part.new_empty(group.degree, *part.shape)
    group.all_gather(rows, part.contiguous())
    return rows.flatten(0, 1)
