"""Reading slices: the same numbers as cutting the whole tensor, from this rank's bytes and no others."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from shardwise.checkpoint import read
from shardwise.checkpoint.index import TensorEntry, read_header
from shardwise.checkpoint.read import SliceReader, runs
from shardwise.errors import CheckpointError
from shardwise.plan.layout import Layout, Replicated, Shard

CPU = torch.device("cpu")
LAYOUTS = [
    pytest.param((8,), Shard(0, (8,)), id="1-d"),
    pytest.param((24,), Shard(0, (4, 12, 8)), id="1-d-packed"),
    pytest.param((8, 5), Shard(0, (8,)), id="dim-0"),
    pytest.param((24, 5), Shard(0, (4, 12, 8)), id="dim-0-packed"),
    pytest.param((5, 8), Shard(1, (8,)), id="dim-1"),
    pytest.param((5, 24), Shard(1, (4, 12, 8)), id="dim-1-packed"),
    pytest.param((3, 8, 5), Shard(1, (8,)), id="dim-1-of-3"),
    pytest.param((3, 5, 24), Shard(2, (4, 12, 8)), id="dim-2-packed"),
    pytest.param((2, 3, 2, 8), Shard(3, (8,)), id="dim-3"),
    pytest.param((5, 8), Replicated(), id="replicated"),
    pytest.param((), Replicated(), id="0-d"),
    pytest.param((0,), Replicated(), id="zero-size"),
    pytest.param((8, 0), Shard(0, (8,)), id="zero-columns"),
    pytest.param((0, 8), Shard(1, (4, 4)), id="zero-rows"),
    pytest.param((8, 3), Shard(0, (0, 8)), id="zero-block"),
]
CASTS = [
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float32),
    (torch.float8_e4m3fn, torch.bfloat16),
    (torch.int32, torch.int64),
    (torch.int64, torch.float32),
    (torch.uint8, torch.float32),
    (torch.bool, torch.float32),
]
SAME = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool, torch.float8_e5m2]


def random_tensor(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 3) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 40
    return (numbers.abs() if dtype in (torch.uint8, torch.bool) else numbers).to(dtype)


def store(folder: Path, **tensors: Tensor) -> dict[str, TensorEntry]:
    """Write tensors to a file between two others, so that no offset is right by chance."""
    file = folder / "model.safetensors"
    save_file({"AAA": random_tensor((3,)), **tensors, "zzz": random_tensor((5,), torch.uint8)}, file)
    return read_header(file)


def cut(tensor: Tensor, layout: Layout, rank: int, degree: int) -> Tensor:
    """Return a rank's slice of a whole tensor, without asking the layout where it is."""
    if not isinstance(layout, Shard):
        return tensor
    blocks = tensor.split(list(layout.blocks), layout.dim)
    return torch.cat([block.tensor_split(degree, layout.dim)[rank] for block in blocks], layout.dim)


