"""Cuts the files of a checkpoint in another way, without a model and without ranks: bytes are copied in pieces.

What is read of the old files for one rank goes to the same places of a new file. A job that was stopped can be gone on
with: files that are complete are not written again.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.folder import NewFolder, Superseded
from shardwise.checkpoint.index import TensorEntry
from shardwise.checkpoint.read import OpenFiles, Progress, Stamp
from shardwise.checkpoint.read_plan import CHUNK, Place, Read, Wanted, plan_reads
from shardwise.checkpoint.write import NewFile, created, write_all, write_text
from shardwise.errors import CheckpointError
from shardwise.plan.layout import Layout, Replicated
from shardwise.runtime.shard import digest


@dataclass(frozen=True)
class Target:
    """A new file, and whose slices it holds.

    Args:
        file: The file.
        keys: The key in the old files of each of its tensors.
        layouts: How they are cut; what is not listed is whole.
        rank: The rank, of `degree`.
        degree: Number of ranks.
    """

    file: NewFile
    keys: Mapping[str, str]
    layouts: Mapping[str, Layout]
    rank: int = 0
    degree: int = 1

    def reads(self, index: Mapping[str, TensorEntry]) -> tuple[Read, ...]:
        """Return what is to be read of the old files; its places are those in the tensors of the new file."""
        wanted = {
            name: Wanted(index[key], self.layouts.get(name, Replicated()), index[key].dtype)
            for name, key in self.keys.items()
        }
        return plan_reads(wanted, self.rank, self.degree).reads


@dataclass(frozen=True)
class Job:
    """New files to be made of old ones.

    Args:
        index: The tensors of the old files.
        stamps: What the old files were when their headers were read.
        targets: The new files.
        texts: Small files beside them: their text by name.
    """

    index: Mapping[str, TensorEntry]
    stamps: Mapping[Path, Stamp]
    targets: Sequence[Target]
    texts: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all new tensors."""
        return sum(_data_bytes(target.file) for target in self.targets)

    def name(self) -> str:
        """Return what is equal for the same job on the same files only."""
        old = sorted((str(file), stamp) for file, stamp in self.stamps.items())
        new = [(target.file.name, target.file.start, sorted(target.keys.items())) for target in self.targets]
        layouts = [sorted((k, str(v)) for k, v in target.layouts.items()) for target in self.targets]
        return digest((old, new, layouts, sorted(self.texts.items())))

    def run(self, folder: Path, superseded: Superseded, progress: Progress | None = None) -> int:
        """Make the folder, complete or not at all, and return how many of its files were there from a run before.

        Raises:
            CheckpointError: a file cannot be read or written, or has changed; another process is doing the same job.
        """
        done = 0
        with NewFolder(folder, superseded, self.name()) as new, _alone(new.path):
            for target in self.targets:
                if _is_complete(new.path, target.file):
                    done += 1
                    if progress is not None:
                        progress(_data_bytes(target.file), self.nbytes)
                else:
                    self._write(new.path, target, progress)
            for name, text in self.texts.items():
                (new.path / name).unlink(missing_ok=True)
                write_text(new.path / name, text)
            new.publish()
        return done

    def _write(self, folder: Path, target: Target, progress: Progress | None) -> None:
        """Write one file under another name, and give it its own when it is complete and on disk."""
        unfinished = folder / f"{target.file.name}.part"
        unfinished.unlink(missing_ok=True)
        buffer = memoryview(bytearray(CHUNK))
        with OpenFiles(self.stamps) as files, created(unfinished, target.file) as descriptor:
            for read in target.reads(self.index):
                data = buffer[: read.nbytes]
                files.fill(read, data)
                for place in read.places:
                    offset = target.file.entries[place.key].offset
                    _write_place(descriptor, place, offset, data[: place.nbytes], read.rows)
                    data = data[place.nbytes :]
                if progress is not None:
                    progress(read.nbytes, self.nbytes)
        unfinished.rename(folder / target.file.name)


def _write_place(descriptor: int, place: Place, offset: int, data: memoryview, rows: int) -> None:
    """Write bytes to their place in a tensor that begins at `offset`."""
    if not place.pitch:
        write_all(descriptor, data, offset + place.start)
        return
    width = place.nbytes // rows
    for row in range(rows):
        write_all(descriptor, data[row * width : (row + 1) * width], offset + place.start + row * place.pitch)


def _data_bytes(file: NewFile) -> int:
    return file.size - len(file.start)


def _is_complete(folder: Path, file: NewFile) -> bool:
    """Return whether a run before has completed a file: only then does it have its name."""
    path = folder / file.name
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    with open(path, "rb") as stream:
        return stream.read(len(file.start)) == file.start


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Be the only process that works in a folder.

    Raises:
        CheckpointError: another one does.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CheckpointError(f"another process is writing {folder}: wait until it has ended") from error
        yield
    finally:
        os.close(descriptor)
