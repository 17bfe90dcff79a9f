"""Broken files on one rank or all: one error on every rank, nothing read, and the next load works."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from shardwise import TensorParallelConfig
from shardwise.errors import ShardwiseError
from tests import tolerances
from tests.helpers import outputs, randomize, relative_error
from tests.hostile import LFS_POINTER
from tests.pool import Pool
from tests.small_models import Mlp, small_input

STEM = "diffusion_pytorch_model"


def load(folder: Path) -> Any:
    return Mlp.from_pretrained(folder, parallel_config=TensorParallelConfig(dist.get_world_size()))


def attempt(folder: Path) -> str:
    """Return the error of a load, as a user would see it, or an empty text."""
    try:
        load(folder)
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def rewrite_header(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Return what changes the header of the first file of a folder; its tensors stay."""

    def rewrite(folder: Path) -> None:
        file = min(folder.glob("*.safetensors"))
        raw = file.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:end])
        change(header)
        new = json.dumps(header).encode()
        file.write_bytes(len(new).to_bytes(8, "little") + new + raw[end:])

    return rewrite


def rewrite_index(change: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        index = folder / f"{STEM}.safetensors.index.json"
        content = json.loads(index.read_text())
        change(content["weight_map"])
        index.write_text(json.dumps(content))

    return rewrite


def _shift(header: dict[str, Any]) -> None:
    first = min(
        (value for name, value in header.items() if name != "__metadata__"), key=lambda v: v["data_offsets"]
    )
    first["data_offsets"] = [offset + 4 for offset in first["data_offsets"]]


def _twice(folder: Path) -> None:
    file = min(folder.glob("*.safetensors"))
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    text = raw[8:end].rstrip()
    new = text[:-1] + b"," + text[1:]
    file.write_bytes(len(new).to_bytes(8, "little") + new + raw[end:])


def _replace_by(content: bytes) -> Callable[[Path], None]:
    return lambda folder: min(folder.glob("*.safetensors")).write_bytes(content) and None


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "lfs_pointer": (_replace_by(LFS_POINTER), "git lfs pull"),
    "empty": (_replace_by(b""), "has 0 bytes"),
    "petabytes_of_header": (_replace_by((2**50).to_bytes(8, "little") + b"{}"), f"claims a header of {2**50}"),
    "shifted": (rewrite_header(_shift), "no tensor has bytes"),
    "names_twice": (_twice, "is given twice"),
    "shape_of_true": (rewrite_header(lambda h: h["up.bias"].update(shape=[True])), "list of whole numbers"),
    "packed_dtype": (rewrite_header(lambda h: h["up.bias"].update(dtype="F4")), "numbers share bytes"),
    "pipe": (
        lambda folder: ((file := min(folder.glob("*.safetensors"))).unlink(), os.mkfifo(file)),
        "is a pipe",
    ),
    "escape": (rewrite_index(lambda names: names.update({"up.bias": "../x.safetensors"})), "plain file names"),
    "shard_missing": (lambda folder: max(folder.glob("*.safetensors")).unlink(), "which is not there"),
    "other_place": (
        rewrite_index(lambda names: names.update({"up.bias": max(names.values())})),
        "disagree on 1 tensors",
    ),
    "not_in_index": (rewrite_index(lambda names: names.pop("up.bias")), "not in the index"),
}  # fmt: skip


def checkpoint(folder: Path) -> Path:
    """Write a checkpoint of several files, `up.bias` in the first."""
    randomize(Mlp()).save_pretrained(folder, max_shard_size=700)
    names = json.loads((folder / f"{STEM}.safetensors.index.json").read_text())["weight_map"]
    assert names["up.bias"] == min(names.values()) != max(names.values())
    return folder


def _meet(folders: list[Path], good: Path) -> tuple[str, int, float]:
    """Load what may be broken, then what is not.

    Returns the error and the positional reads of the first load, and the second one's distance to one process.
    """
    with mock.patch.object(os, "preadv", wraps=os.preadv) as reads:
        error = attempt(folders[dist.get_rank()])
        count = reads.call_count
    return error, count, _distance(good)


def _distance(good: Path) -> float:
    return relative_error(outputs(load(good), small_input(Mlp)), outputs(randomize(Mlp()), small_input(Mlp)))


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("where", ["everywhere", "on_rank_1"])
def test_broken_file_is_one_error_on_every_rank_and_the_next_load_works(
    two_ranks: Pool, tmp_path: Path, kind: str, where: str
) -> None:
    good, bad = (checkpoint(tmp_path / name) for name in ("good", "bad"))
    make, message = BROKEN[kind]
    make(bad)
    folders = [bad if where == "everywhere" else good, bad]
    (first, *_), (second, *_) = answers = two_ranks.run(_meet, folders, good)
    assert second.startswith("CheckpointError")
    assert first == second
    assert ("on rank 1 of 2" in first) == (where == "on_rank_1")
    for error, reads, distance in answers:
        assert message in error
        assert str(bad) in error
        assert reads == 0
        assert distance < tolerances.FP32


def test_good_file_is_read_where_the_broken_are_not(two_ranks: Pool, tmp_path: Path) -> None:
    good = checkpoint(tmp_path)
    for error, reads, _ in two_ranks.run(_meet, [good, good], good):
        assert error == ""
        assert reads > 0


def _meet_change(change: str, folders: list[Path], good: Path) -> tuple[str, int, float]:
    """Load while rank 1's files are changed as soon as one of them is read."""
    read = os.preadv

    def changing(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        for file in folders[1].glob("*.safetensors"):
            os.truncate(file, 8 if change == "shrinks" else file.stat().st_size + 1)
        return read(descriptor, buffers, offset, flags)

    if dist.get_rank() == 0:
        return _meet(folders, good)
    with mock.patch.object(os, "preadv", changing):
        error = attempt(folders[1])
    return error, 0, _distance(good)


@pytest.mark.parametrize("change", ["shrinks", "grows"])
def test_file_that_changes_on_one_rank_while_it_is_read_is_one_error_on_every_rank(
    two_ranks: Pool, tmp_path: Path, change: str
) -> None:
    good = checkpoint(tmp_path / "good")
    shutil.copytree(good, tmp_path / "changing")
    first, second = two_ranks.run(_meet_change, change, [good, tmp_path / "changing"], good)
    assert first[0] == second[0]
    assert first[0].startswith("CheckpointError")
    assert "on rank 1 of 2" in first[0]
    for error, _, distance in (first, second):
        assert str(tmp_path / "changing") in error
        assert "chang" in error.replace("changing", "")
        assert distance < tolerances.FP32
