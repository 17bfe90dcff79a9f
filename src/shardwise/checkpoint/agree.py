"""What the ranks must see alike before the first weight is read: the files, and every byte that their headers claim."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from shardwise.checkpoint.index import TensorEntry
from shardwise.checkpoint.layouts import PiecedEntry
from shardwise.checkpoint.read import Stamp, stamp
from shardwise.errors import CheckpointError
from shardwise.runtime.shard import digest


def stamps_of(files: Iterable[Path]) -> dict[Path, Stamp]:
    """Return what tells later that a file was written to; take them before the headers are read.

    Raises:
        CheckpointError: a file is not there.
    """
    try:
        return {file: stamp(file.stat()) for file in files}
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error}") from error


def describe(index: Mapping[str, TensorEntry], stamps: Mapping[Path, Stamp]) -> dict[str, str]:
    """Return short texts, equal on two ranks if they see the same files with the same headers.

    Files are told apart by name, for ranks of several nodes keep them in different folders. Times do not count.
    """
    tensors = defaultdict(list)
    for key, entry in index.items():
        for piece in entry.pieces if isinstance(entry, PiecedEntry) else (entry,):
            tensors[piece.file].append((key, str(piece.dtype), piece.shape, piece.offset))
    files = {
        f"{file.name}": f"{size} bytes, {len(tensors[file])} tensors ({digest(sorted(tensors[file]))})"
        for file, (size, *_) in stamps.items()
    }
    return {"files": ", ".join(sorted(files)), **files}
