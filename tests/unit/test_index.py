"""Safetensors headers: what a good file holds is found, and nothing in a bad one is believed."""

import json
import os
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from shardwise.checkpoint.index import DTYPES, read_header, read_index
from shardwise.errors import CheckpointError

HUGE = 10**4000
"""A size that no file has; its square has more digits than Python prints by default."""


def entry(shape: Any, begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(path: Path, header: object, data: int | bytes = 0, length: int | None = None) -> Path:
    """Write a file: `header` as JSON, unless it is bytes; `data` bytes after it; `length` as it is claimed."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    claimed = len(raw) if length is None else length
    tail = data if isinstance(data, bytes) else bytes(data)
    path.write_bytes(claimed.to_bytes(8, "little") + raw + tail)
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
    with pytest.raises(CheckpointError, match=r"a\.weight is in 1\.safetensors and again in 2\.safetensors"):
        read_index(files)


# ---------------------------------------------------------------- files that are no safetensors


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes, too few"),
        (b"1234567", "has 7 bytes, too few"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
        (bytes(8), "invalid header"),
        (b"PK\x03\x04" + bytes(100), "claims a header of"),
    ],
    ids=["empty", "seven-bytes", "lfs-pointer", "no-header", "zip"],
)
def test_file_that_is_no_safetensors_is_refused(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    assert message in refusal(file)


@pytest.mark.parametrize("path", ["folder", "missing", "dangling"])
def test_path_that_is_no_readable_file_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert "cannot be read" in refusal(tmp_path / path)


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="the machine has no /dev/zero")
def test_device_without_end_is_refused() -> None:
    refusal(Path("/dev/zero"))


@pytest.mark.parametrize("length", [3, 10**6, 2**31, 2**63, 2**64 - 1])
def test_header_longer_than_the_file_is_refused_before_anything_is_allocated(file: Path, length: int) -> None:
    write(file, b"{}", 0, length)
    assert f"claims a header of {length} bytes in a file of 10" in refusal(file)


def test_header_longer_than_the_format_allows_is_refused(file: Path) -> None:
    length = 100 * 2**20 + 1
    with write(file, b"{}", 0, length).open("r+b") as stream:
        stream.truncate(8 + length)  # a hole: takes no space
    assert f"claims a header of {length} bytes" in refusal(file)


# ---------------------------------------------------------------- headers that are not what they should be


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"not json",
        b'{"a": }',
        b"{} {}",
        b"{}\0",
        b'{"a\xff": 1}',
        b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": 1' + b"0" * 5000 + b"}",
        b" {}",
        b"\n{}",
    ],
    ids=[
        "empty",
        "cut",
        "text",
        "no-value",
        "two-objects",
        "nul",
        "not-utf-8",
        "byte-order-mark",
        "utf-16",
        "deep-list",
        "deep-object",
        "long-number",
        "space-first",
        "newline-first",
    ],
)
def test_header_that_is_no_json_object_from_its_first_byte_is_refused(file: Path, raw: bytes) -> None:
    assert "invalid header" in refusal(write(file, raw))


@pytest.mark.parametrize("header", [[], "text", 7, None, True])
def test_header_that_is_json_but_no_object_is_refused(file: Path, header: object) -> None:
    assert "invalid header" in refusal(write(file, header))


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": %s, "a": %s}',
        b'{"a": %s, "\\u0061": %s}',
        b'{"__metadata__": {}, "a": %s, "__metadata__": {}, "b": %s}',
    ],
    ids=["plain", "escaped", "metadata"],
)
def test_name_given_twice_is_refused(file: Path, raw: bytes) -> None:
    one = json.dumps(entry([1], 0, 4)).encode()
    assert "given twice" in refusal(write(file, raw % (one, one), 4))


def test_field_given_twice_is_refused(file: Path) -> None:
    raw = b'{"a": {"dtype": "F32", "shape": [2], "shape": [1], "data_offsets": [0, 4]}}'
    assert "'shape' is given twice" in refusal(write(file, raw, 4))


@pytest.mark.parametrize("metadata", [5, [], "text", {"a": 1}, {"a": None}, {"a": {"b": "c"}}])
def test_metadata_other_than_text_by_name_is_refused(file: Path, metadata: object) -> None:
    refusal(write(file, {"__metadata__": metadata, "a": entry([1], 0, 4)}, 4))


def test_name_that_is_no_text_is_refused(file: Path) -> None:
    raw = b'{"\\ud800": %s}' % json.dumps(entry([1], 0, 4)).encode()
    refusal(write(file, raw, 4))


# ---------------------------------------------------------------- entries that are not what they should be


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        "text",
        [],
        {},
        {"dtype": "F32", "shape": [1]},
        {"dtype": "F32", "data_offsets": [0, 4]},
        {"shape": [1], "data_offsets": [0, 4]},
        {**entry([1], 0, 4), "more": 1},
    ],
)
def test_entry_without_exactly_its_three_fields_is_refused(file: Path, value: object) -> None:
    assert "a has an invalid entry" in refusal(write(file, {"a": value}, 4))


@pytest.mark.parametrize("dtype", ["F128", "f32", "", "F4", 4, None, ["F32"], {"F32": 1}])
def test_unknown_dtype_is_refused(file: Path, dtype: object) -> None:
    assert "a has an invalid entry" in refusal(write(file, {"a": entry([1], 0, 4, dtype)}, 4))


@pytest.mark.parametrize("shape", [None, 1, {}, "", "1", {"1": 1}, [None], [[1]], ["1"]])
def test_shape_that_is_no_list_of_numbers_is_refused(file: Path, shape: object) -> None:
    refusal(write(file, {"a": entry(shape, 0, 4)}, 4))


@pytest.mark.parametrize(
    "offsets", [None, 4, [], [4], [0, 2, 4], "04", {"0": 1, "4": 1}, [None, 4], ["0", "4"], [[0], [4]]]
)
def test_offsets_that_are_no_pair_of_numbers_are_refused(file: Path, offsets: object) -> None:
    value = {"dtype": "F32", "shape": [1], "data_offsets": offsets}
    refusal(write(file, {"a": value}, 4))


@pytest.mark.parametrize("number", [True, 1.0, -1, float("nan"), float("inf"), 1e400])
@pytest.mark.parametrize(
    "build", [lambda n: entry([n], 0, 4), lambda n: entry([1], n, 4), lambda n: entry([1], 0, n)]
)
def test_size_that_is_no_whole_number_is_refused(
    file: Path, build: Callable[..., Any], number: object
) -> None:
    assert "sizes that are not whole numbers" in refusal(write(file, {"a": build(number)}, 4))


@pytest.mark.parametrize(
    ("shape", "begin", "end", "dtype"),
    [
        ([2], 0, 4, "F32"),
        ([1], 0, 4, "F64"),
        ([1], 4, 0, "F32"),
        ([], 0, 0, "F32"),
        ([0], 0, 4, "F32"),
        ([2**31, 2**31], 0, 4, "F32"),
        ([2**62, 4], 0, 0, "U8"),
        ([3037000500, 3037000500], 0, 4, "U8"),
    ],
)
def test_shape_that_does_not_fill_its_bytes_is_refused(
    file: Path, shape: list[int], begin: int, end: int, dtype: str
) -> None:
    needed = prod(shape) * DTYPES[dtype].itemsize
    message = refusal(write(file, {"a": entry(shape, begin, end, dtype)}, 4))
    assert f"needs {needed} bytes, the header gives it {end - begin}" in message


@pytest.mark.parametrize("shape", [[HUGE, HUGE], [HUGE] * 8])
def test_shape_too_large_to_print_is_refused(file: Path, shape: list[int]) -> None:
    refusal(write(file, {"a": entry(shape, 0, 4)}, 4))


@pytest.mark.parametrize("shape", [[1] * 9, [1] * 1000, [0] * 9])
def test_shape_of_more_dims_than_a_weight_has_is_refused(file: Path, shape: list[int]) -> None:
    end = 4 * prod(shape)
    refusal(write(file, {"a": entry(shape, 0, end)}, end))


# ---------------------------------------------------------------- tensors that do not fill the file


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, 12, "leave a hole or overlap"),
        ({"a": entry([1], 4, 8)}, 8, "leave a hole or overlap"),
        ({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, 8, "leave a hole or overlap"),
        ({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, 4, "leave a hole or overlap"),
        ({"a": entry([2], 0, 8), "b": entry([0], 4, 4)}, 8, "leave a hole or overlap"),
        ({"a": entry([1], 0, 4), "b": entry([0], 10**12, 10**12)}, 4, "leave a hole or overlap"),
        ({"a": entry([2], 0, 8)}, 7, "truncated or damaged"),
        ({"a": entry([2], 0, 8)}, 0, "truncated or damaged"),
        ({"a": entry([2], 0, 8)}, 9, "truncated or damaged"),
        ({}, 1, "truncated or damaged"),
        ({"a": entry([10**15], 0, 4 * 10**15)}, 4, "truncated or damaged"),
    ],
    ids=[
        "hole",
        "hole-first",
        "overlap",
        "same-bytes",
        "zero-size-inside",
        "zero-size-far-away",
        "one-byte-short",
        "no-data",
        "one-byte-long",
        "data-of-nothing",
        "petabytes",
    ],
)
def test_tensors_that_do_not_fill_the_file_are_refused(
    file: Path, header: dict[str, Any], data: int, message: str
) -> None:
    assert message in refusal(write(file, header, data))


@pytest.mark.parametrize("kept", [0, 5, 9, 40, 0.5, -1])
def test_truncated_file_is_refused_wherever_it_is_cut(file: Path, kept: float) -> None:
    save_file({"a": torch.ones(64), "b": torch.zeros(2, 8)}, file)
    raw = file.read_bytes()
    read_header(file)
    file.write_bytes(raw[: int(kept * len(raw)) if isinstance(kept, float) else kept])
    refusal(file)
