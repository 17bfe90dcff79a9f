"""Configuration files of unknown origin: strict JSON objects, or an error that names the file. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.checkpoint.untrusted import MAX_TEXT, Invalid, opened, parse_object
from shardwise.errors import CheckpointError


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a configuration file holds; unlike in checkpoints, it may have infinite numbers.

    Schedulers of diffusers save some.

    Raises:
        CheckpointError: it cannot be read, or holds something else.
    """
    try:
        with opened(path) as (stream, size):
            if size > MAX_TEXT:
                raise Invalid(f"it has {size} bytes")
            return parse_object(stream.read(size), infinite=True)
    except Invalid as error:
        raise CheckpointError(f"{path} is no configuration: {error}") from error
