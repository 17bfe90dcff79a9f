"""The tensors of a checkpoint, from the headers of its files: each in one file, where its index says.

Reads headers and no weights. What a header must be is in `header`, what an index must be in `weight_map`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shardwise.checkpoint.files import WeightFiles
from shardwise.checkpoint.header import DTYPES, TensorEntry, parse_file, parse_header
from shardwise.checkpoint.layouts import PiecedEntry, joined, parse_layouts
from shardwise.checkpoint.untrusted import Invalid, opened
from shardwise.checkpoint.weight_map import check_weight_map
from shardwise.errors import CheckpointError

__all__ = ["DTYPES", "TensorEntry", "read_header", "read_index"]


def read_index(files: Iterable[Path]) -> dict[str, TensorEntry]:
    """Return every tensor of a checkpoint by name.

    Raises:
        CheckpointError: a file is invalid, two files hold a tensor of the same name, or the index of `files`
            says otherwise.
    """
    if isinstance(files, WeightFiles) and files.sharded:
        return dict(read_sharded_index(files))
    index: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if name in index:
                raise CheckpointError(
                    f"{name} is in {index[name].file.name} and again in {file.name} of {file.parent}: "
                    "files of two checkpoints are mixed; fetch it again into an empty folder"
                )
            index[name] = entry
    if isinstance(files, WeightFiles) and files.weight_map is not None:
        check_weight_map(files.weight_map, {name: entry.file for name, entry in index.items()})
    return index


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return the tensors that one safetensors file holds.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    with opened(file) as (stream, size):
        return parse_header(file, stream, size)


def read_sharded_index(files: Iterable[Path]) -> dict[str, PiecedEntry]:
    """Return every tensor of a checkpoint that has a file for each rank, by name.

    Raises:
        CheckpointError: a file is invalid, or they are not those of all ranks, in rank order.
    """
    parts = []
    for file in files:
        with opened(file) as (stream, size):
            tensors, metadata = parse_file(file, stream, size)
        try:
            parts.append((file, tensors, parse_layouts(metadata, tensors)))
        except Invalid as error:
            raise CheckpointError(f"{file} is no file of a sharded checkpoint: {error}") from error
    return joined(parts)
