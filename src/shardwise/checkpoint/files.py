"""Where a checkpoint's files are: a local folder or a repository of the hub, one file or an index of several.

Asks `huggingface_hub` for remote files and reads no weights.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
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

from shardwise.checkpoint.layouts import read_manifest
from shardwise.checkpoint.untrusted import kind_of
from shardwise.checkpoint.weight_map import read_weight_map
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


class WeightFiles(list[Path]):
    """The safetensors files of a checkpoint, in order.

    Attributes:
        weight_map: File name by tensor, as the index of several files says; None for a single file.
        sharded: Whether they are a file for each rank, in rank order.
    """

    def __init__(
        self, paths: Iterable[Path], weight_map: Mapping[str, str] | None = None, sharded: bool = False
    ) -> None:
        super().__init__(paths)
        self.weight_map, self.sharded = weight_map, sharded


def locate(source: Source) -> WeightFiles:
    """Return the safetensors files of a checkpoint, downloading those that are missing from the hub's cache.

    Raises:
        CheckpointError: no weights, a broken index, or a file that the index names and that is not there.
        UnsupportedOption: there are weights, but not as safetensors.
    """
    for name in _index_names(source):
        index = _find(source, name)
        if index is not None:
            return _shards(source, index)
    single = _find(source, with_variant(f"{source.stem}.safetensors", source.variant))
    if single is not None:
        return WeightFiles([single])
    manifest = _find(source, manifest_name(source.stem, source.variant))
    if manifest is not None:
        return WeightFiles(_all(source, manifest, read_manifest(manifest)), sharded=True)
    pickled = with_variant(f"{source.stem}.bin", source.variant)
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
    names = [with_variant(f"{source.stem}.safetensors.index.json", source.variant)]
    if source.variant:
        names.append(f"{source.stem}.safetensors.{source.variant}.index.json")
    return names


def with_variant(name: str, variant: str | None) -> str:
    """Return the name of a file of a variant: its infix stands in front of the last suffix."""
    stem, _, suffix = name.rpartition(".")
    return f"{stem}.{variant}.{suffix}" if variant else name


def manifest_name(stem: str, variant: str | None) -> str:
    """Return the name of the file that names the files of a sharded checkpoint."""
    return with_variant(f"{stem}.sharded.json", variant)


def has_manifest(source: Source) -> bool:
    """Return whether a source is a local folder with a sharded checkpoint in it."""
    folder = Path(source.location)
    return (
        folder.is_dir()
        and (folder / (source.subfolder or "") / manifest_name(source.stem, source.variant)).exists()
    )


def _find(source: Source, name: str) -> Path | None:
    """Return the local path of one file of the checkpoint, or None if it has no such file."""
    folder = Path(source.location)
    if folder.is_dir():
        return _regular_file(folder / (source.subfolder or "") / name)
    try:
        return Path(hf_hub_download(source.location, name, subfolder=source.subfolder or None, **source.hub))
    except (EntryNotFoundError, LocalEntryNotFoundError):
        return None  # not there, or not in the cache and the hub out of reach; `locate` says which files it sought
    except (HfHubHTTPError, HFValidationError) as error:
        raise CheckpointError(f"{source} cannot be fetched from the hub: {error}") from error


def _regular_file(path: Path) -> Path | None:
    """Return `path`, links followed, if it is a file, and None if nothing has this name."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if not os.path.lexists(path):
            return None
        raise CheckpointError(f"{path} may be a link to nothing: {error}; fetch it again") from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is {kind_of(mode)}, not a file; put the checkpoint's file there")
    return path


def _shards(source: Source, index: Path) -> WeightFiles:
    """Return the files that an index names, each once."""
    weight_map = read_weight_map(index)
    return WeightFiles(_all(source, index, sorted(set(weight_map.values()))), weight_map)


def _all(source: Source, index: Path, names: Sequence[str]) -> list[Path]:
    paths = []
    for name in names:
        path = _find(source, name)
        if path is None:
            more = sum(not (index.parent / other).is_file() for other in names) - 1
            others = f", nor are {more} others" if more and Path(source.location).is_dir() else ""
            raise CheckpointError(
                f"{source}: the index names {name}, which is not there{others}; fetch the checkpoint again"
            )
        paths.append(path)
    return paths
