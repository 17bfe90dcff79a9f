"""Indexes of checkpoints: nothing outside of their folder, and what they say holds of the files."""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardwise.checkpoint.files import Source, locate
from shardwise.checkpoint.index import read_index
from shardwise.checkpoint.untrusted import MAX_TEXT
from shardwise.errors import CheckpointError, UnsupportedOption
from tests.hostile import INDEXES, Hostile

INDEX = "diffusion_pytorch_model.safetensors.index.json"
SHARDS = [f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]


def put(folder: Path, *names: str) -> None:
    """Create empty files in a folder."""
    for name in names:
        (folder / name).touch()


def put_index(folder: Path, shards: Iterable[str]) -> None:
    """Write an index that names `shards`, one tensor in each."""
    weight_map = {f"tensor.{i}": shard for i, shard in enumerate(shards)}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 8}, "weight_map": weight_map}))


# ---------------------------------------------------------------- indices that must not be believed


@pytest.mark.parametrize("hostile", INDEXES, ids=lambda hostile: hostile.name)
def test_index_that_must_not_be_believed_is_refused_with_what_would_fix_it(
    tmp_path: Path, hostile: Hostile
) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a.safetensors", "b.safetensors", "secret.safetensors", "sub/secret.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / INDEX).write_bytes(hostile.content)
    with pytest.raises(CheckpointError) as caught:
        locate(Source(str(tmp_path)))
    message = str(caught.value)
    message.encode("utf-8")  # can be printed
    assert f"{tmp_path / INDEX} is not a checkpoint index: " in message
    assert hostile.message in message
    assert re.search(r"; (fetch it again|run `git lfs)", message)
    assert len(message) < 2000


def test_index_longer_than_any_is_refused_unread(tmp_path: Path) -> None:
    put_index(tmp_path, SHARDS)
    os.truncate(tmp_path / INDEX, MAX_TEXT + 1)
    with pytest.raises(CheckpointError, match=f"has {MAX_TEXT + 1} bytes; {MAX_TEXT} are allowed"):
        locate(Source(str(tmp_path)))


def test_index_that_names_an_absolute_path_is_refused(tmp_path: Path) -> None:
    put(tmp_path, SHARDS[0])
    put_index(tmp_path, [str(tmp_path / SHARDS[0])])
    with pytest.raises(CheckpointError, match="shards must be plain file names beside the index"):
        locate(Source(str(tmp_path)))


def test_shards_that_are_missing_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    put(tmp_path, SHARDS[0])
    put_index(tmp_path, [*SHARDS, "x.safetensors"])
    with pytest.raises(
        CheckpointError, match=f"names {SHARDS[1]}, which is not there, nor are 1 others; fetch"
    ):
        locate(Source(str(tmp_path)))


@pytest.mark.parametrize("name", ["model.bin", "model.pt", INDEX, "model.safetensors.bin"])
def test_E1_index_that_names_other_than_safetensors_is_refused(tmp_path: Path, name: str) -> None:
    put(tmp_path, *SHARDS, name)
    put_index(tmp_path, [*SHARDS, name])
    with pytest.raises(UnsupportedOption, match="not a safetensors file"):
        locate(Source(str(tmp_path)))


# ---------------------------------------------------------------- an index and files that disagree


def save_shards(folder: Path, *shards: Iterable[str]) -> None:
    """Write files that hold tensors of these names."""
    for file, tensors in zip(SHARDS, shards, strict=True):
        save_file({name: torch.ones(2) for name in tensors}, folder / file)


def test_index_says_where_the_tensors_are(tmp_path: Path) -> None:
    save_shards(tmp_path, "ab", "c")
    where = {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": where}))
    found = locate(Source(str(tmp_path)))
    assert found.weight_map == where
    assert {name: entry.file.name for name, entry in read_index(found).items()} == where


@pytest.mark.parametrize(
    ("shards", "lines"),
    [
        (("ab", "d"), [f"c is not in {SHARDS[1]}", f"d is in {SHARDS[1]}, not in the index"]),
        (("a", "c"), [f"b is not in {SHARDS[0]}"]),
        (("ab", "cd"), [f"d is in {SHARDS[1]}, not in the index"]),
        (("a", "bc"), [f"b is in {SHARDS[1]}, by the index in {SHARDS[0]}"]),
        (("", ""), [f"a is not in {SHARDS[0]}", f"b is not in {SHARDS[0]}", f"c is not in {SHARDS[1]}"]),
    ],
    ids=["other", "fewer", "more", "moved", "empty"],
)
def test_index_and_files_that_disagree_are_refused_with_all_tensors(
    tmp_path: Path, shards: tuple[str, str], lines: list[str]
) -> None:
    save_shards(tmp_path, *shards)
    where = {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": where}))
    with pytest.raises(CheckpointError) as caught:
        read_index(locate(Source(str(tmp_path))))
    head, *listed = str(caught.value).split("\n  ")
    assert f"disagree on {len(lines)} tensors" in head
    assert str(tmp_path) in head or not "".join(shards)
    assert listed == lines


def test_long_list_of_tensors_that_are_not_there_is_cut_short(tmp_path: Path) -> None:
    save_shards(tmp_path, "", "")
    put_index(tmp_path, SHARDS * 500)
    with pytest.raises(CheckpointError, match=r"(?s)disagree on 1000 tensors.*and 980 more$") as caught:
        read_index(locate(Source(str(tmp_path))))
    assert len(str(caught.value)) < 4000


def test_tensor_of_two_shards_is_refused_whatever_the_index_says(tmp_path: Path) -> None:
    save_shards(tmp_path, "ab", "b")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}))
    with pytest.raises(CheckpointError, match=f"b is in {SHARDS[0]} and again in {SHARDS[1]}"):
        read_index(locate(Source(str(tmp_path))))
