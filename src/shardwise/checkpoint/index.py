"""Headers of safetensors files, checked before anything is read by them.

Format: https://github.com/huggingface/safetensors#format. A file is 8 bytes of header length (little endian),
the header as JSON, and the tensors' bytes. Nothing in a file is trusted: the sizes it claims must describe
exactly the bytes it has.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardwise.errors import CheckpointError

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

_MAX_HEADER = 100 * 2**20
_MAX_DIMS = 8
_FIELDS = {"dtype", "shape", "data_offsets"}
_LFS_POINTER = b"version "


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: what it is, and where its bytes are (`offset` from the start of the file)."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_index(files: Iterable[Path]) -> dict[str, TensorEntry]:
    """Return every tensor of a checkpoint by name.

    Raises:
        CheckpointError: a file is invalid, or two files hold a tensor of the same name.
    """
    index: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if name in index:
                raise CheckpointError(f"{name} is in {index[name].file.name} and again in {file.name}")
            index[name] = entry
    return index


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return the tensors that one safetensors file holds.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            start = stream.read(8)
            length = _header_length(file, start, size)
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    entries = [_entry(file, name, value, 8 + length) for name, value in _parse(file, raw).items()]
    _check_coverage(file, [entry for _, entry in entries], 8 + length, size)
    return dict(entries)


def _header_length(file: Path, start: bytes, size: int) -> int:
    if start == _LFS_POINTER:
        raise CheckpointError(f"{file} is a Git LFS pointer, not the weights: run `git lfs pull`")
    if len(start) < 8:
        raise CheckpointError(f"{file} has {size} bytes, too few for a safetensors file")
    length = int.from_bytes(start, "little")
    if length > min(_MAX_HEADER, size - 8):
        raise CheckpointError(
            f"{file} claims a header of {length} bytes in a file of {size}: truncated or invalid"
        )
    return length


def _parse(file: Path, raw: bytes) -> dict[str, Any]:
    """Return the header without its metadata; a name given twice is an error, where JSON would keep the last."""
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} has an invalid header: {error}") from error
    if not isinstance(header, dict) or not raw.startswith(b"{"):
        raise CheckpointError(f"{file} has an invalid header: not a JSON object from its first byte")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{file} has an invalid header: its metadata is not text by name")
    for name in header:
        if not name.isprintable():  # also what is no text at all, such as half of a surrogate pair
            raise CheckpointError(f"{file} has an invalid header: {name!r} is not a name")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"{name!r} is given twice")
        result[name] = value
    return result


def _entry(file: Path, name: str, value: Any, data_start: int) -> tuple[str, TensorEntry]:
    if not _is_entry(value):
        raise CheckpointError(f"{file}: {name} has an invalid entry {str(value)[:200]!r}")
    dtype, shape, (begin, end) = DTYPES[value["dtype"]], tuple(value["shape"]), value["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise CheckpointError(f"{file}: {name} has sizes that are not whole numbers: {str(value)[:200]}")
    needed = prod(shape) * dtype.itemsize
    if end - begin != needed:
        # Python refuses to print integers of thousands of digits, and a file may claim such a product.
        size = str(needed) if needed.bit_length() < 1000 else "far more"
        raise CheckpointError(
            f"{file}: {name} of shape {list(shape)} and {value['dtype']} needs {size} bytes, "
            f"the header gives it {end - begin}"
        )
    return name, TensorEntry(file, dtype, shape, data_start + begin, end - begin)


def _is_entry(value: Any) -> bool:
    """Return whether `value` has exactly the fields of an entry, each of the right type."""
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        return False
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    lists = isinstance(shape, list) and isinstance(offsets, list)
    return (
        isinstance(dtype, str) and dtype in DTYPES and lists and len(shape) <= _MAX_DIMS and len(offsets) == 2
    )


def _check_coverage(file: Path, entries: list[TensorEntry], start: int, size: int) -> None:
    """Check that the tensors fill the file from `start` to its end without a hole or an overlap."""
    for entry in sorted(entries, key=lambda e: (e.offset, e.nbytes)):
        if entry.offset != start:
            raise CheckpointError(
                f"{file}: the tensors leave a hole or overlap at byte {min(start, entry.offset)}"
            )
        start += entry.nbytes
    if start != size:
        raise CheckpointError(f"{file} has {size} bytes, its header describes {start}: truncated or damaged")
