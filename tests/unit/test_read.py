"""Reading slices: the same numbers as cutting the whole tensor, from this rank's bytes and no others."""

import errno
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from shardwise.checkpoint import read, read_plan, staging
from shardwise.checkpoint.index import TensorEntry, read_header
from shardwise.checkpoint.read import SliceReader, stamp
from shardwise.checkpoint.read_plan import Wanted
from shardwise.checkpoint.report import LoadReport
from shardwise.errors import CheckpointError
from shardwise.plan.layout import Layout, Replicated, Shard
from tests.machine import MODES

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
    tensors, report = SliceReader(rank, degree, CPU).read({"x": Wanted(entry, layout, dtype)})
    return tensors["x"], report.bytes_read


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
    monkeypatch.setattr(read, "stage_for", lambda device: staging.Scratch(request.param))
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


def allocations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the bytes of everything that is allocated; reading may only use `torch.empty`."""
    sizes: list[int] = []
    empty = torch.empty

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
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
    assert max(allocated[1:], default=0) <= (0 if dtype == torch.float32 else scratch)


# ---------------------------------------------------------------- several tensors, files and threads


@pytest.fixture(params=[1, 3], ids=["1-thread", "3-threads"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SliceReader:
    """The last of four ranks, with reads of a few bytes so that there is work for all its threads."""
    monkeypatch.setattr(read_plan, "CHUNK", 64)
    return SliceReader(3, 4, CPU, threads=request.param)


def several(folder: Path) -> tuple[dict[str, Tensor], dict[str, Wanted]]:
    """Write tensors of each kind to two files; the first holds small neighbours, some of another dtype."""
    layouts = {"a": Shard(0, (4, 4)), "b": Shard(1, (8,)), "d": Shard(1, (4, 12)), "e": Shard(0, (64,))}
    first = {name: random_tensor((7,), seed=i) for i, name in enumerate("cfgh")}
    first |= {
        "half": random_tensor((7,), torch.bfloat16),
        "a": random_tensor((8, 6)),
        "b": random_tensor((5, 8)),
    }
    second = {"d": random_tensor((9, 16)), "e": random_tensor((64, 4)), "i": random_tensor((3,), torch.int64)}
    wanted: dict[str, Wanted] = {}
    for name, tensors in {"first": first, "second": second}.items():
        (folder / name).mkdir()
        index = store(folder / name, **tensors)
        wanted |= {
            key: Wanted(
                index[key], layouts.get(key, Replicated()), torch.bfloat16 if key in "ade" else t.dtype
            )
            for key, t in tensors.items()
        }
    return first | second, wanted


def test_tensors_of_several_files_are_read_by_any_number_of_threads(
    tmp_path: Path, reader: SliceReader
) -> None:
    whole, wanted = several(tmp_path)
    tensors, report = reader.read(wanted)
    expected = {key: cut(tensor, wanted[key].layout, 3, 4) for key, tensor in whole.items()}
    assert tensors.keys() == expected.keys()
    assert all(same(tensors[key], expected[key].to(wanted[key].dtype)) for key in expected)
    assert report.bytes_read == sum(tensor.nbytes for tensor in expected.values())
    assert report.file_bytes == sum(tensor.nbytes for tensor in whole.values())
    assert report.threads == reader.threads


def test_progress_counts_every_byte_once(tmp_path: Path, reader: SliceReader) -> None:
    told: list[tuple[int, int]] = []
    reader.progress = lambda arrived, total: told.append((arrived, total))
    _, report = reader.read(several(tmp_path)[1])
    assert sum(arrived for arrived, _ in told) == report.bytes_read
    assert {total for _, total in told} == {report.bytes_read}
    assert len(told) > 5


def test_L4_ranks_together_read_a_sharded_tensor_once(tmp_path: Path) -> None:
    entry = store(tmp_path, x=random_tensor((24, 10)))["x"]
    read_by = [read_one(entry, Shard(0, (4, 12, 8)), rank, 4, torch.float32)[1] for rank in range(4)]
    assert sum(read_by) == entry.nbytes
    assert len(set(read_by)) == 1


def test_files_are_opened_once_by_a_thread_and_closed_at_the_end(
    tmp_path: Path, reader: SliceReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = several(tmp_path)[1]
    opened: list[int] = []
    open_file = os.open
    monkeypatch.setattr(
        os, "open", lambda *args, **rest: opened.append(open_file(*args, **rest)) or opened[-1]
    )
    before = set(os.listdir("/proc/self/fd"))
    reader.read(wanted)
    assert 4 <= len(opened) <= 2 * (reader.threads + 1)  # one more looks for what is in memory
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("error", [CheckpointError, MemoryError, KeyboardInterrupt])
def test_first_failure_of_a_thread_ends_all_and_is_raised(
    tmp_path: Path, reader: SliceReader, error: type[BaseException]
) -> None:
    told: list[int] = []

    def fail(arrived: int, total: int) -> None:
        told.append(arrived)
        if len(told) == 2:
            raise error("made to fail")

    reader.progress = fail
    with pytest.raises(error, match="made to fail"):
        reader.read(several(tmp_path)[1])
    assert len(told) <= 2 + reader.threads


@pytest.mark.parametrize(("ranks", "threads"), [(1, 4), (2, 4), (4, 2), (8, 1), (16, 1)])
def test_threads_are_a_share_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(read_plan, "CHUNK", 8)
    entry = store(tmp_path, x=random_tensor((64,)))["x"]
    reader = SliceReader(0, 1, CPU, neighbours=range(ranks))
    assert reader.read({"x": Wanted(entry, Replicated(), torch.float32)})[1].threads == threads


@pytest.mark.parametrize("threads", [1, 2])
def test_bytes_that_are_cast_pass_through_the_cpu_whatever_the_default_device_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(read_plan, "CHUNK", 64)
    whole = random_tensor((64,))
    wanted = {"x": Wanted(store(tmp_path, x=whole)["x"], Replicated(), torch.bfloat16)}
    with torch.device("meta"):
        found, _ = SliceReader(0, 1, CPU, threads=threads).read(wanted)
    assert torch.equal(found["x"], whole.bfloat16())


@pytest.mark.parametrize("mode", MODES)
def test_threads_read_in_the_mode_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(read_plan, "CHUNK", 64)
    whole = random_tensor((512,))
    wanted = {"x": Wanted(store(tmp_path, x=whole)["x"], Replicated(), torch.bfloat16)}
    with MODES[mode]():
        found, report = SliceReader(0, 1, CPU, threads=4).read(wanted)
    assert report.threads == 4
    assert torch.equal(found["x"], whole.bfloat16())
    assert found["x"].is_inference() == (mode == "inference_mode")


def test_report_says_what_was_read_and_how_fast() -> None:
    report = LoadReport(1_240_000_000, 3_620_000_000, 0.4, threads=2, staging_bytes=2**21, cold=True)
    assert report.gb_per_s == pytest.approx(3.1)
    text = "1.24 of 3.62 GB in 0.40 s (3.10 GB/s, cold, 2 threads, 2.1 MB of staging)"
    assert str(report) == text
    assert LoadReport(0, 0, 0.0).gb_per_s == 0


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
    entry = store(tmp_path, x=random_tensor((12, 6)))["x"]
    os.truncate(entry.file, entry.offset + entry.nbytes - missing)
    with refused(entry, "x", "truncated"):
        read_one(entry, layout, 1, 2, dtype)


def change(file: Path, how: str) -> None:
    if how == "replaced":
        other = file.with_name("other")
        other.write_bytes(file.read_bytes())
        os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
        other.rename(file)
        return
    with file.open("r+b") as stream:
        stream.seek(0, os.SEEK_SET if how == "rewritten" else os.SEEK_END)
        stream.write(b"\0")
    os.utime(file, ns=(0, 0))  # whatever the clock's resolution


@pytest.mark.parametrize("how", ["rewritten", "grown"])
def test_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path, how: str) -> None:
    entry = store(tmp_path, x=random_tensor((12, 6)))["x"]
    reader = SliceReader(1, 2, CPU, progress=lambda arrived, total: change(entry.file, how))
    with refused(entry, "was changed while it was read"):
        reader.read({"x": Wanted(entry, Replicated(), torch.float32)})


@pytest.mark.parametrize("how", ["rewritten", "grown", "replaced"])
def test_file_that_changed_after_its_header_was_read_is_an_error(tmp_path: Path, how: str) -> None:
    entry = store(tmp_path, x=random_tensor((12, 6)))["x"]
    stamps = {entry.file: stamp(entry.file.stat())}
    wanted = {"x": Wanted(entry, Replicated(), torch.float32)}
    SliceReader(0, 2, CPU, stamps=stamps).read(wanted)
    change(entry.file, how)
    with refused(entry, "was changed while it was read"):
        SliceReader(0, 2, CPU, stamps=stamps).read(wanted)


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
    def fail(file: int, targets: Any, offset: int, flags: int = 0) -> int:
        if flags:  # the question what is in memory
            return 1
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
        lambda file, targets, offset, *flags: positional_read(file, [targets[0][:at_most]], offset, *flags),
    )
    actual, bytes_read = read_one(entry, Shard(1, (4, 8)), 1, 2, dtype)
    assert same(actual, cut(whole, Shard(1, (4, 8)), 1, 2).to(dtype))
    assert bytes_read == 6 * 6 * 4


def test_signals_do_not_disturb_reading(tmp_path: Path) -> None:
    whole, heard = random_tensor((3000, 64)), []
    entry = store(tmp_path, x=whole)["x"]
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    try:
        actual, _ = read_one(entry, Shard(1, (32, 32)), 1, 4, torch.float32)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert same(actual, cut(whole, Shard(1, (32, 32)), 1, 4))
    assert heard
