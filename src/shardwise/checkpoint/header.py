"""The header of a safetensors file: what tensors there are, checked against the bytes that the file has.

Format: https://github.com/huggingface/safetensors#format. A file is 8 bytes of header length (little endian),
the header as JSON, and the tensors' bytes. Nothing in a file is trusted: the sizes it claims must describe
exactly the bytes it has. Opens no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shardwise.checkpoint.untrusted import (
    MAX_TEXT,
    Invalid,
    check_name,
    parse_object,
    refuse_lfs_pointer,
    short,
)
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
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}

PACKED_DTYPES = {"F4", "F6_E2M3", "F6_E3M2"}
"""Dtypes of the format whose numbers share bytes; torch casts none of them."""

_KNOWN_DTYPES = DTYPES.keys() | PACKED_DTYPES
_MAX_DIMS = 8
_MAX_COUNT = 2**63 - 1
_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: what it is, and where its bytes are (`offset` from the start of the file)."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def parse_header(file: Path, stream: BinaryIO, size: int) -> dict[str, TensorEntry]:
    """Return the tensors that a safetensors file holds, by name; see `parse_file`."""
    return parse_file(file, stream, size)[0]


def parse_file(file: Path, stream: BinaryIO, size: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the tensors that a safetensors file holds, by name, and its metadata.

    Args:
        file: What the file is called.
        stream: The file, at its start.
        size: How many bytes it has.

    Raises:
        CheckpointError: naming the file, what is wrong with it, and what would fix it.
    """
    try:
        length = _header_length(stream.read(8), size)
        raw = stream.read(length)
        if len(raw) != length:
            raise Invalid("it became shorter while its header was read", "wait until it is complete")
        values, metadata = _named_values(raw)
        tensors = {name: _entry(file, name, value, 8 + length) for name, value in values.items()}
        _check_coverage(tensors, 8 + length, size)
    except Invalid as error:
        raise CheckpointError(f"{file} is not a valid safetensors file: {error}") from error
    return tensors, metadata


def _header_length(start: bytes, size: int) -> int:
    """Return how long the header is, after checking that the file has as much."""
    refuse_lfs_pointer(start)
    if len(start) < 8:
        raise Invalid(f"it has {size} bytes, too few for one")
    length = int.from_bytes(start, "little")
    if length > size - 8:
        raise Invalid(f"it claims a header of {length} bytes and has {size}, so it is truncated or none")
    if length > MAX_TEXT:
        raise Invalid(f"it claims a header of {length} bytes; {MAX_TEXT} are allowed")
    return length


def _named_values(raw: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what the header says by tensor name, and its metadata."""
    if not raw.startswith(b"{"):
        raise Invalid("its header does not start with '{'")
    header = parse_object(raw)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Invalid(f"its metadata is not text by name: {short(metadata)}")
    for name in header:
        check_name(name)
    return header, metadata


def _entry(file: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise Invalid(f"{name} must have dtype, shape and data_offsets and nothing else: {short(value)}")
    dtype = _dtype(name, value["dtype"])
    shape = _naturals(name, "shape", value["shape"])
    if len(shape) > _MAX_DIMS:
        raise Invalid(f"{name} has {len(shape)} dims; at most {_MAX_DIMS} are expected of a weight")
    # Torch and others multiply in 64 bits, before they meet a zero.
    if prod(max(number, 1) for number in shape) > _MAX_COUNT:
        raise Invalid(f"{name} has a shape beyond counting: {list(shape)}")
    offsets = _naturals(name, "data_offsets", value["data_offsets"])
    if len(offsets) != 2:
        raise Invalid(f"{name} must have two data_offsets, begin and end: {list(offsets)[:10]}")
    begin, end = offsets
    needed = prod(shape) * dtype.itemsize
    if end - begin != needed:
        raise Invalid(
            f"{name} of shape {list(shape)} and {value['dtype']} needs {needed} bytes, "
            f"the header gives it {end - begin}"
        )
    return TensorEntry(file, dtype, shape, data_start + begin, needed)


def _dtype(name: str, code: Any) -> torch.dtype:
    if not isinstance(code, str) or code not in _KNOWN_DTYPES:
        raise Invalid(f"{name} has dtype {short(code)}, which the format does not have")
    if code in PACKED_DTYPES:
        raise Invalid(
            f"{name} is stored as {code}, whose numbers share bytes; they cannot be sliced",
            "use the checkpoint that is not quantized",
        )
    return DTYPES[code]


def _naturals(name: str, field: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(number) is not int for number in value):
        raise Invalid(f"{name} must have a list of whole numbers as its {field}: {short(value)}")
    return tuple(value)


def _check_coverage(tensors: Mapping[str, TensorEntry], start: int, size: int) -> None:
    """Check that the tensors fill the file from `start` to its end without a hole or an overlap."""
    before, end = "the header", start
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset < end:
            raise Invalid(f"{name} overlaps {before} at byte {entry.offset}")
        if entry.offset > end:
            raise Invalid(f"no tensor has bytes {end} to {entry.offset}, between {before} and {name}")
        before, end = name, entry.offset + entry.nbytes
    if end > size:
        raise Invalid(f"it has {size} bytes, its header describes {end}: it is truncated")
    if end < size:
        raise Invalid(f"it has {size - end} bytes after its last tensor")
