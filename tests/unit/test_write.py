"""New files are byte for byte those of the safetensors library, and a gather's plan has each byte once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from shardwise.checkpoint.index import read_header
from shardwise.checkpoint.read_plan import Wanted
from shardwise.checkpoint.save import plan_writes
from shardwise.checkpoint.write import (
    CODES,
    Stored,
    created,
    new_checkpoint,
    new_file,
    superseded,
    write_runs,
)
from shardwise.errors import CheckpointError, UnsupportedOption
from shardwise.plan.layout import Layout, Replicated, Shard
from shardwise.runtime.shard import local_slice

TENSORS = {
    "b.weight": torch.arange(6.0).view(2, 3),
    "a": torch.tensor([7], dtype=torch.int64),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "flag": torch.tensor(True),
    "none": torch.ones(0, 4),
    'é "quoted" \\': torch.ones(1, dtype=torch.float16),
}


def stored(tensors: dict[str, Tensor]) -> dict[str, Stored]:
    return {name: Stored(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def raw(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    file = new_file(path.name, stored(tensors))
    with created(path, file) as descriptor:
        for name, entry in file.entries.items():
            os.pwrite(descriptor, raw(tensors[name]), entry.offset)


def test_file_is_that_of_the_safetensors_library(tmp_path: Path) -> None:
    write(tmp_path / "file", TENSORS)
    assert (tmp_path / "file").read_bytes() == save(TENSORS, {"format": "pt"})


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_every_dtype_is_read_again(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"x": torch.zeros(3, 5).to(dtype), "y": torch.ones(2)}
    write(tmp_path / "file", tensors)
    found = read_header(tmp_path / "file")
    assert {name: (e.dtype, e.shape) for name, e in found.items()} == {
        "x": (dtype, (3, 5)),
        "y": (torch.float32, (2,)),
    }
    assert (tmp_path / "file").read_bytes() == save(tensors, {"format": "pt"})


def test_file_that_is_there_already_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write(tmp_path / "file", TENSORS)
    assert (tmp_path / "file").read_text() == "mine"


def test_files_are_split_as_diffusers_splits_them() -> None:
    tensors = {
        name: Stored(torch.float32, (size,)) for name, size in zip("abcde", (1, 2, 9, 1, 3), strict=True)
    }
    found = new_checkpoint(tensors, "stem", "v1", 16)
    assert {file.name: "".join(file.entries) for file in found.files} == {
        "stem.v1-00001-of-00003.safetensors": "c",
        "stem.v1-00002-of-00003.safetensors": "abd",
        "stem.v1-00003-of-00003.safetensors": "e",
    }
    assert found.index_name == "stem.safetensors.index.v1.json"
    assert found.index is not None
    index = json.loads(found.index)
    assert index["metadata"]["total_size"] == found.nbytes == 4 * 16
    assert index["weight_map"] == {name: file.name for file in found.files for name in file.entries}


def test_one_file_has_no_index() -> None:
    found = new_checkpoint(stored(TENSORS), "stem", None, "1GB")
    assert [file.name for file in found.files] == ["stem.safetensors"]
    assert found.index is None


@pytest.mark.parametrize(
    ("variant", "size"), [(None, "1 elephant"), (None, None), ("a/b", 1), ("", 1), (".", 1)]
)
def test_size_or_variant_that_is_none_is_refused(variant: str | None, size: str | int) -> None:
    with pytest.raises(UnsupportedOption):
        new_checkpoint(stored(TENSORS), "stem", variant, size)


def test_superseded_are_the_files_of_the_same_variant() -> None:
    mine = {"config.json", "m.safetensors", "m.safetensors.index.json", "m-00001-of-00002.safetensors"}
    v = {"m.v.safetensors", "m.safetensors.index.v.json", "m.v-00001-of-00002.safetensors"}
    others = {
        "README.md",
        "m.bin",
        "n.safetensors",
        "m-1-of-2.safetensors",
        "m.safetensors.bak",
        "mxsafetensors",
    }
    assert superseded(mine | v | others, "m", None) == mine
    assert superseded(mine | v | others, "m", "v") == v | {"config.json"}


# --- who writes what --------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[tuple[int, ...], Layout]] = {
    "whole": ((5, 7), Replicated()),
    "scalar": ((), Replicated()),
    "none": ((0, 8), Shard(1, (8,))),
    "rows": ((24, 5), Shard(0, (24,))),
    "columns": ((5, 24), Shard(1, (24,))),
    "rows_in_blocks": ((48, 3), Shard(0, (8, 16, 24))),
    "columns_in_blocks": ((3, 48), Shard(1, (24, 8, 16))),
    "middle": ((3, 8, 5), Shard(1, (8,))),
    "last_in_blocks": ((2, 3, 16), Shard(2, (8, 8))),
    "copies": ((12, 3), Shard(0, (6, 6), copies=2)),
    "one_for_all": ((12,), Shard(0, (12,), copies=4)),
    "units": ((28, 3), Shard(0, (14, 14), units=7)),
    "columns_in_units": ((3, 28), Shard(1, (28,), units=7)),
    "convolution": ((8, 4, 3, 3), Shard(0, (8,))),
}
DEGREES = {"copies": (2, 4), "one_for_all": (4,)}


def gathered(folder: Path, whole: dict[str, Tensor], layouts: dict[str, Layout], degree: int) -> bytes:
    """Put a file together from slices, without ranks."""
    file = new_file("file", stored(whole))
    wanted = {name: Wanted(entry, layouts[name], entry.dtype) for name, entry in file.entries.items()}
    with created(folder / "file", file) as descriptor:
        for rank, read in plan_writes(wanted, degree):
            parts = [
                bytes(
                    raw(local_slice(whole[p.key], layouts[p.key], rank, degree))[p.start : p.start + p.nbytes]
                )
                for p in read.places
            ]
            write_runs(descriptor, read, memoryview(b"".join(parts)))
    return (folder / "file").read_bytes()


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", [*LAYOUTS, "all"])
def test_slices_make_the_whole_file_again(tmp_path: Path, name: str, degree: int) -> None:
    names = [n for n in LAYOUTS if degree in DEGREES.get(n, (2, 4))] if name == "all" else [name]
    if degree not in DEGREES.get(name, (2, 4)):
        degree = 4
    whole = {n: torch.randn(LAYOUTS[n][0]) for n in names}
    layouts = {n: LAYOUTS[n][1] for n in names}
    assert gathered(tmp_path, whole, layouts, degree) == save(whole, {"format": "pt"})


def test_each_byte_is_written_once_and_in_file_order() -> None:
    whole = {n: torch.empty(shape) for n, (shape, _) in LAYOUTS.items()}
    file = new_file("file", stored(whole))
    wanted = {n: Wanted(entry, LAYOUTS[n][1], entry.dtype) for n, entry in file.entries.items()}
    writes = plan_writes(wanted, 4)
    runs = sorted(run for _, read in writes for run in read.runs())
    assert [start for start, _ in runs[1:]] == [start + length for start, length in runs[:-1]]
    assert (runs[0][0], sum(runs[-1])) == (len(file.start), file.size)
    offsets = [read.offset for _, read in writes]
    assert offsets == sorted(offsets)
