"""Tensors that another rank may still be computing, and the round of calls that all of them are exchanged with.

A call that is dealt to one rank returns `Pending` on every rank, its own included. Nothing waits until one of them is
read; then everything outstanding is exchanged at once. All ranks run the same code, so they read at the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.runtime.group import TensorParallelGroup


@dataclass
class GuidanceReport:
    """What has become of the calls of the models that `spread_guidance` was given; printed, it says so in words."""

    calls: int = 0
    everywhere: int = 0
    """Computed by every rank: the first of each kind, from which the shapes of outputs are learned."""
    overlapped: int = 0
    """Computed by one rank while another computed another."""
    split: int = 0
    """Computed by all, each a part of the batch."""
    exchanged_bytes: int = 0

    @property
    def alone(self) -> int:
        """Calls that one rank computed while the others waited."""
        return self.calls - self.everywhere - self.overlapped - self.split

    @property
    def gains_nothing(self) -> bool:
        """Whether ranks have only waited for each other."""
        return self.alone > 0 and not self.overlapped and not self.split

    def __str__(self) -> str:
        """Return the counts, and what it means if no call ran beside another."""
        text = (
            f"{self.calls} calls of the denoiser: {self.overlapped} beside another, {self.split} split by the batch, "
            f"{self.alone} by one rank while the others waited, {self.everywhere} by every rank to learn shapes; "
            f"{self.exchanged_bytes:,} bytes exchanged"
        )
        if self.gains_nothing:
            text += (
                "\nno call ran beside another, so ranks for cfg gain nothing here: guidance is off, "
                "or the pipeline reads the output of each call before it makes the next"
            )
        return text


class Round:
    """Calls that were made one after the other before an output of any of them was read.

    Attributes:
        settled: Whether every rank has every output.
    """

    def __init__(
        self, group: TensorParallelGroup, subject: str, patience: timedelta, report: GuidanceReport
    ) -> None:
        self.group, self.subject, self.patience, self.report = group, subject, patience, report
        self.settled = False
        self._calls = 0
        self._dealt: list[int] = []
        self._error: BaseException | None = None
        self._buffers: list[tuple[int, Tensor]] = []

    @property
    def next_owner(self) -> int:
        """The rank whose outputs those of the next call are.

        In turn, whether or not the others compute it too: so a branch, and what is cached of it, stays with one rank.
        """
        return self._calls % self.group.degree

    @property
    def is_over(self) -> bool:
        """Whether the next call begins another round."""
        return self.settled or self._error is not None

    def add(self, outputs: Sequence[Tensor], dealt: bool) -> list[Tensor]:
        """Return what stands for the outputs of a call; on ranks other than `next_owner` it is filled later.

        Args:
            outputs: Contiguous; of the same shapes and dtypes on every rank.
            dealt: Whether only one rank has computed them.
        """
        owner = self.next_owner
        self._calls += 1
        self._dealt += [owner] if dealt else []
        self._buffers += [(owner, tensor) for tensor in outputs]
        return [Pending(tensor, self) for tensor in outputs]

    def fail(self, error: BaseException) -> None:
        """End the round with an error of this rank; the others raise where they read, and nobody waits."""
        self._error = error
        self.group.give_up(error)

    def settle(self) -> None:
        """Exchange what is outstanding, unless that is done.

        Raises:
            RankFailure: a rank failed in one of the calls, or did not read at the same place.
        """
        if self.settled:
            return
        if self._error is not None:
            raise self._error  # read again, as a `finally` may: the other ranks are not there any more
        try:
            with self.group.agreement(self.subject, self.patience) as step:
                step.must_equal(**{"the number of calls before an output is read": self._calls})
        except BaseException as error:
            self._error = error
            raise
        for owner, buffer in self._buffers:
            self.group.broadcast(
                buffer.view(-1).view(torch.uint8), owner
            )  # as bytes: no backend sends every dtype
            self.report.exchanged_bytes += buffer.nbytes
        self.settled = True
        self._buffers.clear()
        self.report.overlapped += len(self._dealt) if len(set(self._dealt)) > 1 else 0


class Pending(Tensor):
    """A tensor whose values are exchanged when they are first read; a view of it is one as well.

    Whatever reads it is given a plain tensor. What is written to it before is written after the exchange.
    """

    buffer: Tensor
    awaited: Round

    @staticmethod
    def __new__(cls, buffer: Tensor, awaited: Round) -> Pending:
        """Wrap memory that will hold the values."""
        self: Pending = Tensor._make_wrapper_subclass(
            cls,
            buffer.shape,
            strides=buffer.stride(),
            storage_offset=buffer.storage_offset(),
            dtype=buffer.dtype,
            device=buffer.device,
        )
        self.buffer, self.awaited = buffer, awaited
        return self

    def value(self) -> Tensor:
        """Return the values, exchanging them first if need be."""
        self.awaited.settle()
        return self.buffer

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the values, or before the exchange what is known: printing on one rank must not wait for others."""
        if self.awaited.settled:
            return repr(self.buffer)
        return f"Pending(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give plain tensors to what does not ask for values by an operation."""
        if func in _NEEDS_VALUES:
            return func(*plain(args), **plain(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # declared as the function that is no dispatch
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Let views be taken without waiting, and exchange before anything else."""
        kwargs = kwargs or {}
        late = [
            t.awaited for t in tree_leaves((args, kwargs)) if isinstance(t, cls) and not t.awaited.settled
        ]
        if late and (func.is_view or func is torch.ops.aten.detach.default):
            views = func(*tree_map_only(cls, _buffer, args), **tree_map_only(cls, _buffer, kwargs))
            return tree_map_only(Tensor, lambda view: cls(view, late[0]), views)
        return func(*plain(args), **plain(kwargs))


_NEEDS_VALUES = frozenset(
    {
        Tensor.__array__,
        Tensor.__deepcopy__,
        Tensor.__dlpack__,
        Tensor.__format__,
        Tensor.__reduce_ex__,
        Tensor.data_ptr,
        Tensor.numpy,
        Tensor.tolist,
        Tensor.untyped_storage,
    }
)
"""What a wrapper cannot answer by itself, as it has no memory of its own."""


def plain(value: Any) -> Any:
    """Return `value` with plain tensors for the pending ones in its lists, tuples and dicts, exchanged if need be."""
    return tree_map_only(Pending, Pending.value, value)


def _buffer(pending: Pending) -> Tensor:
    return pending.buffer
