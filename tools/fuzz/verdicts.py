"""What shardwise says of a file, held against what the safetensors library says of the same bytes.

Nothing may be accepted that the library refuses, nothing refused that it accepts without a reason that is known,
and what both accept must be the same tensors. No error but the declared ones, no read beyond what is there.
"""

from __future__ import annotations

import io
import json
import time
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from safetensors import SafetensorError, deserialize

from shardwise.checkpoint.header import DTYPES, TensorEntry, parse_header
from shardwise.checkpoint.weight_map import parse_weight_map
from shardwise.errors import CheckpointError, UnsupportedOption

FILE = Path("model.safetensors")
SECONDS = 5.0

STRICTER = {
    "is given twice": "a name is given twice; safetensors keeps the last",
    "is not a name": "a name does not print, or is longer than 1024 characters",
    "and nothing else": "an entry has more fields, or is a list",
    "which the format does not have": "a dtype is written as an object",
    "numbers share bytes": "a packed dtype, which cannot be sliced",
    "at most 8 are expected": "more than 8 dims",
    "beyond counting": "a shape that overflows 64 bits if its zeros are left out",
    "does not start with": "white space before the header's JSON",
    "metadata is not text": "metadata is null",
    "nested too deeply": "deep nesting in a field that is not known",
    "not JSON": "NaN or Infinity in a field that is not known",
}
"""Words of a refusal -> why shardwise refuses what safetensors accepts."""


class Disagreement(AssertionError):
    """A verdict that must not be."""


class _Watched(io.BytesIO):
    """A file that notices who asks for more than it could have."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= max(8, len(self.getbuffer())):
            raise Disagreement(f"{size} bytes are asked for of {len(self.getbuffer())}")
        return super().read(size)


def judge_file(content: bytes) -> str:
    """Return the outcome for the bytes of a safetensors file.

    Raises:
        Disagreement: it is one that must not be.
    """
    theirs = _theirs(content)
    start = time.process_time()
    try:
        ours = parse_header(FILE, _Watched(content), len(content))
    except CheckpointError as error:
        if theirs is None:
            return "both refuse"
        reason = next((why for words, why in STRICTER.items() if words in str(error)), None)
        if reason is None:
            raise Disagreement(f"refused without need: {error}") from error
        return f"refused here only: {reason}"
    except Exception as error:
        raise Disagreement(f"ends in {error!r}") from error
    finally:
        if time.process_time() - start > SECONDS:
            raise Disagreement(f"takes {time.process_time() - start:.1f} s")
    if theirs is None:
        raise Disagreement(f"accepted, safetensors refuses it: {sorted(ours)[:5]}")
    _compare(content, ours, theirs)
    return "both accept"


def _theirs(content: bytes) -> dict[str, dict[str, Any]] | None:
    try:
        return dict(deserialize(content))  # type: ignore[no-untyped-call]
    except SafetensorError:
        return None


def _compare(content: bytes, ours: dict[str, TensorEntry], theirs: dict[str, dict[str, Any]]) -> None:
    if ours.keys() != theirs.keys():
        raise Disagreement(f"other tensors: {sorted(ours.keys() ^ theirs.keys())[:5]}")
    for name, entry in ours.items():
        other = theirs[name]
        if (entry.dtype, list(entry.shape)) != (DTYPES[other["dtype"]], other["shape"]):
            raise Disagreement(f"{name} is {entry.dtype} {entry.shape}, by safetensors {other}")
        end = entry.offset + entry.nbytes
        if end > len(content) or content[entry.offset : end] != bytes(other["data"]):
            raise Disagreement(f"{name} has other bytes")


def judge_index(content: bytes) -> str:
    """Return the outcome for the bytes of an index.

    Raises:
        Disagreement: it is one that must not be.
    """
    start = time.process_time()
    try:
        weight_map = parse_weight_map(FILE, content)
    except (CheckpointError, UnsupportedOption):
        return "refused"
    except Exception as error:
        raise Disagreement(f"ends in {error!r}") from error
    finally:
        if time.process_time() - start > SECONDS:
            raise Disagreement(f"takes {time.process_time() - start:.1f} s")
    if weight_map != json.loads(content)["weight_map"]:
        raise Disagreement("another mapping than JSON's")
    for name in weight_map.values():
        plain = all(path(name).parts == (name,) for path in (PurePosixPath, PureWindowsPath))
        if not plain or name in (".", "..") or not name.endswith(".safetensors"):
            raise Disagreement(f"{name!r} is taken for a file name")
    return "accepted"