def same(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are one to the last bit."""
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (actual, expected)]
    return actual.dtype == expected.dtype and actual.shape == expected.shape and torch.equal(*as_bytes)


def read_one(
    entry: TensorEntry, layout: Layout, rank: int, degree: int, dtype: torch.dtype
) -> tuple[Tensor, int]:
    with SliceReader(rank, degree, CPU) as reader:
        return reader.read("x", entry, layout, dtype), reader.bytes_read


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize(("shape", "layout"), LAYOUTS)
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_runs_spell_the_bytes_of_the_slice_in_order(
    tmp_path: Path, shape: tuple[int, ...], layout: Layout, degree: int
) -> None:
    whole = random_tensor(shape)
    entry = store(tmp_path, x=whole)["x"]
    raw = entry.file.read_bytes()
    for rank in range(degree):
        spelled = b"".join(raw[start : start + length] for start, length in runs(entry, layout, rank, degree))
        assert spelled == cut(whole, layout, rank, degree).contiguous().numpy().tobytes()


@pytest.mark.parametrize(
    ("shape", "layout", "count"),
    [
        ((8, 6), Shard(0, (8,)), 1),
        ((8, 6), Shard(0, (4, 4)), 2),
        ((5, 8), Shard(1, (8,)), 5),
        ((5, 8), Shard(1, (4, 4)), 10),
        ((2, 5, 8), Shard(2, (8,)), 10),
        ((8, 6), Replicated(), 1),
    ],
)
def test_runs_are_one_for_each_block_and_row_before_the_dim(
    shape: tuple[int, ...], layout: Layout, count: int
) -> None:
    entry = TensorEntry(Path("x"), torch.float32, shape, 100, 4 * prod(shape))
    assert len(list(runs(entry, layout, 1, 2))) == count


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(("shape", "layout"), LAYOUTS)
@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["kept", "cast"])
def test_L4_slice_is_that_of_the_whole_tensor_and_nothing_else_is_read(
    tmp_path: Path, shape: tuple[int, ...], layout: Layout, degree: int, dtype: torch.dtype
) -> None:
    whole = random_tensor(shape)
    entry = store(tmp_path, x=whole)["x"]
    for rank in range(degree):
        expected = cut(whole, layout, rank, degree)
        actual, bytes_read = read_one(entry, layout, rank, degree, dtype)
        assert same(actual, expected.to(dtype))
        assert actual.is_contiguous()
        assert actual.untyped_storage().nbytes() == actual.nbytes
        assert bytes_read == expected.nbytes


@pytest.mark.parametrize("dtype", SAME, ids=str)
@pytest.mark.parametrize("layout", [Shard(0, (4, 8)), Shard(1, (2, 4)), Replicated()], ids=str)
def test_slice_keeps_every_bit_of_its_dtype(tmp_path: Path, dtype: torch.dtype, layout: Layout) -> None:
    whole = random_tensor((12, 6), dtype)
    entry = store(tmp_path, x=whole)["x"]
    assert same(read_one(entry, layout, 1, 2, dtype)[0], cut(whole, layout, 1, 2))


@pytest.mark.parametrize(("stored", "wanted"), CASTS, ids=str)
@pytest.mark.parametrize("layout", [Shard(0, (4, 8)), Shard(1, (2, 4)), Replicated()], ids=str)
def test_slice_is_cast_as_torch_casts_it(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype, layout: Layout
) -> None:
    whole = random_tensor((12, 6), stored)
    entry = store(tmp_path, x=whole)["x"]
    actual, bytes_read = read_one(entry, layout, 1, 2, wanted)
    assert same(actual, cut(whole, layout, 1, 2).to(wanted))
    assert bytes_read == cut(whole, layout, 1, 2).nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["kept", "cast"])
def test_numbers_that_are_not_finite_arrive(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0, 1e-45, 3e38])
    entry = store(tmp_path, x=whole)["x"]
    assert same(read_one(entry, Shard(0, (6,)), 0, 1, dtype)[0], whole.to(dtype))


# ---------------------------------------------------------------- the scratch buffer


@pytest.fixture(params=[8, 16, 24, 40, 4096], ids=lambda size: f"scratch-{size}")
def scratch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A scratch buffer of a few numbers, so that its borders fall inside runs, between them, and beyond all."""
    monkeypatch.setattr(read, "_CAST_SCRATCH", request.param)
    monkeypatch.setattr(read, "_DEVICE_SCRATCH", request.param)
    return request.param


@pytest.mark.parametrize(("shape", "layout"), LAYOUTS)
def test_cast_is_right_wherever_the_scratch_buffer_ends(
    tmp_path: Path, scratch: int, shape: tuple[int, ...], layout: Layout
) -> None:
    whole = random_tensor(shape)
    entry = store(tmp_path, x=whole)["x"]
    for rank in range(4):
        expected = cut(whole, layout, rank, 4)
        actual, bytes_read = read_one(entry, layout, rank, 4, torch.bfloat16)
        assert same(actual, expected.to(torch.bfloat16))
        assert bytes_read == expected.nbytes


class Device:
    """Stands for an accelerator: says so, and takes part in nothing else."""

    type = "cuda"


@pytest.mark.parametrize(("shape", "layout"), LAYOUTS)
def test_transfer_to_another_device_is_right_wherever_the_scratch_buffer_ends(
    tmp_path: Path, scratch: int, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], layout: Layout
) -> None:
    whole = random_tensor(shape)
    entry = store(tmp_path, x=whole)["x"]
    allocated = allocations(monkeypatch)
    with SliceReader(1, 2, Device()) as reader:
        actual = reader.read("x", entry, layout, torch.float32)
    assert same(actual, cut(whole, layout, 1, 2))
    assert allocated[0] == actual.nbytes
    assert len(allocated) == 2  # the bytes pass through the CPU
    assert allocated[1] <= scratch


