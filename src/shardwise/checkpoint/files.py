"""Where a checkpoint's files are: a local folder or a repository of the hub, one file or an index of several.

Asks `huggingface_hub` for remote files and reads no weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)

from shardwise.errors import CheckpointError, UnsupportedOption


@dataclass(frozen=True)
class Source:
    """A checkpoint as the user named it.

    Args:
        location: A local folder, or the id of a hub repository.
        subfolder: Folder inside it that holds the component.
        variant: Infix of the file names, such as `"fp16"`.
        stem: Name of the weight files without suffixes.
        hub: Further arguments of `huggingface_hub.hf_hub_download`: `revision`, `cache_dir`, `token`, ...
    """

    location: str
    subfolder: str | None = None
    variant: str | None = None
    stem: str = "diffusion_pytorch_model"
    hub: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the location as a user would recognise it."""
        return f"{self.location}/{self.subfolder}" if self.subfolder else self.location


def locate(source: Source) -> list[Path]:
    """Return the safetensors files of a checkpoint, downloading those that are missing from the hub's cache.

    Raises:
        CheckpointError: no weights, a broken index, or a file that the index names and that is not there.
        UnsupportedOption: there are weights, but not as safetensors.
    """
    for name in _index_names(source):
        index = _find(source, name)
        if index is not None:
            return [_shard(source, name) for name in _shard_names(index)]
    single = _find(source, _with_variant(f"{source.stem}.safetensors", source.variant))
    if single is not None:
        return [single]
    pickled = _with_variant(f"{source.stem}.bin", source.variant)
    if _find(source, pickled) or _find(source, f"{pickled}.index.json"):
        raise UnsupportedOption(
            f"{source} holds {pickled} but no safetensors: each rank reads only its own slice of each "
            "tensor, which needs safetensors; convert the weights first"
        )
    variant = f" of variant {source.variant!r}" if source.variant else ""
    where = (
        "" if Path(source.location).is_dir() else ", neither in the local cache nor within reach on the hub"
    )
    raise CheckpointError(f"{source} has no {source.stem}.safetensors{variant}, and no index of one{where}")


def _index_names(source: Source) -> list[str]:
    """Return the names an index may have: where the variant stands has changed over the years."""
    names = [_with_variant(f"{source.stem}.safetensors.index.json", source.variant)]
    if source.variant:
        names.append(f"{source.stem}.safetensors.{source.variant}.index.json")
    return names


def _with_variant(name: str, variant: str | None) -> str:
    stem, _, suffix = name.rpartition(".")
    return f"{stem}.{variant}.{suffix}" if variant else name


def _find(source: Source, name: str) -> Path | None:
    """Return the local path of one file of the checkpoint, or None if it has no such file."""
    folder = Path(source.location)
    if folder.is_dir():
        path = folder / (source.subfolder or "") / name
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(source.location, name, subfolder=source.subfolder or None, **source.hub))
    except (EntryNotFoundError, LocalEntryNotFoundError):
        return None  # not there, or not in the cache and the hub out of reach; `locate` says which files it sought
    except (HfHubHTTPError, HFValidationError) as error:
        raise CheckpointError(f"{source} cannot be fetched from the hub: {error}") from error


def _shard(source: Source, name: str) -> Path:
    path = _find(source, name)
    if path is None:
        raise CheckpointError(f"{source}: the index names {name}, which is not there")
    return path


def _shard_names(index: Path) -> list[str]:
    """Return the file names of an index, each once.

    Raises:
        CheckpointError: the index is not what it should be, or names a file outside of its folder.
    """
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not a checkpoint index: {error!r}") from error
    for name in names:
        if not _is_plain_file_name(name):
            raise CheckpointError(f"{index} names {name!r}: shards must be plain file names beside the index")
        if not name.endswith(".safetensors"):
            raise UnsupportedOption(f"{index} names {name!r}, which is not a safetensors file")
    if not names:
        raise CheckpointError(f"{index} names no files")
    return names


def _is_plain_file_name(name: object) -> bool:
    """Return whether `name` names a file in the folder it is used in, on any system."""
    if not isinstance(name, str) or not name.isprintable() or len(name.encode("utf-8", "replace")) > 255:
        return False
    return name not in ("", ".", "..") and Path(name).name == name and "\\" not in name
