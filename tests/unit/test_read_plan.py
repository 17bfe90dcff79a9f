"""The read plan: plain data that names exactly this rank's bytes, and says where they go. No file is opened."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint import read_plan
from shardwise.checkpoint.index import TensorEntry
from shardwise.checkpoint.read_plan import Place, Read, ReadPlan, Wanted, needed_ranges, plan_reads
from shardwise.plan.layout import Layout, Replicated, Shard
from tests.unit.test_read import LAYOUTS, cut

FILE = Path("model.safetensors")


def entry(shape: tuple[int, ...], offset: int = 104, dtype: torch.dtype = torch.float32) -> TensorEntry:
    return TensorEntry(FILE, dtype, shape, offset, prod(shape) * dtype.itemsize)


def plan_of(shape: tuple[int, ...], layout: Layout, rank: int = 1, degree: int = 2) -> ReadPlan:
    return plan_reads({"x": Wanted(entry(shape), layout, torch.float32)}, rank, degree)


def neighbours(**sizes: int) -> dict[str, Wanted]:
    """Return whole tensors that lie one behind the other in a file."""
    wanted, offset = {}, 104
    for key, size in sizes.items():
        wanted[key] = Wanted(entry((size,), offset), Replicated(), torch.float32)
        offset += 4 * size
    return wanted


def spelled(
    reads: Iterator[Read] | tuple[Read, ...], raw: bytes, sizes: Mapping[str, int]
) -> dict[str, bytes]:
    """Return what the reads put into each tensor when the file's bytes are `raw`; none is written twice."""
    targets = {key: bytearray(size) for key, size in sizes.items()}
    written = {key: bytearray(size) for key, size in sizes.items()}
    for read in reads:
        packed = b"".join(raw[start : start + length] for start, length in read.runs())
        assert len(packed) == read.nbytes == sum(place.nbytes for place in read.places)
        for place in read.places:
            part = slice(place.start, place.start + place.nbytes)
            targets[place.key][part], packed = packed[: place.nbytes], packed[place.nbytes :]
            assert not any(written[place.key][part])
            written[place.key][part] = b"\1" * place.nbytes
    assert all(all(marks) for marks in written.values())
    return {key: bytes(target) for key, target in targets.items()}


# ---------------------------------------------------------------- which bytes


@pytest.mark.parametrize(("shape", "layout"), LAYOUTS)
@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("limit", [8, 24, 40, 2**20])
def test_reads_spell_the_slice_however_they_are_cut(
    shape: tuple[int, ...], layout: Layout, degree: int, limit: int
) -> None:
    whole = torch.arange(prod(shape), dtype=torch.float32).reshape(shape)
    raw = bytes(104) + whole.numpy().tobytes()
    for rank in range(degree):
        expected = cut(whole, layout, rank, degree).contiguous()
        plan = plan_of(shape, layout, rank, degree)
        parts = [part for read in plan.reads for part in read.parts(limit)]
        assert all(part.nbytes <= limit for part in parts)
        assert spelled(tuple(parts), raw, {"x": expected.nbytes})["x"] == expected.numpy().tobytes()
        assert plan.nbytes == expected.nbytes


def test_copies_read_what_their_neighbour_reads() -> None:
    layout = Shard(0, (8,), copies=2)
    plans = [plan_of((8, 3), layout, rank, 4).reads for rank in range(4)]
    assert plans[0] == plans[1] != plans[2] == plans[3]


@pytest.mark.parametrize("dim", [0, 1])
def test_ranks_with_more_heads_read_more(dim: int) -> None:
    shape = (60, 3) if dim == 0 else (3, 60)
    plans = [plan_of(shape, Shard(dim, (60,), units=30), rank, 4) for rank in range(4)]
    assert [plan.nbytes for plan in plans] == [heads * 2 * 3 * 4 for heads in (8, 8, 7, 7)]
    assert needed_ranges(plans) == [(FILE, 104, 104 + 720)]


@pytest.mark.parametrize(
    ("shape", "layout", "segments", "rows"),
    [
        ((8, 6), Shard(0, (8,)), [((0, 96),)], 1),
        ((8, 6), Shard(0, (4, 4)), [((0, 48),), ((0, 48),)], 1),
        ((5, 8), Shard(1, (8,)), [((16, 16),)], 5),
        ((5, 8), Shard(1, (4, 4)), [((8, 8), (24, 8))], 5),
        ((2, 5, 8), Shard(2, (8,)), [((16, 16),)], 10),
        ((1, 8), Shard(1, (8,)), [((0, 16),)], 1),
        ((8, 6), Replicated(), [((0, 192),)], 1),
    ],
)
def test_slice_is_a_run_for_each_block_or_a_segment_for_each_row_and_block(
    shape: tuple[int, ...], layout: Layout, segments: list[tuple[tuple[int, int], ...]], rows: int
) -> None:
    reads = plan_of(shape, layout).reads
    assert [read.segments for read in reads] == segments
    assert {read.rows for read in reads} == {rows}


