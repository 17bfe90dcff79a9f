"""The device that the ranks of the tests compute on: CPUs, unless SHARDWISE_TEST_DEVICE says another.

`cuda` or `xpu`: each rank has one of its own, and they meet by that device's backend; with SHARDWISE_TEST_SHARE=1 the
ranks share what there is, and meet by gloo. `sim`: the simulated accelerator of `tests.accelerator`.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.runtime.devices import take_device

CHOSEN = os.environ.get("SHARDWISE_TEST_DEVICE", "cpu")
SHARED = os.environ.get("SHARDWISE_TEST_SHARE") == "1"


def take(device: str, rank: int, size: int) -> str:
    """Make `rank`'s device of `size` the one of this process, and return the backend by which the ranks meet."""
    if device == "sim":
        from tests.accelerator import collectives, install

        install(size)
        torch.accelerator.set_device_index(rank)
        return collectives.BACKEND  # for tensors of the device alone
    torch.backends.cudnn.allow_tf32 = False
    return take_device(device, rank, size)


def missing(ranks: int) -> str | None:
    """Return why this machine cannot run so many ranks on the chosen device, or None if it can."""
    if CHOSEN in ("cpu", "sim"):
        return None
    there = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    needed = 1 if SHARED else ranks
    return None if there >= needed else f"{ranks} ranks need {needed} {CHOSEN} devices, there are {there}"


def device_of(model: nn.Module) -> torch.device:
    """Return where a model computes: on what its weights are on, or the rank's device while they are away."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta}
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def to(device: Any, value: Any) -> Any:
    """Return a tensor on a device; anything else as it is."""
    return value.to(device) if isinstance(value, Tensor) else value


def no_faults() -> AbstractContextManager[None]:
    """Have a test fail that makes a fault inside, where the simulated device sees it."""
    if torch.get_device_module().__name__ != "torch.sim":
        return nullcontext()
    from tests import accelerator

    return accelerator.no_faults()
