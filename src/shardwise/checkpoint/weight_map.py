"""The index of a checkpoint of several files: which tensor is in which file, and nothing outside of the folder.

Names the files; opens none of them but the index.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardwise.checkpoint.untrusted import (
    MAX_TEXT,
    Invalid,
    check_name,
    opened,
    parse_object,
    refuse_lfs_pointer,
    short,
)
from shardwise.errors import CheckpointError, UnsupportedOption

_MAX_LINES = 20


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the file name of each tensor that an index names.

    Raises:
        CheckpointError: the index is not what it should be, or names a file outside of its folder.
        UnsupportedOption: it names a file that is no safetensors file.
    """
    with opened(index) as (stream, size):
        if size > MAX_TEXT:
            raise CheckpointError(
                f"{index} is not a checkpoint index: it has {size} bytes; {MAX_TEXT} are allowed"
            )
        return parse_weight_map(index, stream.read(size))


def parse_weight_map(index: Path, raw: bytes) -> dict[str, str]:
    """Return what `read_weight_map` does, from the bytes of the index."""
    try:
        refuse_lfs_pointer(raw)
        weight_map = parse_object(raw).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise Invalid(f"its weight_map names no files: {short(weight_map)}")
        for tensor, name in weight_map.items():
            check_name(tensor)
            if not is_plain_file_name(name):
                raise Invalid(
                    f"it names {short(name)} for {tensor}: shards must be plain file names beside the index",
                )
    except Invalid as error:
        raise CheckpointError(f"{index} is not a checkpoint index: {error}") from error
    for name in weight_map.values():
        if not name.endswith(".safetensors"):
            raise UnsupportedOption(
                f"{index} names {name!r}, which is not a safetensors file; convert the weights first"
            )
    return weight_map


def check_weight_map(weight_map: Mapping[str, str], found: Mapping[str, Path]) -> None:
    """Check that the files hold what the index says, no more and no less.

    Args:
        weight_map: File name by tensor, as the index says.
        found: File by tensor, as the headers say.

    Raises:
        CheckpointError: listing the tensors that are missing, in another file, or unknown to the index.
    """
    wrong = [f"{name} is not in {weight_map[name]}" for name in weight_map.keys() - found.keys()]
    wrong += [
        f"{name} is in {found[name].name}, not in the index" for name in found.keys() - weight_map.keys()
    ]
    wrong += [
        f"{name} is in {found[name].name}, by the index in {weight_map[name]}"
        for name in weight_map.keys() & found.keys()
        if found[name].name != weight_map[name]
    ]
    if wrong:
        folder = next(iter(found.values())).parent if found else "the checkpoint"
        lines = sorted(wrong)[:_MAX_LINES]
        lines += [f"and {len(wrong) - len(lines)} more"] if len(wrong) > len(lines) else []
        listing = "".join(f"\n  {line}" for line in lines)
        raise CheckpointError(
            f"{folder}: its index and its files disagree on {len(wrong)} tensors: files of two checkpoints are "
            f"mixed, or the index is not theirs; fetch it again into an empty folder{listing}"
        )


def is_plain_file_name(name: object) -> bool:
    """Return whether `name` names a file in the folder it is used in, on any system."""
    if not isinstance(name, str) or not name.isprintable() or len(name.encode()) > 255:
        return False
    return name not in ("", ".", "..") and not set("/\\:") & set(name)
