"""Whether ranks that read other files, as those of two machines do, read copies of one model.

Headers say nothing of values: a fine-tune has those of its base. So ranks that do not read the very same files compare
every small file by a digest of all of it, and every file of weights by one of some of its blocks.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from shardwise.errors import CheckpointError, RankFailure
from shardwise.runtime.group import TensorParallelGroup

BLOCK = 4096
SAMPLES = 254
"""Blocks beside the first and the last of a file of weights that are compared, at places that follow from its size."""

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf"}
_SETTINGS = {".json", ".txt", ".model", ".jinja", ".spm", ".bpe", ".tiktoken", ".py"}
"""What configurations, tokenizers and chat templates are made of; pictures and pages beside them do not count."""
_MAX_LINES = 10
_SMALL = 2**26
"""Larger files are sampled, whatever they hold."""


def files_of(folder: Path) -> dict[str, Path]:
    """Return the files of a pipeline and of its components that change what is drawn, by their path in its folder."""
    found = sorted(path for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.is_file())
    named = {path.relative_to(folder).as_posix(): path for path in found}
    return {
        name: path
        for name, path in named.items()
        if path.suffix in _WEIGHTS | _SETTINGS and not any(part.startswith(".") for part in Path(name).parts)
    }


def compare_copies(
    group: TensorParallelGroup, subject: str, patience: timedelta, files: Mapping[str, Path]
) -> None:
    """Agree that all ranks read the same files, or copies of them.

    A file that only some ranks have is passed over: more may lie in a folder than a load reads.

    Args:
        group: The ranks.
        subject: What is being done, for messages.
        patience: How long to wait for the slowest rank.
        files: By names that are the same on all ranks.

    Raises:
        RankFailure: copies differ; it names the files, and the ranks that have each version.
        CheckpointError: a file cannot be read.
    """
    with group.agreement(subject, patience) as step:
        step.say([group.node, places_of(files.values())])
    if all(place == step.heard[0] for place in step.heard):
        return
    with group.agreement(subject, patience) as step:
        step.say(digests(files))
    lines = list(_differences(step.heard))
    if lines:
        raise RankFailure(
            f"{subject}: the ranks read different copies of the model; copy one of them to all machines\n"
            + "\n".join(f"  {line}" for line in lines[:_MAX_LINES])
            + (f"\n  and {len(lines) - _MAX_LINES} more files" if len(lines) > _MAX_LINES else "")
        )


def _differences(heard: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield a line for each file that all ranks have and that is not the same everywhere."""
    for name in sorted(set(heard[0]).intersection(*heard[1:])):
        versions: dict[str, list[str]] = {}
        for rank, theirs in enumerate(heard):
            versions.setdefault(theirs[name], []).append(str(rank))
        if len(versions) > 1:
            found = "; ".join(
                f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}: {version}"
                for version, ranks in versions.items()
            )
            yield f"{name}: {found}"


def places_of(files: Iterable[Path]) -> list[list[int]]:
    """Return where files are in their file system; two ranks of one machine with equal places read the same files.

    Raises:
        CheckpointError: a file is not there any more.
    """
    try:
        found = [path.stat() for path in files]
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from error
    return [[status.st_dev, status.st_ino, status.st_size] for status in found]


def digests(files: Mapping[str, Path]) -> dict[str, str]:
    """Return short texts by name, equal for copies of a file.

    Raises:
        CheckpointError: a file cannot be read.
    """
    try:
        return {name: _digest(path) for name, path in files.items()}
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from error


def _digest(path: Path) -> str:
    size = path.stat().st_size
    found = hashlib.blake2b(digest_size=8)
    with path.open("rb", buffering=0) as stream:
        if path.suffix not in _WEIGHTS and size <= _SMALL:
            while piece := stream.read(2**20):
                found.update(piece)
        else:
            for offset in _sampled(size):
                found.update(os.pread(stream.fileno(), BLOCK, offset))
    return f"{size} bytes ({found.hexdigest()})"


def _sampled(size: int) -> list[int]:
    """Return the offsets of the blocks that stand for a file: the first, the last, and some that its size chooses."""
    last = max(size - BLOCK, 0)
    chosen = random.Random(size)
    return sorted({0, last, *(chosen.randint(0, last) for _ in range(SAMPLES))})
