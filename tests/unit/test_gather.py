"""Short rows of files in memory are gathered: the same bytes, and never a signal where a page cannot be had."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from shardwise.checkpoint import gather, read
from shardwise.checkpoint.index import TensorEntry
from shardwise.checkpoint.read import SliceReader
from shardwise.checkpoint.read_plan import CHUNK, Wanted, plan_reads
from shardwise.checkpoint.report import LoadReport
from shardwise.errors import CheckpointError
from shardwise.plan.layout import Shard
from tests.unit.test_read import cut, random_tensor, same, store

CASES = {
    "rows": ((50, 12), Shard(1, (12,))),
    "blocks": ((50, 24), Shard(1, (4, 12, 8))),
    "middle dim": ((9, 8, 5), Shard(1, (8,))),
    "two rows": ((2, 4), Shard(1, (4,))),
    "more blocks than a call takes": ((3, 6000), Shard(1, (2,) * 3000)),
}


def load(entry: TensorEntry, layout: Shard, rank: int, dtype: torch.dtype) -> tuple[Tensor, LoadReport]:
    tensors, report = SliceReader(rank, 2, torch.device("cpu")).read({"x": Wanted(entry, layout, dtype)})
    return tensors["x"], report


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("window", [32, 1000, gather.WINDOW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["kept", "cast"])
def test_rows_are_those_of_the_whole_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, window: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(gather, "WINDOW", window)
    monkeypatch.setattr(read, "pays", lambda item: item.rows > 1)
    shape, layout = CASES[case]
    whole = random_tensor(shape)
    entry = store(tmp_path, x=whole)["x"]
    for rank in range(2):
        actual, report = load(entry, layout, rank, dtype)
        expected = cut(whole, layout, rank, 2)
        assert same(actual, expected.to(dtype))
        assert report.gathered_bytes == (0 if case.startswith("more") else expected.nbytes)


def test_rows_of_a_second_chunk_are_gathered(tmp_path: Path) -> None:
    whole = random_tensor((3000, 4096), torch.float16)
    entry = store(tmp_path, x=whole)["x"]
    plan = plan_reads({"x": Wanted(entry, Shard(1, (4096,)), torch.float16)}, 1, 2)
    assert whole.nbytes / 2 < CHUNK < whole.nbytes
    actual, report = load(entry, Shard(1, (4096,)), 1, torch.float16)
    assert torch.equal(actual, whole[:, 2048:])
    assert report.gathered_bytes == plan.nbytes


def test_long_rows_and_runs_are_read_one_by_one(tmp_path: Path) -> None:
    wide = gather.SHORT // 2  # a row of two ranks, in fp32
    whole = random_tensor((4, wide))
    entry = store(tmp_path, x=whole)["x"]
    for layout in (Shard(1, (wide,)), Shard(0, (4,))):
        actual, report = load(entry, layout, 0, torch.float32)
        assert same(actual, cut(whole, layout, 0, 2))
        assert report.gathered_bytes == 0


def test_rows_on_storage_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "is_cold", lambda *_: True)
    whole = random_tensor((50, 12))
    actual, report = load(store(tmp_path, x=whole)["x"], Shard(1, (12,)), 1, torch.float32)
    assert torch.equal(actual, whole[:, 6:])
    assert report.cold
    assert report.gathered_bytes == 0


def _refuses(*_: Any) -> int:
    return -1


def _half(*args: Any) -> int:
    return int(args[1] is not None)


@pytest.mark.parametrize("copy", [None, _refuses, _half], ids=["none", "forbidden", "short"])
def test_where_rows_cannot_be_gathered_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: Callable[..., int] | None
) -> None:
    monkeypatch.setattr(gather, "_process_vm_readv", lambda: copy)
    whole = random_tensor((50, 12))
    actual, report = load(store(tmp_path, x=whole)["x"], Shard(1, (12,)), 1, torch.float32)
    assert torch.equal(actual, whole[:, 6:])
    assert report.gathered_bytes == 0


def test_file_that_shrinks_under_its_window_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = store(tmp_path, x=random_tensor((5000, 12)))["x"]
    copy = gather._process_vm_readv()

    def shrinking(*args: Any) -> int:
        os.truncate(entry.file, 4096)
        return int(copy(*args))

    monkeypatch.setattr(gather, "_process_vm_readv", lambda: shrinking)
    with pytest.raises(CheckpointError, match="ends at byte 4096"):
        load(entry, Shard(1, (12,)), 1, torch.float32)


_TOUCH = """
import mmap, os, sys
import numpy as np
descriptor = os.open(sys.argv[1], os.O_RDONLY)
mapped = np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), np.uint8)
os.truncate(sys.argv[1], 4096)
print(mapped.sum())
"""


def test_file_that_shrinks_kills_who_touches_its_window(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"x": random_tensor((5000, 12))}, file)
    ended = subprocess.run([sys.executable, "-c", _TOUCH, str(file)], capture_output=True, check=False)
    assert ended.returncode == -signal.SIGBUS
