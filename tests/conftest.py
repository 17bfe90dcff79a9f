"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.pool import Pool, collect_garbage_seldom

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded; spawned ranks inherit it
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Begin the tests with everything imported."""
    collect_garbage_seldom()


def _pool(size: int) -> Iterator[Pool]:
    pool = Pool(size)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Pool]:
    """Two gloo ranks, kept alive."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Pool]:
    """Four gloo ranks, kept alive."""
    yield from _pool(4)


@pytest.fixture(scope="session", params=[2, 4], ids=["tp2", "tp4"])
def ranks(request: pytest.FixtureRequest) -> Pool:
    """Two and then four ranks."""
    return request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[request.param])
