"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests import devices
from tests.pool import Pool, collect_garbage_seldom

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded; spawned ranks inherit it
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Begin the tests with everything imported."""
    collect_garbage_seldom()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what is about CPUs where the ranks compute on another device; see `tests.devices`."""
    for item in items if devices.CHOSEN != "cpu" else ():
        marker = item.get_closest_marker("any_device")
        if marker is None or marker.args == (False,):
            item.add_marker(pytest.mark.skip(reason="is about CPUs, or makes tensors there itself"))


def _pool(size: int, device: str = devices.CHOSEN) -> Iterator[Pool]:
    if (missing := devices.missing(size)) is not None:
        pytest.skip(missing)
    pool = Pool(size, device)
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


@pytest.fixture(scope="session")
def device_ranks(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Two ranks on a device that is no CPU: the simulated one, unless another was chosen for all tests."""
    if devices.CHOSEN == "cpu":
        yield from _pool(2, "sim")
    else:
        yield request.getfixturevalue("two_ranks")
