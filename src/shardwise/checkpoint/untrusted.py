"""Files and text of unknown origin: regular files only, strict JSON only.

Owns what is refused whatever a file means. Python's JSON is laxer than the standard, and laxer than what other
readers of the same file take: it keeps the last of two equal names, and reads NaN, half of a surrogate pair,
integers of any length, and -0 as one of them.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.errors import CheckpointError

MAX_TEXT = 100_000_000
"""Bytes of JSON that are read at most; the limit that the safetensors library has for headers."""

_MAX_NAME = 1024
_LFS_POINTER = b"version "
_FETCH = "fetch it again, or save the checkpoint again"


class Invalid(Exception):
    """What is wrong inside a file, and what would fix it; who knows the file says where."""

    def __init__(self, what: str, fix: str = _FETCH) -> None:
        super().__init__(f"{what}; {fix}")


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file, and tell how long it is.

    Raises:
        CheckpointError: it is not there or no regular file, or it cannot be read, by the caller's reads included.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for somebody to write into it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} cannot be read: it is {kind_of(status.st_mode)}, not a file")
            with open(descriptor, "rb", closefd=False) as stream:
                yield stream, status.st_size
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def kind_of(mode: int) -> str:
    """Return what a file that is not regular is, from its mode."""
    return "a directory" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"


def refuse_lfs_pointer(start: bytes) -> None:
    """Refuse the text that git keeps in place of a large file.

    Raises:
        Invalid: `start`, the first bytes of a file, are those of such a text.
    """
    if start.startswith(_LFS_POINTER):
        raise Invalid("it is a Git LFS pointer, not the file itself", "run `git lfs pull`")


def parse_object(raw: bytes, infinite: bool = False) -> dict[str, Any]:
    """Return a JSON object, of which every name is given once.

    A number is an integer only if it is natural and has at most 20 digits, as 64 bits do; any other is a float.

    Args:
        raw: Its text.
        infinite: Whether numbers may be infinite or none, as Python writes them.

    Raises:
        Invalid: it is no such thing, or not UTF-8, or nested too deeply.
    """
    try:
        parsed = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_int=_natural,
            parse_constant=float if infinite else _refuse_constant,
        )
    except RecursionError as error:
        raise Invalid("its JSON is nested too deeply") from error
    except ValueError as error:
        raise Invalid(f"invalid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise Invalid("its JSON is not an object")
    return parsed


def check_name(name: str) -> None:
    """Refuse what cannot be the name of a tensor, and could not be printed in a message.

    Raises:
        Invalid: it has more than 1024 characters, or some that do not print.
    """
    if len(name) > _MAX_NAME or not name.isprintable():
        raise Invalid(f"{short(name)} is not a name of a tensor")


def short(value: object) -> str:
    """Return a value as it is written in Python, the middle left out where it is long."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlist = _SHORT.maxdict = 10


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"{short(name)} is given twice")
        # Half of a surrogate pair is no text; encoding it raises an error that is a ValueError.
        (name + value if isinstance(value, str) else name).encode()
        result[name] = value
    return result


def _natural(text: str) -> int | float:
    return int(text) if text.isdigit() and len(text) <= 20 else float(text)


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")
