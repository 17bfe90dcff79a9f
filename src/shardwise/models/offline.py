"""Folders of checkpoints cut for a number of ranks, and put together again, in one process without a device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.checkpoint.agree import stamps_of
from shardwise.checkpoint.files import Source, WeightFiles, locate, manifest_name
from shardwise.checkpoint.index import TensorEntry, read_index
from shardwise.checkpoint.layouts import Cut, RankLayouts, manifest, metadata_of
from shardwise.checkpoint.read import Progress
from shardwise.checkpoint.reshard import Job, Target
from shardwise.checkpoint.write import Stored, new_checkpoint, new_file, rank_file, superseded
from shardwise.config import TensorParallelConfig
from shardwise.errors import CheckpointError
from shardwise.models.checking import StaticCheck
from shardwise.models.lookup import model_class
from shardwise.models.options import LoadOptions
from shardwise.models.parallelism import match, prepare
from shardwise.models.saving import STEM
from shardwise.plan.layout import Layout, Shard


def shard_folder(
    source: str | Path,
    target: str | Path,
    config: TensorParallelConfig,
    variant: str | None = None,
    progress: Progress | None = None,
) -> int:
    """Cut a model's folder for `config.tp_degree` ranks, one file for each; any checkpoint of the model will do.

    Needs 16 MiB of memory whatever the size of the model. If it is stopped, the same call goes on with the files that
    are not complete.

    Args:
        source: Folder of the model, with a `config.json`.
        target: Folder for the files; complete or absent.
        config: Number of ranks, and a plan if it is not to be that of the class.
        variant: Infix of the file names, in both folders.
        progress: Told of bytes as they are written.

    Returns:
        Number of files that a call before had completed.

    Raises:
        PlanError: the plan does not fit the model at this degree.
        CheckpointError: files that are missing, invalid, or do not fit the model, or cannot be written.
    """
    where = Source(str(source), None, variant)
    cls = model_class(_config(Path(source)).get("_class_name", ""))
    options = LoadOptions(variant=variant)
    ready = prepare(cls, str(source), config, options)
    StaticCheck(config).before(ready.model, ready.plan)
    stamps = stamps_of(files := locate(where))
    index, keys = match(ready.model, where, files, options)
    names = [rank_file(STEM, variant, rank, config.tp_degree) for rank in range(config.tp_degree)]
    state = ready.model.state_dict()
    sources = {name: keys.sources[name] for name in state if name in keys.sources}
    layouts = {name: ready.plan.layout(name) for name in sources}
    targets = [
        _rank_target(name, rank, config.tp_degree, sources, layouts, index) for rank, name in enumerate(names)
    ]
    texts = {"config.json": _config_text(Path(source)), manifest_name(STEM, variant): manifest(names)}
    job = Job(index, stamps, targets, texts)
    return job.run(Path(target), partial(superseded, stem=STEM, variant=variant), progress)


def _rank_target(
    file: str,
    rank: int,
    degree: int,
    sources: Mapping[str, str],
    layouts: Mapping[str, Layout],
    index: Mapping[str, TensorEntry],
) -> Target:
    """Return the file of one rank."""
    entries = {name: index[key] for name, key in sources.items()}
    local = {
        name: Stored(entry.dtype, layouts[name].local_shape(entry.shape, rank, degree))
        for name, entry in entries.items()
    }
    cuts = {name: Cut(entry.shape, layouts[name]) for name, entry in entries.items()}
    metadata = metadata_of(RankLayouts(rank, degree, cuts))
    cut = {name: layout for name, layout in layouts.items() if isinstance(layout, Shard)}
    return Target(new_file(file, local, metadata), sources, cut, rank, degree)


def unshard_folder(
    source: str | Path,
    target: str | Path,
    variant: str | None = None,
    max_shard_size: int | str = "10GB",
    progress: Progress | None = None,
) -> int:
    """Put a folder with a file for each rank together, as diffusers keeps a checkpoint; no plan is needed.

    Needs 16 MiB of memory whatever the size of the model, and goes on where a call before was stopped.

    Args:
        source: Folder with a file for each rank.
        target: Folder for the files; complete or absent.
        variant: Infix of the file names, in both folders.
        max_shard_size: Size from which weights are split into several files.
        progress: Told of bytes as they are written.

    Returns:
        Number of files that a call before had completed.

    Raises:
        CheckpointError: files that are missing, invalid, or cannot be written; or the folder is not a sharded one.
        UnsupportedOption: `max_shard_size` is no size.
    """
    files: WeightFiles = locate(Source(str(source), None, variant))
    if not files.sharded:
        raise CheckpointError(f"{source} is a whole checkpoint already: there is nothing to put together")
    stamps = stamps_of(files)
    index = read_index(files)
    stored = {name: Stored(index[name].dtype, index[name].shape) for name in sorted(index)}
    new = new_checkpoint(stored, STEM, variant, max_shard_size)
    targets = [Target(file, {name: name for name in file.entries}, {}) for file in new.files]
    texts = {"config.json": _config_text(Path(source))}
    if new.index is not None:
        texts[new.index_name] = new.index
    job = Job(index, stamps, targets, texts)
    return job.run(Path(target), partial(superseded, stem=STEM, variant=variant), progress)


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads(_config_text(folder))
    except ValueError as error:
        raise CheckpointError(f"{folder / 'config.json'} is not JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def _config_text(folder: Path) -> str:
    try:
        return (folder / "config.json").read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{folder} has no readable config.json; name the folder of a model, such as a pipeline's transformer: "
            f"{error}"
        ) from error
