"""What the files of a sharded checkpoint say of themselves: whose slices they hold, and how they were cut.

A file for each rank, with the layouts in its header's metadata, and a manifest that names the files. Nothing of it is
trusted: layouts must describe exactly the tensors that are there, and all files must say the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.header import TensorEntry
from shardwise.checkpoint.untrusted import Invalid, opened, parse_object, refuse_lfs_pointer, short
from shardwise.checkpoint.weight_map import is_plain_file_name
from shardwise.errors import CheckpointError
from shardwise.plan.layout import MAX_BLOCKS, Layout, Replicated, Shard

METADATA_KEY = "shardwise"
VERSION = 1

_FIELDS = {"version", "rank", "tp_degree", "layouts"}
_LAYOUT_FIELDS = {"shape", "dim", "blocks", "copies", "units"}
_MANIFEST_FIELDS = {"version", "tp_degree", "files"}
_MAX_DEGREE = 4096

MAX_MANIFEST = 10**7
"""Bytes of a manifest that are read: more than 4096 names have."""


@dataclass(frozen=True)
class Cut:
    """The whole shape of a tensor, and how it is cut."""

    shape: tuple[int, ...]
    layout: Layout


@dataclass(frozen=True)
class RankLayouts:
    """What one file says: whose it is, and how its tensors were cut; those that are not listed are whole."""

    rank: int
    degree: int
    cuts: Mapping[str, Cut]

    def of(self, name: str, entry: TensorEntry) -> Cut:
        """Return the cut of a tensor of the file."""
        return self.cuts.get(name, Cut(entry.shape, Replicated()))


@dataclass(frozen=True)
class PiecedEntry(TensorEntry):
    """A tensor of a sharded checkpoint: whole as far as its shape and its bytes go, and in one piece for each rank."""

    layout: Layout
    pieces: tuple[TensorEntry, ...]


def metadata_of(layouts: RankLayouts) -> dict[str, str]:
    """Return the metadata that says it in the header of a file."""
    said = {
        name: {
            "shape": list(cut.shape),
            "dim": cut.layout.dim,
            "blocks": list(cut.layout.blocks),
            "copies": cut.layout.copies,
            "units": cut.layout.units,
        }
        for name, cut in sorted(layouts.cuts.items())
        if isinstance(cut.layout, Shard)
    }
    content = {"version": VERSION, "rank": layouts.rank, "tp_degree": layouts.degree, "layouts": said}
    return {METADATA_KEY: json.dumps(content, separators=(",", ":"))}


def parse_layouts(metadata: Mapping[str, str], tensors: Mapping[str, TensorEntry]) -> RankLayouts:
    """Return what the metadata of a file says of its tensors.

    Raises:
        Invalid: it says nothing, or something that cannot be.
    """
    if METADATA_KEY not in metadata:
        raise Invalid("its metadata has no layouts: it is no file of a sharded checkpoint")
    content = _object(metadata[METADATA_KEY].encode(), _FIELDS)
    degree = _natural("tp_degree", content["tp_degree"], 1, _MAX_DEGREE)
    rank = _natural("rank", content["rank"], 0, degree - 1)
    said = content["layouts"]
    if not isinstance(said, dict):
        raise Invalid(f"its layouts must be an object: {short(said)}")
    cuts = {}
    for name, value in said.items():
        if name not in tensors:
            raise Invalid(f"it has a layout of {short(name)} and no such tensor")
        cuts[name] = _cut(name, value, degree)
        _check_piece(name, cuts[name], tensors[name], rank, degree)
    return RankLayouts(rank, degree, cuts)


def _cut(name: str, value: Any, degree: int) -> Cut:
    if not isinstance(value, dict) or value.keys() != _LAYOUT_FIELDS:
        fields = ", ".join(sorted(_LAYOUT_FIELDS))
        raise Invalid(f"the layout of {name} must have {fields} and nothing else: {short(value)}")
    shape = _naturals(f"shape of {name}", value["shape"])
    dim = _natural(f"dim of {name}", value["dim"], 0, len(shape) - 1)
    blocks = _naturals(f"blocks of {name}", value["blocks"], 1)
    copies = _natural(f"copies of {name}", value["copies"], 1, degree)
    units = _natural(f"units of {name}", value["units"], 0, max(blocks, default=0))
    if not blocks or sum(blocks) != shape[dim]:
        raise Invalid(f"the blocks of {name} sum to {sum(blocks)}, and its dim {dim} has {shape[dim]}")
    if degree % copies or (units and copies > 1):
        raise Invalid(f"{name} cannot have {copies} copies on {degree} ranks, and {units} units")
    shard = Shard(dim, blocks, copies, units)
    if shard.indivisible(degree):
        raise Invalid(f"{name} cannot be cut for {degree} ranks: {short(value)}")
    return Cut(shape, shard)


def _check_piece(name: str, cut: Cut, entry: TensorEntry, rank: int, degree: int) -> None:
    """Check that a tensor is the piece that its layout gives the rank."""
    local = cut.layout.local_shape(cut.shape, rank, degree)
    if entry.shape != local:
        raise Invalid(
            f"{name} is {list(entry.shape)}, and by its layout rank {rank} of {degree} has {list(local)}"
        )


def joined(parts: Sequence[tuple[Path, Mapping[str, TensorEntry], RankLayouts]]) -> dict[str, PiecedEntry]:
    """Return every tensor of a sharded checkpoint, from what its files say, which are given in rank order.

    Raises:
        CheckpointError: they are not the files of all ranks of one checkpoint.
    """
    first, tensors, said = parts[0]
    for rank, (file, theirs, layouts) in enumerate(parts):
        if (layouts.rank, layouts.degree) != (rank, len(parts)):
            raise _mixed(
                file,
                f"it is that of rank {layouts.rank} of {layouts.degree} and stands for {rank} of {len(parts)}",
            )
        if theirs.keys() != tensors.keys():
            odd = sorted(theirs.keys() ^ tensors.keys())
            raise _mixed(file, f"{odd[0]} is in it or in {first.name} and not in both")
        for name, entry in theirs.items():
            mine, other = layouts.of(name, entry), said.of(name, tensors[name])
            if mine != other or entry.dtype != tensors[name].dtype:
                raise _mixed(file, f"{name} is another tensor, or cut in another way, than in {first.name}")
    return {name: _pieced(name, [theirs[name] for _, theirs, _ in parts], said) for name in tensors}


def _pieced(name: str, pieces: list[TensorEntry], said: RankLayouts) -> PiecedEntry:
    first = pieces[0]
    cut = said.of(name, first)
    size = first.nbytes
    if isinstance(cut.layout, Shard):
        local = cut.layout.local_size(0, said.degree)
        size = first.nbytes // local * cut.layout.size
    return PiecedEntry(first.file, first.dtype, cut.shape, first.offset, size, cut.layout, tuple(pieces))


def _mixed(file: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{file} does not belong to the other files of its sharded checkpoint: {what}; "
        "save the checkpoint again, or fetch it again into an empty folder"
    )


def manifest(files: Sequence[str]) -> str:
    """Return the text of the manifest that names the files, in rank order."""
    content = {"version": VERSION, "tp_degree": len(files), "files": list(files)}
    return json.dumps(content, indent=2) + "\n"


def read_manifest(path: Path) -> list[str]:
    """Return the names of the files that a manifest names, in rank order.

    Raises:
        CheckpointError: it is no manifest, or names a file outside of its folder.
    """
    with opened(path) as (stream, _):
        return parse_manifest(path, stream.read(MAX_MANIFEST))


def parse_manifest(path: Path, raw: bytes) -> list[str]:
    """Return what `read_manifest` does, from the bytes of the manifest."""
    try:
        refuse_lfs_pointer(raw)
        content = _object(raw, _MANIFEST_FIELDS)
        degree, names = _natural("tp_degree", content["tp_degree"], 1, _MAX_DEGREE), content["files"]
        if not isinstance(names, list) or len(names) != degree:
            raise Invalid(f"it must name {degree} files: {short(names)}")
        for name in names:
            if not is_plain_file_name(name) or not name.endswith(".safetensors"):
                raise Invalid(f"it names {short(name)}: files must be safetensors beside the manifest")
        if len(set(names)) != degree:
            raise Invalid(f"it names a file twice: {short(names)}")
    except Invalid as error:
        raise CheckpointError(f"{path} is not the manifest of a sharded checkpoint: {error}") from error
    return names


def _object(raw: bytes, fields: set[str]) -> dict[str, Any]:
    content = parse_object(raw)
    if content.get("version") != VERSION:
        raise Invalid(
            f"its layouts are of version {short(content.get('version'))}, and {VERSION} is known",
            "use the shardwise that wrote it, or a newer one",
        )
    if content.keys() != fields:
        raise Invalid(f"it must have {', '.join(sorted(fields))} and nothing else: {short(sorted(content))}")
    return content


def _natural(what: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise Invalid(f"{what} must be a number from {least} to {most}: {short(value)}")
    return value


def _naturals(what: str, value: Any, least: int = 0) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_BLOCKS:
        raise Invalid(f"{what} must be a list of numbers: {short(value)}")
    return tuple(_natural(what, number, least, 2**63 - 1) for number in value)
