"""Safetensors headers: what a good file holds is found, and nothing in a bad one is believed."""

import builtins
import errno
import io
import json
import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.torch import save_file

from shardwise.checkpoint.header import PACKED_DTYPES, parse_header
from shardwise.checkpoint.index import DTYPES, read_header, read_index
from shardwise.checkpoint.untrusted import MAX_TEXT
from shardwise.errors import CheckpointError
from tests.hostile import HEADERS, NO_SAFETENSORS, Hostile, entry, packed


def write(path: Path, header: object, data: int | bytes = 0) -> Path:
    """Write a file with a header."""
    path.write_bytes(packed(header, data))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def refusal(file: Path) -> str:
    """Return the message with which a file is refused, which names the file."""
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    message = str(caught.value)
    assert str(file) in message
    message.encode("utf-8")  # can be printed
    return message


# ---------------------------------------------------------------- good files


@pytest.mark.parametrize(("code", "dtype"), DTYPES.items())
def test_header_of_every_dtype_agrees_with_safetensors(file: Path, code: str, dtype: torch.dtype) -> None:
    numbers = torch.arange(6)
    tensors = {
        "a": (numbers % 2).to(dtype),
        "b": numbers.to(dtype).view(2, 3),
        "c": torch.ones((), dtype=dtype),
    }
    save_file(tensors, file, metadata={"format": "pt"})
    raw = file.read_bytes()
    assert raw.count(f'"dtype":"{code}"'.encode()) == 3
    index = read_header(file)
    assert index.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = index[name]
        assert (found.file, found.dtype, found.shape) == (file, dtype, tuple(tensor.shape))
        assert raw[found.offset : found.offset + found.nbytes] == bytes(
            tensor.reshape(-1).view(torch.uint8).tolist()
        )


def test_every_dtype_of_safetensors_is_read_or_refused_by_name() -> None:
    with pytest.raises(SafetensorError) as caught:
        deserialize(packed({"a": entry([1], 0, 1, "none")}, 1))
    known = set(re.findall(r"`(\w+)`", str(caught.value).partition("expected one of")[2]))
    assert known == DTYPES.keys() | PACKED_DTYPES
    assert not DTYPES.keys() & PACKED_DTYPES


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({}, 0),
        ({"__metadata__": {"format": "pt", "": ""}}, 0),
        ({"a": entry([], 0, 4)}, 4),
        ({"a": entry([0], 0, 0)}, 0),
        ({"a": entry([3, 0, 5], 4, 4), "b": entry([1], 0, 4), "c": entry([0], 0, 0)}, 4),
        ({"b": entry([2], 4, 12), "a": entry([1], 0, 4)}, 12),
        ({"a": entry([1, 1, 1, 1, 1, 1, 1, 1], 0, 4)}, 4),
        ({"": entry([1], 0, 4), "ünï.çödé": entry([1], 4, 8)}, 8),
    ],
    ids=["empty", "metadata", "0-d", "zero-size", "zero-size-between", "order", "rank-8", "names"],
)
def test_unusual_but_valid_header_is_read_as_safetensors_reads_it(
    file: Path, header: dict[str, Any], data: int
) -> None:
    write(file, header, data)
    with safe_open(file, "pt") as reference:
        expected = {name: tuple(reference.get_slice(name).get_shape()) for name in reference.offset_keys()}
    assert {name: found.shape for name, found in read_header(file).items()} == expected


def test_header_may_be_padded_with_spaces(file: Path) -> None:
    raw = json.dumps({"a": entry([1], 0, 4)}).encode() + b"   "
    (found,) = read_header(write(file, raw, 4)).values()
    assert found.offset == 8 + len(raw)


def test_index_names_the_tensors_of_all_files(tmp_path: Path) -> None:
    first = write(tmp_path / "1.safetensors", {"a": entry([1], 0, 4)}, 4)
    second = write(tmp_path / "2.safetensors", {"b": entry([2], 0, 8), "c": entry([], 8, 12)}, 12)
    assert {name: found.file for name, found in read_index([first, second]).items()} == {
        "a": first,
        "b": second,
        "c": second,
    }


