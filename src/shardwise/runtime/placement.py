"""Where a model's weights are: a report per parameter, counted from the tensors that are really held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.plan.layout import Layout, Replicated, Shard
from shardwise.runtime.shard import named_tensors, sharding_of


@dataclass(frozen=True)
class TensorPlacement:
    """One parameter or buffer on this rank."""

    name: str
    kind: str
    """`"parameter"` or `"buffer"`."""
    layout: Layout
    dtype: torch.dtype
    device: torch.device
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    bytes: int
    """Bytes held by this rank; of a quantized parameter, those of its numbers and of its scales."""
    global_bytes: int
    """Bytes of the whole tensor."""


@dataclass(frozen=True)
class Placement:
    """A printable report of where a model's parameters and buffers are; a shared tensor is listed once.

    `weight_bytes` and its relatives count parameters; buffers are rows of their own.
    """

    model: str
    tp_degree: int
    rank: int
    tensors: tuple[TensorPlacement, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters that this rank holds."""
        return sum(t.bytes for t in self._parameters())

    @property
    def weight_bytes_one_process(self) -> int:
        """Bytes of parameters of the whole model."""
        return sum(t.global_bytes for t in self._parameters())

    @property
    def replicated_bytes(self) -> int:
        """Bytes of parameters that every rank holds whole."""
        return sum(t.bytes for t in self._parameters() if not isinstance(t.layout, Shard))

    @property
    def replicated_share(self) -> float:
        """Share of this rank's parameter bytes that is replicated, 0 to 1."""
        return self.replicated_bytes / self.weight_bytes if self.weight_bytes else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data that `json` can write."""
        return {
            "model": self.model,
            "tp_degree": self.tp_degree,
            "rank": self.rank,
            "weight_bytes": self.weight_bytes,
            "weight_bytes_one_process": self.weight_bytes_one_process,
            "replicated_bytes": self.replicated_bytes,
            "replicated_share": self.replicated_share,
            "tensors": [_row(t) for t in self.tensors],
        }

    def __str__(self) -> str:
        """Return a table, one line per tensor, with the totals last."""
        rows = [(t.name, _shape(t), str(t.dtype).removeprefix("torch."), str(t.layout)) for t in self.tensors]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]])
            for row in rows
        ]
        mib = 2**20
        return "\n".join(
            [
                f"{self.model}, rank {self.rank} of {self.tp_degree}",
                *lines,
                f"this rank {self.weight_bytes / mib:.2f} MiB of {self.weight_bytes_one_process / mib:.2f} MiB, "
                f"{self.replicated_share:.1%} of it replicated",
            ]
        )

    def _parameters(self) -> Iterator[TensorPlacement]:
        return (t for t in self.tensors if t.kind == "parameter")


def placement(model: nn.Module) -> Placement:
    """Return where each parameter and buffer of `model` is, on this rank.

    Works on any model: an ordinary one is reported as replicated at degree 1.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    layouts: dict[str, Layout] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    degree, rank = 1, 0
    for path, module in model.named_modules():
        sharding, prefix = sharding_of(module), f"{path}." if path else ""
        for name, (layout, shape) in getattr(module, "tp_adapters", {}).items():
            layouts[prefix + name], shapes[prefix + name] = layout, shape
        if sharding is not None:
            layouts |= {prefix + name: layout for name, layout in sharding.plan.layouts.items()}
            shapes |= {prefix + name: shape for name, shape in sharding.shapes.items()}
            degree, rank = sharding.group.degree, sharding.group.rank
    seen: set[int] = set()
    rows = []
    for name, tensor in named_tensors(model):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            planned = name.replace(
                ".base_layer.", "."
            )  # as the plan knows a layer that has an adapter around it
            layout = layouts.get(name, layouts.get(planned, Replicated()))
            rows.append(_place(name, tensor, layout, shapes.get(name, shapes.get(planned))))
    return Placement(type(model).__name__, degree, rank, tuple(rows))


def _place(name: str, tensor: Tensor, layout: Layout, shape: tuple[int, ...] | None) -> TensorPlacement:
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    local = tuple(tensor.shape)
    whole = shape or local
    parts = [(tuple(part.shape), part.dtype.itemsize) for part in _inner(tensor)]
    held = sum(prod(part) * size for part, size in parts)
    total = sum(prod(_widened(part, local, whole)) * size for part, size in parts)
    return TensorPlacement(name, kind, layout, tensor.dtype, tensor.device, local, whole, held, total)


def _inner(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that a tensor consists of: itself, or the numbers and scales of a quantized one."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _inner(getattr(tensor, name))


def _widened(inner: tuple[int, ...], local: tuple[int, ...], whole: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a part of a tensor that is `local` here, as it is in the `whole` one."""
    if len(inner) != len(local):
        return (prod(inner) * prod(whole) // max(1, prod(local)),)
    sizes = zip(inner, local, whole, strict=True)
    return tuple(w if n == m else n if n == 1 else n * w // max(1, m) for n, m, w in sizes)


def _row(t: TensorPlacement) -> dict[str, Any]:
    blocks = list(t.layout.blocks) if isinstance(t.layout, Shard) else None
    return {
        "name": t.name,
        "kind": t.kind,
        "layout": "shard" if isinstance(t.layout, Shard) else "replicated",
        "dim": t.layout.dim if isinstance(t.layout, Shard) else None,
        "blocks": blocks,
        "local_shape": list(t.local_shape),
        "global_shape": list(t.global_shape),
        "dtype": str(t.dtype).removeprefix("torch."),
        "device": str(t.device),
        "bytes": t.bytes,
        "global_bytes": t.global_bytes,
    }


def _shape(t: TensorPlacement) -> str:
    local, whole = ("x".join(map(str, shape)) for shape in (t.local_shape, t.global_shape))
    return local if local == whole else f"{local} of {whole}"