@pytest.mark.parametrize("layout", [Shard(0, (4, 4)), Shard(1, (2, 4)), Shard(1, (0, 6))], ids=str)
def test_blocks_that_touch_are_one_run(layout: Layout) -> None:
    assert [read.segments for read in plan_of((8, 6), layout, 0, 1).reads] == [((0, 192),)]


def test_neighbouring_blocks_of_a_row_are_one_segment() -> None:
    # Of 3 ranks the last ends block 1 where the first begins block 2: only rank 0 of 1 has both.
    (read,) = plan_of((5, 12), Shard(1, (6, 0, 6)), 1, 2).reads
    assert read.segments == ((12, 12), (36, 12))


# ---------------------------------------------------------------- order, chunks, small tensors


def test_reads_are_in_the_order_of_the_files() -> None:
    wanted = {
        str(i): Wanted(
            TensorEntry(Path(name), torch.float32, (40_000,), offset, 160_000),
            Shard(0, (40_000,)),
            torch.float32,
        )
        for i, (name, offset) in enumerate([("b", 8), ("a", 160_008), ("b", 160_008), ("a", 8)])
    }
    plan = plan_reads(wanted, 0, 2)
    assert [(read.file.name, read.offset) for read in plan.reads] == [
        ("a", 8), ("a", 160_008), ("b", 8), ("b", 160_008)
    ]  # fmt: skip
    assert plan.files == (Path("a"), Path("b"))


@pytest.mark.parametrize(
    ("shape", "layout"), [((3000, 3000), Replicated()), ((3000, 3000), Shard(1, (3000,)))]
)
def test_no_read_is_longer_than_a_chunk(shape: tuple[int, ...], layout: Layout) -> None:
    sizes = [read.nbytes for read in plan_of(shape, layout).reads]
    assert max(sizes) <= read_plan.CHUNK < sum(sizes)
    assert min(sizes[:-1]) > 0.9 * read_plan.CHUNK


def test_small_neighbours_are_read_together() -> None:
    wanted = neighbours(a=7, b=1, c=5)
    (read,) = plan_reads(wanted, 0, 2).reads
    assert (read.offset, read.segments) == (104, ((0, 52),))
    assert read.places == (Place("a", 0, 28), Place("b", 0, 4), Place("c", 0, 20))


@pytest.mark.parametrize("limit", [8, 24, 32])
def test_small_neighbours_can_be_taken_apart(limit: int) -> None:
    raw = bytes(104) + bytes(range(52))
    (read,) = plan_reads(neighbours(a=7, b=1, c=5), 0, 2).reads
    found = spelled(tuple(read.parts(limit)), raw, {"a": 28, "b": 4, "c": 20})
    assert found == {"a": raw[104:132], "b": raw[132:136], "c": raw[136:156]}


def test_neighbours_are_read_apart_if_one_is_large_or_of_another_dtype_or_a_gap_lies_between() -> None:
    large = read_plan.SMALL // 4 + 1
    assert len(plan_reads(neighbours(a=7, b=large, c=5, d=5), 0, 2).reads) == 3
    wanted = neighbours(a=7, b=7, c=7)
    assert len(plan_reads({key: wanted[key] for key in "ac"}, 0, 2).reads) == 2
    wanted["b"] = Wanted(entry((14,), wanted["b"].entry.offset, torch.bfloat16), Replicated(), torch.float32)
    assert len(plan_reads(wanted, 0, 2).reads) == 3


def test_small_neighbours_are_read_together_up_to_a_limit() -> None:
    sizes = [
        read.nbytes for read in plan_reads(neighbours(**{f"x{i:03}": 16_000 for i in range(50)}), 0, 2).reads
    ]
    assert sum(sizes) == 50 * 64_000
    assert read_plan.COALESCED - 64_000 < max(sizes) <= read_plan.COALESCED


# ---------------------------------------------------------------- what a node reads


@pytest.mark.parametrize("layout", [Shard(0, (4, 12, 8)), Shard(1, (8, 16)), Replicated()], ids=str)
def test_ranks_of_one_node_need_every_byte_of_a_tensor(layout: Layout) -> None:
    shape = (24, 24)
    plans = [plan_of(shape, layout, rank, 4) for rank in range(4)]
    ((file, start, end),) = needed_ranges(plans)
    assert (file, end) == (FILE, 104 + 24 * 24 * 4)
    assert start == 104


def test_ranks_of_another_node_do_not_count() -> None:
    first, second = (
        needed_ranges(plan_of((8, 6), Shard(0, (8,)), rank, 4) for rank in ranks)
        for ranks in ((0, 1), (2, 3))
    )
    assert first == [(FILE, 104, 104 + 96)]
    assert second == [(FILE, 104 + 96, 104 + 192)]


def test_ranges_lie_apart_and_in_order() -> None:
    wanted = neighbours(a=20_000, b=20_000, c=20_000, d=20_000)
    del wanted["c"]
    ranges = needed_ranges([plan_reads(wanted, 0, 1)])
    assert [(start, end) for _, start, end in ranges] == [(104, 160_104), (240_104, 320_104)]
    assert all(before[2] < after[1] for before, after in pairwise(ranges))