def test_tensor_in_two_files_is_refused_with_both_files(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{i}.safetensors", {"a.weight": entry([1], 0, 4)}, 4) for i in (1, 2)]
    with pytest.raises(CheckpointError) as caught:
        read_index(files)
    assert f"a.weight is in 1.safetensors and again in 2.safetensors of {tmp_path}" in str(caught.value)


# ---------------------------------------------------------------- files that must not be believed


@pytest.mark.parametrize("hostile", HEADERS, ids=lambda hostile: hostile.name)
def test_file_that_must_not_be_believed_is_refused_with_what_would_fix_it(
    file: Path, hostile: Hostile
) -> None:
    file.write_bytes(hostile.content)
    message = refusal(file)
    assert hostile.message in message
    assert re.search(r"; (fetch it again|run `git lfs|use the checkpoint)", message)
    assert len(message) < 2000


@pytest.mark.parametrize("hostile", HEADERS, ids=lambda hostile: hostile.name)
def test_what_safetensors_takes_and_we_refuse_is_known(file: Path, hostile: Hostile) -> None:
    file.write_bytes(hostile.content)
    try:
        deserialize(hostile.content)
        with safe_open(file, "pt"):
            accepted = True
    except SafetensorError:
        accepted = False
    assert accepted == hostile.accepted_elsewhere


def test_hostile_files_have_distinct_names() -> None:
    names = [hostile.name for hostile in HEADERS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("folder", "it is a directory, not a file"),
        ("pipe", "it is a pipe, a socket or a device, not a file"),
        ("missing", "No such file"),
        ("dangling", "No such file"),
        ("loop", "symbolic links"),
    ],
)
def test_path_that_is_no_readable_file_is_refused_at_once(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")  # opened as a file is, it would wait for a writer
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert message in refusal(tmp_path / path)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
def test_device_is_refused(device: str) -> None:
    assert "not a file" in refusal(Path(device))


def test_disk_that_fails_in_a_header_is_an_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    file.write_bytes(packed({}))
    monkeypatch.setattr(builtins, "open", lambda *args, **kwargs: Failing())
    assert os.strerror(errno.EIO) in refusal(file)


def test_file_that_shrinks_while_its_header_is_read_is_refused(file: Path) -> None:
    content = packed({"a": entry([1], 0, 4)}, 4)
    with pytest.raises(CheckpointError, match=f"{file} .* became shorter .* wait until it is complete"):
        parse_header(file, io.BytesIO(content[:20]), len(content))


@pytest.mark.parametrize("length", [MAX_TEXT + 1, 2**33])
def test_header_longer_than_safetensors_allows_is_refused(file: Path, length: int) -> None:
    file.write_bytes(packed(b"{}", 0, length))
    os.truncate(file, 8 + length)  # a hole: takes no space
    assert f"claims a header of {length} bytes; {MAX_TEXT} are allowed" in refusal(file)
    with pytest.raises(SafetensorError, match="too large"):
        safe_open(file, "pt").__enter__()


@pytest.mark.parametrize("hostile", NO_SAFETENSORS, ids=lambda hostile: hostile.name)
def test_nothing_is_read_by_a_length_that_was_not_checked(file: Path, hostile: Hostile) -> None:
    asked: list[int] = []

    class Counting(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            asked.append(size if size is not None else -1)
            return super().read(size)

    with pytest.raises(CheckpointError):
        parse_header(file, Counting(hostile.content), len(hostile.content))
    assert all(0 <= size <= max(8, len(hostile.content)) for size in asked)


@pytest.mark.parametrize("size", [10**12, 2**60])
def test_header_that_claims_terabytes_costs_nothing(file: Path, size: int) -> None:
    file.write_bytes(packed({"a": entry([size], 0, size, "U8")}, 4))
    tracemalloc.start()
    refusal(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("kept", [0, 5, 9, 40, 0.5, -1])
def test_truncated_file_is_refused_wherever_it_is_cut(file: Path, kept: float) -> None:
    save_file({"a": torch.ones(64), "b": torch.zeros(2, 8)}, file)
    raw = file.read_bytes()
    read_header(file)
    file.write_bytes(raw[: int(kept * len(raw)) if isinstance(kept, float) else kept])
    refusal(file)
