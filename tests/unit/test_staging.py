"""Bytes on their way to a device: no slot is overwritten before its copies have arrived, and all arrive in the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwise.checkpoint import read, staging
from shardwise.checkpoint.read import SliceReader
from shardwise.checkpoint.read_plan import Wanted
from shardwise.checkpoint.staging import Copy, PinnedSlots, Scratch, TorchAccelerator, stage_for
from shardwise.plan.layout import Layout, Replicated
from tests.unit.test_read import LAYOUTS, cut, random_tensor, same, several, store


class Pending:
    """Copies that a device has been asked for and that are done when somebody waits for them, not before."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self.copies = list(copies)
        self.waited = False

    def synchronize(self) -> None:
        assert not self.waited
        self.waited = True
        for target, source in self.copies:
            target.copy_(source)


class SlowDevice:
    """Stands for an accelerator that copies at the last moment: a slot that is reused too early gives other numbers."""

    type = "cuda"

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.pending: list[Pending] = []
        self.most_under_way = 0

    def pinned(self, nbytes: int) -> Tensor:
        self.slots.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, copies: Sequence[Copy]) -> Pending:
        self.pending.append(Pending(copies))
        self.most_under_way = max(self.most_under_way, sum(not item.waited for item in self.pending))
        return self.pending[-1]


class Impatient(PinnedSlots):
    """The negative control: takes slots back without waiting."""

    def _wait(self, slot: int) -> None:
        pass


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SlowDevice:
    """A device on which SliceReader seems to allocate, and to which it copies through slots of 64 bytes."""
    device = SlowDevice()
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, device=None, **kwargs: empty(*args, **kwargs))
    monkeypatch.setattr(read, "stage_for", lambda _: PinnedSlots(device, limit=64))
    return device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["kept", "cast"])
@pytest.mark.parametrize(("shape", "layout"), LAYOUTS)
def test_slices_arrive_on_a_device_through_its_slots(
    tmp_path: Path, device: SlowDevice, shape: tuple[int, ...], layout: Layout, dtype: torch.dtype
) -> None:
    whole = random_tensor(shape)
    entry = store(tmp_path, x=whole)["x"]
    tensors, report = SliceReader(1, 2, device, threads=1).read({"x": Wanted(entry, layout, dtype)})
    assert same(tensors["x"], cut(whole, layout, 1, 2).to(dtype))
    assert device.slots == [64, 64][: 2 * bool(device.pending)]
    assert report.staging_bytes == sum(device.slots)


def test_all_tensors_of_a_checkpoint_arrive_and_one_slot_is_filled_while_another_is_copied(
    tmp_path: Path, device: SlowDevice
) -> None:
    whole, wanted = several(tmp_path)
    tensors, _ = SliceReader(3, 4, device, threads=1).read(wanted)
    assert all(same(tensors[k], cut(t, wanted[k].layout, 3, 4).to(wanted[k].dtype)) for k, t in whole.items())
    assert device.most_under_way == 2
    assert all(item.waited for item in device.pending)


def test_slots_that_are_taken_back_too_early_are_noticed(
    tmp_path: Path, device: SlowDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "stage_for", lambda _: Impatient(device, slots=1, limit=64))
    whole, wanted = several(tmp_path)
    tensors, _ = SliceReader(3, 4, device, threads=1).read(wanted)
    for item in device.pending:
        item.synchronize()
    assert not all(
        same(tensors[k], cut(t, wanted[k].layout, 3, 4).to(wanted[k].dtype)) for k, t in whole.items()
    )


def test_each_thread_has_slots_of_its_own(tmp_path: Path, device: SlowDevice) -> None:
    whole = random_tensor((600_000, 16))
    entry = store(tmp_path, x=whole)["x"]
    wanted = {"x": Wanted(entry, Replicated(), torch.float32)}
    made: list[PinnedSlots] = []

    def stage(_: object) -> PinnedSlots:
        made.append(PinnedSlots(device))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "stage_for", stage)
        tensors, report = SliceReader(0, 1, device, threads=2).read(wanted)
    assert same(tensors["x"], whole)
    assert 1 <= len(made) <= 2
    assert report.staging_bytes == len(made) * staging.SLOTS * staging.SLOT


# ---------------------------------------------------------------- the parts


def test_scratch_grows_no_larger_than_what_is_asked_for() -> None:
    scratch = Scratch()
    sizes = []
    for asked in (24, 8, 64, 0):
        assert len(scratch.room(asked)) == asked
        sizes.append(scratch.nbytes)
    assert sizes == [24, 24, 64, 64]


def test_stage_of_the_cpu_is_a_scratch_buffer() -> None:
    assert isinstance(stage_for(torch.device("cpu")), Scratch)


def test_system_that_refuses_pinned_memory_gets_a_warning_and_ordinary_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty: Callable[..., Tensor] = torch.empty

    def refuse(*args: int, pin_memory: bool = False, **kwargs: torch.dtype) -> Tensor:
        if pin_memory:
            raise RuntimeError("out of pinned memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refuse)
    with caplog.at_level(logging.WARNING):
        slot = TorchAccelerator.pinned(TorchAccelerator.__new__(TorchAccelerator), 32)
    assert slot.nbytes == 32
    assert "out of pinned memory" in caplog.text
