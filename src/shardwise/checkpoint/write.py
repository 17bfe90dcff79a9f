"""New safetensors files: what they are called, what their headers say, and where each tensor's bytes go.

The same tensors give the same files as `save_pretrained` does, byte for byte. Plans are made here, and
single runs of bytes written; who has the bytes is left to `save`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from types import MappingProxyType

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from shardwise.checkpoint.files import manifest_name, with_variant
from shardwise.checkpoint.header import DTYPES, TensorEntry
from shardwise.checkpoint.read_plan import Read
from shardwise.errors import CheckpointError, UnsupportedOption

CODES = {dtype: code for code, dtype in DTYPES.items()}
"""How the format calls torch's dtypes."""

_ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
)
"""The order in which the safetensors library writes tensors: wide ones first, each at a multiple of its size."""

_ALIGNMENT = 8


@dataclass(frozen=True)
class Stored:
    """What is to be stored of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor has."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class NewFile:
    """A safetensors file to be written: its first bytes, and where the tensors go behind them."""

    name: str
    start: bytes
    """Length of the header and the header."""
    entries: Mapping[str, TensorEntry]

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.start) + sum(entry.nbytes for entry in self.entries.values())


@dataclass(frozen=True)
class NewCheckpoint:
    """The weight files of a checkpoint to be written, and its index if there are several."""

    files: tuple[NewFile, ...]
    index_name: str
    index: str | None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for file in self.files for entry in file.entries.values())


def new_checkpoint(
    tensors: Mapping[str, Stored],
    stem: str,
    variant: str | None,
    max_shard_size: int | str,
    metadata: Mapping[str, object] = MappingProxyType({}),
) -> NewCheckpoint:
    """Return how the tensors are split into files, as diffusers and transformers split and name them.

    `metadata` is what the index says beside the total size.

    Raises:
        UnsupportedOption: `max_shard_size` is no size, or `variant` cannot stand in the name of a file.
    """
    _check_variant(variant)
    pattern = with_variant(f"{stem}.safetensors", variant).replace(".safetensors", "{suffix}.safetensors")
    try:
        split = split_state_dict_into_shards_factory(
            dict(tensors),
            get_storage_size=lambda stored: stored.nbytes,
            filename_pattern=pattern,
            max_shard_size=max_shard_size,
        )
    except (TypeError, ValueError) as error:
        raise UnsupportedOption(
            f'max_shard_size must be a number of bytes or a text such as "5GB", got {max_shard_size!r}'
        ) from error
    files = tuple(
        new_file(file, {name: tensors[name] for name in names})
        for file, names in split.filename_to_tensors.items()
    )
    index = {"metadata": {**metadata, **split.metadata}, "weight_map": split.tensor_to_filename}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n" if split.is_sharded else None
    return NewCheckpoint(files, with_variant(f"{stem}.safetensors.index.json", variant), text)


def new_file(name: str, tensors: Mapping[str, Stored], metadata: Mapping[str, str] | None = None) -> NewFile:
    """Return a file that holds the tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    order = sorted(tensors, key=lambda key: (_ORDER.index(CODES[tensors[key].dtype]), key))
    begins = dict(zip(order, accumulate((tensors[key].nbytes for key in order), initial=0), strict=False))
    for key, begin in begins.items():
        stored = tensors[key]
        offsets = [begin, begin + stored.nbytes]
        header[key] = {"dtype": CODES[stored.dtype], "shape": list(stored.shape), "data_offsets": offsets}
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % _ALIGNMENT)
    start = len(raw).to_bytes(8, "little") + raw
    entries = {
        key: TensorEntry(Path(name), what.dtype, what.shape, len(start) + begins[key], what.nbytes)
        for key, what in tensors.items()
    }
    return NewFile(name, start, entries)


def _check_variant(variant: str | None) -> None:
    if variant is not None and not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", variant):
        raise UnsupportedOption(
            f'variant must be a part of a file name such as "fp16", or None, got {variant!r}'
        )


@contextmanager
def created(path: Path, file: NewFile) -> Iterator[int]:
    """Make a new file of its full size, with its header, and yield its descriptor; its bytes are on disk behind it.

    Raises:
        CheckpointError: it cannot be written.
    """
    with _explained(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(descriptor, file.size)
            write_all(descriptor, memoryview(file.start), 0)
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a new text file, and return when it is on disk.

    Raises:
        CheckpointError: it cannot be written.
    """
    with _explained(path), open(path, "x", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def write_runs(descriptor: int, read: Read, data: memoryview) -> None:
    """Write bytes, which are packed in `data`, to the places from which `read` would read them.

    Raises:
        OSError: they cannot be written.
    """
    done = 0
    for start, length in read.runs():
        write_all(descriptor, data[done : done + length], start)
        done += length


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at an offset.

    Raises:
        OSError: it cannot be written.
    """
    while data:
        done = os.pwrite(descriptor, data, offset)
        data, offset = data[done:], offset + done


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error


def rank_file(stem: str, variant: str | None, rank: int, degree: int) -> str:
    """Return the name of the file of one rank in a sharded checkpoint."""
    name = with_variant(f"{stem}.safetensors", variant).removesuffix(".safetensors")
    return f"{name}-rank-{rank + 1:05d}-of-{degree:05d}.safetensors"


def _weight_names(stem: str, variant: str | None) -> re.Pattern[str]:
    """Return what the names of the weight files, and of what lists them, of one variant look like."""
    single = re.escape(with_variant(f"{stem}.safetensors", variant)).removesuffix(r"\.safetensors")
    index = re.escape(with_variant(f"{stem}.safetensors.index.json", variant))
    manifest = re.escape(manifest_name(stem, variant))
    return re.compile(rf"{single}((-rank)?-\d{{5}}-of-\d{{5}})?\.safetensors|{index}|{manifest}")


def superseded(
    names: Iterable[str], stem: str, variant: str | None, texts: Collection[str] = ("config.json",)
) -> set[str]:
    """Return which names of files in a folder are those of a checkpoint that a new one takes the place of.

    `texts` are the names of the files beside its weights.
    """
    weights = _weight_names(stem, variant)
    return {name for name in names if name in texts or weights.fullmatch(name)}
