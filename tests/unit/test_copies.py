"""Copies of a model that differ are told apart, and what does not change a picture is not compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.checkpoint import copies
from shardwise.checkpoint.copies import BLOCK, SAMPLES, digests, files_of, places_of
from shardwise.errors import CheckpointError


def pipeline(folder: Path, weight: bytes = bytes(BLOCK)) -> Path:
    (folder / "transformer").mkdir(parents=True)
    (folder / "tokenizer").mkdir()
    (folder / "model_index.json").write_text("{}")
    (folder / "transformer" / "config.json").write_text(json.dumps({"eps": 1e-6}))
    (folder / "transformer" / "model.safetensors").write_bytes(weight)
    (folder / "tokenizer" / "merges.txt").write_text("a b")
    return folder


def test_files_are_those_that_change_what_is_drawn(tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "m")
    for other in ("README.md", "picture.png", ".cache.json", "transformer/.lock.json"):
        (folder / other).write_text("x")
    assert set(files_of(folder)) == {
        "model_index.json",
        "transformer/config.json",
        "transformer/model.safetensors",
        "tokenizer/merges.txt",
    }


@pytest.mark.parametrize("name", ["model_index.json", "transformer/config.json", "tokenizer/merges.txt"])
def test_small_file_that_differs_anywhere_has_another_digest(tmp_path: Path, name: str) -> None:
    first, second = (files_of(pipeline(tmp_path / copy)) for copy in "ab")
    assert digests(first) == digests(second)
    data = second[name].read_bytes()
    second[name].write_bytes(data[:-1] + b"!")
    differ = {key for key, value in digests(first).items() if digests(second)[key] != value}
    assert differ == {name}


def test_weights_are_compared_by_their_first_their_last_and_other_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 5000 * BLOCK + 17
    places = copies._sampled(size)
    assert places == copies._sampled(size)  # all ranks look at the same
    assert {0, size - BLOCK} < set(places)
    assert len(places) == SAMPLES + 2
    assert max(places) == size - BLOCK

    asked: list[int] = []
    read = copies.os.pread
    monkeypatch.setattr(copies.os, "pread", lambda fd, n, at: (asked.append(n), read(fd, n, at))[1])
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.truncate(size)
    before = digests({"m": file})
    assert sum(asked) == (SAMPLES + 2) * BLOCK  # whatever the size
    with file.open("r+b") as stream:
        stream.seek(places[100])
        stream.write(b"!")
    assert digests({"m": file}) != before


def test_every_fine_tune_differs_somewhere_that_is_looked_at(tmp_path: Path) -> None:
    # 64 MiB of which each 64th KiB is other: far less than training changes.
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(2**26))
    before = digests({"m": file})
    with file.open("r+b") as stream:
        for at in range(0, 2**26, 2**16):
            stream.seek(at)
            stream.write(b"!" * 2**10)
    assert digests({"m": file}) != before


def test_file_that_is_gone_is_an_error_with_its_name(tmp_path: Path) -> None:
    gone = {"m": tmp_path / "model.safetensors"}
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: No such file"):
        digests(gone)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: No such file"):
        places_of(gone.values())
