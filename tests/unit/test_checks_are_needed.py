"""Negative controls of the checks on files: without any one of them, a hostile file is not refused as it should be.

One at a time, each `if` that raises is switched off in the source, as is each part of a condition of several, each
`except`, each hook of the JSON parser, and each call that is made only because it may raise.
"""

from __future__ import annotations

import ast
import io
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from shardwise.checkpoint import header, index, layouts, untrusted, weight_map
from shardwise.checkpoint.files import WeightFiles
from shardwise.errors import ShardwiseError
from tests.hostile import HEADERS, INDEXES, LFS_POINTER, Hostile, entry, packed
from tests.hostile import weight_map as index_of
from tests.hostile_layouts import GOOD, LAYOUTS, MANIFESTS, said
from tests.leaving_out import left_out, put, source_of

MODULES = [untrusted, header, weight_map, index, layouts]
FILE = Path("model.safetensors")


# ---------------------------------------------------------------- what must be refused


def _header(hostile: Hostile, folder: Path) -> None:
    header.parse_header(FILE, io.BytesIO(hostile.content), len(hostile.content))


def _header_of_size(content: bytes, size: int, folder: Path) -> None:
    header.parse_header(FILE, io.BytesIO(content), size)


def _weight_map(hostile: Hostile, folder: Path) -> None:
    weight_map.parse_weight_map(FILE, hostile.content)


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    index.read_header(folder / "pipe")


def _long_index(folder: Path) -> None:
    (folder / "index.json").touch()
    os.truncate(folder / "index.json", untrusted.MAX_TEXT + 1)
    weight_map.read_weight_map(folder / "index.json")


def _two_shards(held: dict[str, str], folder: Path) -> None:
    """Index tensors of two files, of which the index says that `a` is in `a` and `b` in `b`."""
    for file, name in held.items():
        (folder / file).write_bytes(packed({name: entry([1], 0, 4)}, 4))
    index.read_index(WeightFiles([folder / file for file in held], {"a": "a", "b": "b"}))


def _rank_files(texts: list[tuple[str | None, dict[str, object]]], folder: Path) -> None:
    """Read files of ranks, of which each says a text and has entries of 48 bytes."""
    for number, (text, entries) in enumerate(texts):
        metadata = {"__metadata__": {layouts.METADATA_KEY: text} if text is not None else {}}
        (folder / f"{number}").write_bytes(packed({**metadata, **entries}, 48 * len(entries)))
    index.read_index(WeightFiles([folder / f"{number}" for number in range(len(texts))], sharded=True))


def _manifest(content: bytes, folder: Path) -> None:
    (folder / "manifest").write_bytes(content)
    layouts.read_manifest(folder / "manifest")


HALF: dict[str, object] = {"a": entry([4, 3], 0, 48)}
"""What a file of rank 0 or 1 of 2 has, whose text is that of `said`."""
TWO = {**HALF, "b": entry([4, 3], 48, 96)}
FIRST = said(rank=0)
LONG = (header.MAX_TEXT + 1).to_bytes(8, "little")
PROBES: list[tuple[str, Callable[[Path], None]]] = [
    *((hostile.message, partial(_header, hostile)) for hostile in HEADERS),
    *((hostile.message, partial(_weight_map, hostile)) for hostile in INDEXES),
    ("are allowed", partial(_header_of_size, LONG, header.MAX_TEXT + 9)),
    ("became shorter", partial(_header_of_size, packed({"a": entry([1], 0, 4)})[:20], 80)),
    ("it is a pipe", _pipe),
    ("No such file", lambda folder: index.read_header(folder / "missing")),
    ("are allowed", _long_index),
    ("not a safetensors file", partial(_weight_map, Hostile("", index_of(a="a.bin"), ""))),
    ("disagree on 1 tensors", lambda folder: weight_map.check_weight_map({"a": "b"}, {})),
    ("a is in a and again in b", partial(_two_shards, {"a": "a", "b": "a"})),
    ("disagree on 2 tensors", partial(_two_shards, {"a": "b", "b": "a"})),
    *((message, partial(_rank_files, [(text, HALF)])) for text, message in LAYOUTS.values()),
    ("no layouts", partial(_rank_files, [(None, HALF)])),
    ("rank 1 of 2 and stands for 0 of 2", partial(_rank_files, [(said(), HALF), (said(), HALF)])),
    ("rank 0 of 2 and stands for 0 of 1", partial(_rank_files, [(FIRST, HALF)])),
    ("b is in it or in 0", partial(_rank_files, [(FIRST, HALF), (said(), TWO)])),
    ("another tensor", partial(_rank_files, [(FIRST, HALF), (said(), {"a": entry([4, 3], 0, 48, "I32")})])),
    (
        "cut in another way",
        partial(_rank_files, [(FIRST, HALF), (said({**GOOD, "blocks": [2, 6]}), HALF)]),
    ),
    *((message, partial(_manifest, json.dumps(content).encode())) for content, message in MANIFESTS.values()),
    ("git lfs pull", partial(_manifest, LFS_POINTER)),
]


def is_refused(message: str, probe: Callable[[Path], None], folder: Path) -> bool:
    """Return whether a probe ends in the refusal that it should."""
    folder.mkdir()
    try:
        probe(folder)
    except ShardwiseError as error:
        return message in str(error)
    except Exception:
        return False  # a crash
    return False


def test_all_probes_are_refused(tmp_path: Path) -> None:
    for number, (message, probe) in enumerate(PROBES):
        assert is_refused(message, probe, tmp_path / str(number)), message


def refusals(folder: Path) -> Iterator[bool]:
    return (is_refused(*probe, folder / str(number)) for number, probe in enumerate(PROBES))


@pytest.mark.parametrize("module", MODULES)
def test_all_probes_are_refused_where_nothing_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType
) -> None:
    put(monkeypatch, module, source_of(module))
    assert all(refusals(tmp_path))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        pytest.param(module, source, id=f"{module.__name__.split('.')[-1]}: {what}")
        for module in MODULES
        for what, source in left_out(module).items()
    ],
)
def test_check_that_is_left_out_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, source: ast.Module
) -> None:
    put(monkeypatch, module, source)
    assert not all(refusals(tmp_path))
