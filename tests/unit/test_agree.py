"""What ranks compare of their files: equal for equal files anywhere, different as soon as one header differs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from shardwise.checkpoint.agree import describe, stamps_of
from shardwise.checkpoint.index import read_index
from shardwise.errors import CheckpointError

NAMES = ("one.safetensors", "two.safetensors")


def describe_files(folder: Path) -> dict[str, str]:
    files = [folder / name for name in NAMES]
    return describe(read_index(files), stamps_of(files))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "here", {"a": torch.ones(4, 2), "b": torch.ones(3)}, {"c": torch.ones(5)})
    return tmp_path / "here"


def write(folder: Path, *files: dict[str, Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    for name, tensors in zip(NAMES, files, strict=True):
        save_file(tensors, folder / name)


def test_copies_in_another_folder_are_equal(folder: Path) -> None:
    shutil.copytree(folder, folder.with_name("there"))
    assert describe_files(folder) == describe_files(folder.with_name("there"))
    assert describe_files(folder)["files"] == "one.safetensors, two.safetensors"


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": torch.ones(4, 2), "z": torch.ones(3)},
        {"a": torch.ones(2, 4), "b": torch.ones(3)},
        {"a": torch.ones(4, 2).int(), "b": torch.ones(3)},
        {"a": torch.ones(4, 2), "b": torch.ones(4)},
        {"a": torch.ones(4, 2)},
    ],
    ids=["name", "shape", "dtype", "size", "fewer"],
)
def test_header_that_differs_is_seen_and_named(folder: Path, tensors: dict[str, Tensor]) -> None:
    before = describe_files(folder)
    write(folder, tensors, {"c": torch.ones(5)})
    after = describe_files(folder)
    assert [key for key in before if before[key] != after[key]] == [NAMES[0]]


def test_tensor_that_lies_elsewhere_in_the_file_is_seen(folder: Path) -> None:
    stamps, index = stamps_of([folder / NAMES[0]]), read_index([folder / NAMES[0]])
    moved = {key: replace(entry, offset=entry.offset + 4) for key, entry in index.items()}
    assert describe(index, stamps)[NAMES[0]] != describe(moved, stamps)[NAMES[0]]


def test_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.safetensors cannot be read"):
        stamps_of([tmp_path / "gone.safetensors"])
