"""Files of a sharded checkpoint: cut again for any other number of ranks, to the last bit, and not believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.checkpoint.files import Source, WeightFiles, has_manifest, locate
from shardwise.checkpoint.index import TensorEntry, read_index
from shardwise.checkpoint.layouts import (
    METADATA_KEY,
    Cut,
    PiecedEntry,
    RankLayouts,
    manifest,
    metadata_of,
    parse_layouts,
    parse_manifest,
)
from shardwise.checkpoint.read import SliceReader
from shardwise.checkpoint.read_plan import Wanted, plan_reads
from shardwise.checkpoint.save import write_own
from shardwise.checkpoint.untrusted import Invalid
from shardwise.checkpoint.write import Stored, new_file, rank_file
from shardwise.errors import CheckpointError
from shardwise.plan.layout import Layout, Replicated, Shard, Span, overlaps
from shardwise.runtime.shard import local_slice
from tests.hostile_layouts import LAYOUTS, MANIFESTS, said

CPU = torch.device("cpu")
Layouts = Callable[[int], Layout]
"""The layout of a tensor on a number of ranks."""


def shard(dim: int, *blocks: int) -> Layouts:
    return lambda degree: Shard(dim, blocks)


def key_heads(dim: int, heads: int, *blocks: int) -> Layouts:
    """Return the cut of key heads, of which several ranks hold one where there are more ranks."""
    return lambda degree: Shard(dim, blocks, max(1, degree // heads))


def uneven(dim: int, units: int, *blocks: int) -> Layouts:
    return lambda degree: Shard(dim, blocks, units=units)


TENSORS: dict[str, tuple[tuple[int, ...], Layouts]] = {
    "whole": ((5, 7), lambda degree: Replicated()),
    "scalar": ((), lambda degree: Replicated()),
    "rows": ((16, 5), shard(0, 16)),
    "columns": ((5, 16), shard(1, 16)),
    "rows_in_blocks": ((48, 3), shard(0, 8, 16, 24)),
    "columns_in_blocks": ((3, 48), shard(1, 24, 8, 16)),
    "experts": ((3, 8, 32), shard(2, 16, 16)),
    "experts_down": ((3, 16, 8), shard(1, 16)),
    "keys": ((12, 5), key_heads(0, 2, 6, 6)),
    "key": ((5, 6), key_heads(1, 1, 6)),
    "heads": ((45, 2), uneven(0, 9, 9, 36)),
    "columns_of_heads": ((2, 27), uneven(1, 9, 27)),
    "whole_where_odd": ((6, 6), lambda degree: Shard(1, (6,)) if degree == 2 else Replicated()),
    "bias": ((16,), shard(0, 16)),
}
DTYPES = {"rows_in_blocks": torch.bfloat16, "columns_in_blocks": torch.bfloat16, "key": torch.float64}


def whole_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator).to(DTYPES.get(name, torch.float32))
        for name, (shape, _) in TENSORS.items()
    }


def save(folder: Path, slices: list[dict[str, Tensor]]) -> list[Path]:
    """Write the slices of all ranks, as `save_pretrained(sharded=True)` does."""
    folder.mkdir()
    degree = len(slices)
    cuts = {name: Cut(shape, layout(degree)) for name, (shape, layout) in TENSORS.items()}
    names = [rank_file("m", None, rank, degree) for rank in range(degree)]
    for rank, (name, tensors) in enumerate(zip(names, slices, strict=True)):
        stored = {key: Stored(tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
        file = new_file(name, stored, metadata_of(RankLayouts(rank, degree, cuts)))
        write_own(folder, file, tensors, None)
    (folder / "m.sharded.json").write_text(manifest(names))
    return [folder / name for name in names]


def sliced(whole: dict[str, Tensor], degree: int) -> list[dict[str, Tensor]]:
    return [
        {name: local_slice(tensor, TENSORS[name][1](degree), rank, degree) for name, tensor in whole.items()}
        for rank in range(degree)
    ]


def wanted_of(folder: Path, degree: int, dtype: torch.dtype | None = None) -> dict[str, Wanted]:
    index = read_index(locate(Source(str(folder), stem="m")))
    return {
        name: Wanted(e, TENSORS[name][1](degree) if degree > 1 else Replicated(), dtype or e.dtype)
        for name, e in index.items()
    }


def load(folder: Path, degree: int, dtype: torch.dtype | None = None) -> list[dict[str, Tensor]]:
    wanted = wanted_of(folder, degree, dtype)
    return [SliceReader(rank, degree, CPU, (rank,)).read(wanted)[0] for rank in range(degree)]


def same(first: list[dict[str, Tensor]], second: list[dict[str, Tensor]]) -> bool:
    return len(first) == len(second) and all(
        a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())
        for a, b in zip(first, second, strict=True)
    )


DEGREES = [1, 2, 4, 8]


@pytest.mark.parametrize("before", DEGREES)
@pytest.mark.parametrize("after", DEGREES)
def test_files_are_cut_again_for_any_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    whole = whole_tensors()
    save(tmp_path / "files", sliced(whole, before))
    assert same(load(tmp_path / "files", after), sliced(whole, after) if after > 1 else [whole])


@pytest.mark.parametrize("chunk", [16, 40])
def test_long_rows_are_cut_and_put_together_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    whole = whole_tensors()
    save(tmp_path / "files", sliced(whole, 4))
    monkeypatch.setattr("shardwise.checkpoint.read_plan.CHUNK", chunk)
    monkeypatch.setattr("shardwise.checkpoint.read_plan.SMALL", 8)
    assert same(load(tmp_path / "files", 2), sliced(whole, 2))
    assert same(load(tmp_path / "files", 1), [whole])


def test_there_and_back_gives_the_same_files(tmp_path: Path) -> None:
    save(tmp_path / "first", sliced(whole_tensors(), 4))
    folder = tmp_path / "first"
    for step, degree in enumerate((2, 8, 1, 4)):
        slices = load(folder, degree)
        folder = tmp_path / str(step)
        save(folder, slices)
    for file in (tmp_path / "first").iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_casts_are_those_of_the_whole_tensor(tmp_path: Path, degree: int) -> None:
    whole = whole_tensors()
    save(tmp_path / "files", sliced(whole, 4))
    cast = {name: tensor.to(torch.float16) for name, tensor in whole.items()}
    assert same(
        load(tmp_path / "files", degree, torch.float16), sliced(cast, degree) if degree > 1 else [cast]
    )


def test_same_number_of_ranks_reads_its_own_file_from_its_first_byte_to_its_last(tmp_path: Path) -> None:
    files = save(tmp_path / "files", sliced(whole_tensors(), 4))
    for rank in range(4):
        plan = plan_reads(wanted_of(tmp_path / "files", 4), rank, 4)
        runs = [run for read in plan.reads for run in read.runs()]
        assert plan.files == (files[rank],)
        assert [start for start, _ in runs[1:]] == [start + length for start, length in runs[:-1]]
        assert sum(runs[-1]) == files[rank].stat().st_size


@pytest.mark.parametrize("degree", [2, 8])
def test_other_numbers_of_ranks_read_their_bytes_once(tmp_path: Path, degree: int) -> None:
    save(tmp_path / "files", sliced(whole_tensors(), 4))
    wanted = wanted_of(tmp_path / "files", degree)
    for rank, slices in enumerate(sliced(whole_tensors(), degree)):
        plan = plan_reads(wanted, rank, degree)
        runs = sorted((read.file, *run) for read in plan.reads for run in read.runs())
        assert plan.nbytes == sum(tensor.nbytes for tensor in slices.values())
        assert all(a[0] != b[0] or a[1] + a[2] <= b[1] for a, b in pairwise(runs))


def test_pieces_that_are_put_in_a_wrong_place_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(source: Any, target: Any) -> list[tuple[int, int, int]]:
        return [(start, 0, length) for start, _, length in overlaps(source, target)]

    whole = whole_tensors()
    save(tmp_path / "files", sliced(whole, 4))
    monkeypatch.setattr("shardwise.checkpoint.read_plan.overlaps", swapped)
    assert not same(load(tmp_path / "files", 2), sliced(whole, 2))


def test_cut_along_another_dim_is_an_error(tmp_path: Path) -> None:
    save(tmp_path / "files", sliced(whole_tensors(), 4))
    entry = read_index(locate(Source(str(tmp_path / "files"), stem="m")))["rows"]
    wanted = {"rows": Wanted(entry, Shard(1, (5,)), entry.dtype)}
    with pytest.raises(CheckpointError, match=r"rows is cut along dim 0 .* unshard"):
        plan_reads(wanted, 0, 5)


# --- integers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "found"),
    [
        ([(0, 4)], [(0, 4)], [(0, 0, 4)]),
        ([(0, 4)], [(4, 4)], []),
        ([(2, 4)], [(0, 3)], [(0, 2, 1)]),
        ([(2, 4)], [(3, 9)], [(1, 0, 3)]),
        ([(0, 2), (8, 2)], [(0, 4), (8, 4)], [(0, 0, 2), (2, 4, 2)]),
        ([(0, 2), (8, 2)], [(0, 2), (8, 2)], [(0, 0, 4)]),  # one run in both
        ([(0, 12)], [(1, 2), (6, 3)], [(1, 0, 2), (6, 2, 3)]),
    ],
)
def test_overlaps_are_the_indices_that_both_have(
    source: list[tuple[int, int]], target: list[tuple[int, int]], found: list[tuple[int, int, int]]
) -> None:
    assert overlaps([Span(*s) for s in source], [Span(*t) for t in target]) == found


@pytest.mark.parametrize(
    ("layout", "preferred", "holders"),
    [
        (Shard(0, (8,)), 3, [0, 1, 2, 3]),
        (Shard(0, (8,), copies=2), 0, [0, 2]),
        (Shard(0, (8,), copies=2), 3, [0, 3]),
        (Shard(0, (8,), copies=4), 2, [2]),
        (Shard(0, (7,), units=7), 0, [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_each_piece_has_one_holder(layout: Shard, preferred: int, holders: list[int]) -> None:
    assert layout.holders(4, preferred) == holders


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Shard, int, Shard, int]:
    """Draw two cuts of one dim, of the same blocks or of their sum, and the numbers of ranks they are for."""
    first, second = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    units = draw(st.integers(max(first, second), 9))
    blocks = [units * first * second * n for n in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))]
    shards = []
    for degree in (first, second):
        own = tuple(blocks) if draw(st.booleans()) else (sum(blocks),)
        copies = draw(st.sampled_from([n for n in range(1, degree + 1) if degree % n == 0]))
        uneven = copies == 1 and draw(st.booleans())
        shards.append(Shard(0, own, copies, units if uneven else 0))
    return shards[0], first, shards[1], second


@given(cuts())
@settings(max_examples=300, deadline=None)
def test_whatever_the_cuts_each_index_of_a_slice_comes_once_and_from_its_place(
    cut: tuple[Shard, int, Shard, int],
) -> None:
    source, before, target, after = cut
    for rank in range(after):
        spans = target.spans(rank, after)
        found: list[int] = [-1] * sum(span.length for span in spans)
        for holder in source.holders(before):
            piece = [i for span in source.spans(holder, before) for i in range(span.start, span.stop)]
            for start, to, length in overlaps(source.spans(holder, before), spans):
                assert found[to : to + length] == [-1] * length
                found[to : to + length] = piece[start : start + length]
        assert found == [i for span in spans for i in range(span.start, span.stop)]


# --- hostile files ---------------------------------------------------------------------------------------------------

ENTRY = TensorEntry(Path("f"), torch.float32, (4, 3), 0, 48)


def test_layouts_that_are_right_are_read() -> None:
    found = parse_layouts({METADATA_KEY: said()}, {"a": ENTRY})
    assert found == RankLayouts(1, 2, {"a": Cut((8, 3), Shard(0, (4, 4)))})
    assert parse_layouts(metadata_of(found), {"a": ENTRY}) == found


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_that_cannot_be_are_refused(name: str) -> None:
    text, message = LAYOUTS[name]
    with pytest.raises(Invalid) as refusal:
        parse_layouts({METADATA_KEY: text}, {"a": ENTRY})
    assert message in str(refusal.value)


def test_file_without_layouts_is_refused() -> None:
    with pytest.raises(Invalid, match="no layouts"):
        parse_layouts({"format": "pt"}, {"a": ENTRY})


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_that_is_none_is_refused(name: str) -> None:
    content, message = MANIFESTS[name]
    with pytest.raises(CheckpointError) as refusal:
        parse_manifest(Path("m.sharded.json"), json.dumps(content).encode())
    assert message in str(refusal.value)
    assert "m.sharded.json" in str(refusal.value)


def test_lfs_pointer_in_place_of_a_manifest_is_told() -> None:
    with pytest.raises(CheckpointError, match="git lfs pull"):
        parse_manifest(Path("m"), b"version https://git-lfs.github.com/spec/v1\n")


def _swapped(files: list[Path]) -> None:
    first, second = files[0].read_bytes(), files[1].read_bytes()
    files[0].write_bytes(second)
    files[1].write_bytes(first)


MIXED: dict[str, tuple[Callable[[list[Path]], None] | Callable[[dict[str, Tensor]], None], str]] = {
    "swapped": (_swapped, "it is that of rank 1 of 4 and stands for 0 of 4"),
    "tensor_missing": (lambda tensors: tensors.pop("scalar"), "scalar is in it or in"),
    "other_dtype": (lambda tensors: tensors.update(whole=torch.ones(5, 7).half()), "whole is another tensor"),
    "other_shape": (lambda tensors: tensors.update(whole=torch.ones(5, 8)), "whole is another tensor"),
}


@pytest.mark.parametrize("name", MIXED)
def test_files_of_two_checkpoints_are_refused(tmp_path: Path, name: str) -> None:
    change, message = MIXED[name]
    files = save(tmp_path / "files", sliced(whole_tensors(), 4))
    if name == "swapped":
        change(files)  # type: ignore[arg-type]
    else:
        _replace_third(files, change, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError) as refusal:
        read_index(locate(Source(str(tmp_path / "files"), stem="m")))
    assert message in str(refusal.value)


def _replace_third(files: list[Path], change: Callable[[dict[str, Tensor]], None], folder: Path) -> None:
    """Put a file of other tensors in the place of that of rank 2; tensors that are whole have no layout."""
    tensors = sliced(whole_tensors(), 4)[2]
    change(tensors)
    cuts = {k: Cut(TENSORS[k][0], TENSORS[k][1](4)) for k in tensors}
    stored = {key: Stored(tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
    file = new_file(files[2].name, stored, metadata_of(RankLayouts(2, 4, cuts)))
    files[2].unlink()
    write_own(files[2].parent, file, tensors, None)


def test_fewer_files_than_ranks_are_refused(tmp_path: Path) -> None:
    files = save(tmp_path / "files", sliced(whole_tensors(), 4))
    with pytest.raises(CheckpointError, match="rank 0 of 4 and stands for 0 of 2"):
        read_index(WeightFiles(files[:2], sharded=True))


def test_file_that_the_manifest_names_and_that_is_missing_is_told(tmp_path: Path) -> None:
    files = save(tmp_path / "files", sliced(whole_tensors(), 4))
    files[3].unlink()
    assert has_manifest(Source(str(tmp_path / "files"), stem="m"))
    with pytest.raises(CheckpointError, match=r"rank-00004-of-00004.safetensors, which is not there"):
        locate(Source(str(tmp_path / "files"), stem="m"))


def test_sizes_of_pieced_entries_are_those_of_whole_tensors(tmp_path: Path) -> None:
    whole = whole_tensors()
    save(tmp_path / "files", sliced(whole, 4))
    for name, entry in read_index(locate(Source(str(tmp_path / "files"), stem="m"))).items():
        assert isinstance(entry, PiecedEntry)
        assert (entry.shape, entry.nbytes, entry.dtype) == (
            tuple(whole[name].shape),
            whole[name].nbytes,
            whole[name].dtype,
        )