def allocations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the bytes of everything that the reader allocates; it may only use `torch.empty`, on the CPU here."""
    sizes: list[int] = []
    empty = torch.empty

    def noted(shape: Any, *, dtype: torch.dtype, device: object = None) -> Tensor:
        tensor = empty(shape, dtype=dtype)
        sizes.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "empty", noted)
    return sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["kept", "cast"])
def test_L4_reading_takes_the_slice_and_one_small_buffer(
    tmp_path: Path, scratch: int, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    entry = store(tmp_path, x=random_tensor((24, 64)))["x"]
    allocated = allocations(monkeypatch)
    actual, _ = read_one(entry, Shard(1, (32, 32)), 1, 4, dtype)
    assert allocated[0] == actual.nbytes
    assert sum(allocated[1:]) <= (0 if dtype == torch.float32 else scratch)


# ---------------------------------------------------------------- several tensors and files


def test_bytes_read_add_up_over_tensors(tmp_path: Path) -> None:
    whole = {"a": random_tensor((8, 6)), "b": random_tensor((5, 8)), "c": random_tensor((7,))}
    index = store(tmp_path, **whole)
    layouts = {"a": Shard(0, (4, 4)), "b": Shard(1, (8,)), "c": Replicated()}
    with SliceReader(3, 4, CPU) as reader:
        for name, layout in layouts.items():
            reader.read(name, index[name], layout, torch.float32)
        assert reader.bytes_read == 4 * (8 * 6 // 4 + 5 * 8 // 4 + 7)


def test_L4_ranks_together_read_a_sharded_tensor_once(tmp_path: Path) -> None:
    entry = store(tmp_path, x=random_tensor((24, 10)))["x"]
    read_by = [read_one(entry, Shard(0, (4, 12, 8)), rank, 4, torch.float32)[1] for rank in range(4)]
    assert sum(read_by) == entry.nbytes
    assert len(set(read_by)) == 1


def test_tensors_of_several_files_are_each_read_from_their_own(tmp_path: Path) -> None:
    for i in (1, 2):
        (tmp_path / str(i)).mkdir()
    whole = [random_tensor((8, 4), seed=i) for i in (1, 2)]
    entries = [store(tmp_path / str(i), x=tensor)["x"] for i, tensor in zip((1, 2), whole, strict=True)]
    with SliceReader(0, 2, CPU) as reader:
        for entry, tensor in zip(entries * 2, whole * 2, strict=True):
            assert same(reader.read("x", entry, Shard(0, (8,)), torch.float32), tensor[:4])


def test_files_are_opened_once_and_closed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    open_file = os.open
    entry = store(tmp_path, x=random_tensor((8, 4)))["x"]
    monkeypatch.setattr(os, "open", lambda *args: opened.append(open_file(*args)) or opened[-1])
    with SliceReader(0, 2, CPU) as reader:
        for _ in range(3):
            reader.read("x", entry, Shard(0, (8,)), torch.float32)
        (descriptor,) = opened
        os.fstat(descriptor)
    with pytest.raises(OSError):
        os.fstat(descriptor)


# ---------------------------------------------------------------- files that are not as they were


@contextmanager
def refused(entry: TensorEntry, *words: str) -> Iterator[None]:
    """Expect an error that names the file and holds the words."""
    with pytest.raises(CheckpointError) as caught:
        yield
    assert all(word in str(caught.value) for word in (str(entry.file), *words))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["kept", "cast"])
@pytest.mark.parametrize("layout", [Shard(0, (12,)), Shard(1, (2, 4)), Replicated()], ids=str)
@pytest.mark.parametrize("missing", [1, 4, 100])
def test_file_that_shrinks_after_it_was_opened_is_an_error(
    tmp_path: Path, dtype: torch.dtype, layout: Layout, missing: int
) -> None:
    index = store(tmp_path, a=random_tensor((3,)), x=random_tensor((12, 6)))
    entry = index["x"]
    with refused(entry, "x", "truncated"), SliceReader(1, 2, CPU) as reader:
        reader.read("a", index["a"], Replicated(), torch.float32)
        os.truncate(entry.file, entry.offset + entry.nbytes - missing)
        reader.read("x", entry, layout, dtype)


@pytest.mark.parametrize("change", ["rewritten", "grown"])
def test_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path, change: str) -> None:
    entry = store(tmp_path, x=random_tensor((12, 6)))["x"]
    with refused(entry, "was changed while it was read"), SliceReader(1, 2, CPU) as reader:
        reader.read("x", entry, Replicated(), torch.float32)
        with entry.file.open("r+b") as stream:
            stream.seek(0, os.SEEK_SET if change == "rewritten" else os.SEEK_END)
            stream.write(b"\0")
        os.utime(entry.file, ns=(0, 0))  # whatever the clock's resolution


def test_slice_that_lies_before_the_end_of_a_truncated_file_is_read(tmp_path: Path) -> None:
    whole = random_tensor((12, 6))
    entry = store(tmp_path, x=whole)["x"]
    os.truncate(entry.file, entry.offset + entry.nbytes // 2)
    assert same(read_one(entry, Shard(0, (12,)), 0, 2, torch.float32)[0], whole[:6])
    with refused(entry, "x", f"ends at byte {entry.offset + entry.nbytes // 2}"):
        read_one(entry, Shard(0, (12,)), 1, 2, torch.float32)


def test_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    entry = store(tmp_path, x=random_tensor((4,)))["x"]
    entry.file.unlink()
    with refused(entry, "cannot be opened"):
        read_one(entry, Replicated(), 0, 2, torch.float32)


def test_failing_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    entry = store(tmp_path, x=random_tensor((4,)))["x"]
    monkeypatch.setattr(os, "preadv", fail)
    with refused(entry, "x", os.strerror(errno.EIO)):
        read_one(entry, Replicated(), 0, 2, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["kept", "cast"])
@pytest.mark.parametrize("at_most", [1, 3, 7])
def test_reads_that_come_back_short_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, at_most: int
) -> None:
    whole = random_tensor((6, 12))
    entry = store(tmp_path, x=whole)["x"]
    positional_read = os.preadv
    monkeypatch.setattr(
        os,
        "preadv",
        lambda file, targets, offset: positional_read(file, [targets[0][:at_most]], offset),
    )
    actual, bytes_read = read_one(entry, Shard(1, (4, 8)), 1, 2, dtype)
    assert same(actual, cut(whole, Shard(1, (4, 8)), 1, 2).to(dtype))
    assert bytes_read == 6 * 6 * 4
