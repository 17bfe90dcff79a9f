"""What happens in a job, as JSON lines: one object a line, with `time` (seconds since the epoch) and `event`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from shardwise.errors import OutputError


def append(file: str | None, event: str, **data: Any) -> None:
    """Add an event to a file; without a file, do nothing.

    Raises:
        OutputError: the file cannot be written.
    """
    if file is None:
        return
    line = json.dumps({"time": round(time.time(), 3), "event": event, **data})
    try:
        with Path(file).open("a", encoding="utf-8") as lines:
            lines.write(line + "\n")
    except OSError as error:
        raise OutputError(f"--events {file} cannot be written: {error.strerror or error}") from error
