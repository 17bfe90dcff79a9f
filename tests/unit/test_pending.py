"""Tensors that wait for another rank: what may be done without an exchange, and what causes one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shardwise.errors import RankFailure
from shardwise.runtime.pending import GuidanceReport, Pending, Round

VALUES = torch.arange(12.0).view(3, 4)


class Ranks:
    """Two ranks of which this is the first; the second sends `VALUES`."""

    def __init__(self) -> None:
        self.degree, self.rank = 2, 0
        self.exchanges = 0
        self.failure: Exception | None = None

    @contextmanager
    def agreement(self, subject: str, patience: timedelta) -> Iterator[Any]:
        yield SimpleNamespace(must_equal=lambda **claims: None)
        if self.failure is not None:
            raise self.failure

    def broadcast(self, tensor: Tensor, owner: int) -> None:
        self.exchanges += 1
        if owner != self.rank:
            tensor.copy_(VALUES.view(-1).view(torch.uint8))


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture
def pending(ranks: Ranks) -> Tensor:
    """An output of the second rank."""
    together = Round(ranks, "a test", timedelta(seconds=1), GuidanceReport())  # type: ignore[arg-type]
    together.add([torch.zeros(1)], dealt=True)
    (output,) = together.add([torch.full((3, 4), torch.nan)], dealt=True)
    return output


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda x: x[:, :2],
    "chunk": lambda x: x.chunk(2, dim=1)[1],
    "unbind": lambda x: x.unbind()[2],
    "detach": lambda x: x.detach(),
    "view": lambda x: x.view(4, 3).transpose(0, 1)[None],
    "as it is": lambda x: x.to(torch.float32).contiguous().float(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_view_waits_and_sees_the_values_once_there_are_some(ranks: Ranks, pending: Tensor, name: str) -> None:
    view = VIEWS[name](pending)
    assert isinstance(view, Pending)
    assert (ranks.exchanges, view.shape) == (0, VIEWS[name](VALUES).shape)
    assert torch.equal(view + 0, VIEWS[name](VALUES))
    assert type(view + 0) is Tensor


READS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x + x,
    "item": lambda x: x[1, 1].item(),
    "list": lambda x: x.tolist(),
    "numpy": lambda x: x[1:].numpy().tolist(),
    "asarray": lambda x: np.asarray(x).tolist(),
    "copy": lambda x: copy.deepcopy(x),
    "cast": lambda x: x.to(torch.float64),
    "cat": lambda x: torch.cat([x, torch.ones(1, 4)]),
    "where": lambda x: torch.where(x > 3, x, 0),
    "fill": lambda x: x.clone().fill_(2),
    "in place": lambda x: x.mul_(2),
    "write a view": lambda x: (x[0].zero_(), x + 0)[1],
    "format": lambda x: f"{x[1, 2]:.2f}",
}


@pytest.mark.parametrize("name", READS)
def test_whatever_reads_is_given_the_values(ranks: Ranks, pending: Tensor, name: str) -> None:
    expected, found = READS[name](VALUES.clone()), READS[name](pending)
    assert torch.equal(found, expected) if isinstance(expected, Tensor) else found == expected
    assert ranks.exchanges == 2
    assert READS["sum"](pending).shape == VALUES.shape
    assert ranks.exchanges == 2


def test_pending_is_printed_without_an_exchange(ranks: Ranks, pending: Tensor) -> None:
    assert repr(pending) == "Pending(shape=(3, 4), dtype=torch.float32, device=cpu)"
    assert ranks.exchanges == 0
    assert repr(pending + 0) == repr(pending) == repr(VALUES)


def test_error_of_another_rank_is_raised_at_each_read(ranks: Ranks, pending: Tensor) -> None:
    ranks.failure = RankFailure("rank 1 failed")
    for _ in range(2):
        with pytest.raises(RankFailure, match="rank 1 failed"):
            pending + 0
    assert ranks.exchanges == 0
