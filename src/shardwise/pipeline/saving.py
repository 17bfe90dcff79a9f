"""`save_pretrained` of a pipeline with sharded components: what diffusers would write of the whole one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from torch import nn

from shardwise.runtime.group import TensorParallelGroup
from shardwise.runtime.shard import sharding_of

_EACH = ("safe_serialization", "variant", "max_shard_size")
"""Options that are handed on to each component."""


def let_save(pipeline: Any, group: TensorParallelGroup, patience: timedelta) -> None:
    """Give a pipeline of several ranks the `save_pretrained` below."""
    pipeline.save_pretrained = partial(save_together, pipeline, group, patience)


def save_together(
    pipeline: Any,
    group: TensorParallelGroup,
    patience: timedelta,
    save_directory: str | os.PathLike[str],
    **options: Any,
) -> None:
    """Save a pipeline as diffusers saves the whole one; every rank calls it, and the first one writes.

    Stock diffusers loads what is written: the names of classes in `model_index.json` are its own and transformers'.

    Args:
        pipeline: The pipeline.
        group: The ranks that hold it.
        patience: How long they wait for the one that writes.
        save_directory: Folder for the files, on the first rank's machine.
        options: Those of diffusers.

    Raises:
        UnsupportedOption, UnsupportedOperation: a sharded component cannot be saved so; see its `save_pretrained`.
        CheckpointError: the folder cannot be written; on every rank.
        RankFailure: another rank failed.
    """
    sharded = {name: part for name, part, _ in _sharded(pipeline)}
    each = {name: options[name] for name in _EACH if options.get(name) is not None}
    for name, part, holders in _sharded(pipeline):
        if group.members[0] in holders.members:  # others hold the same slices once more
            part.save_pretrained(Path(save_directory) / name, **each)
    with group.agreement(f"saving {type(pipeline).__name__} to {save_directory}", patience):
        if group.rank == 0:
            with _saved_already(sharded):
                type(pipeline).save_pretrained(pipeline, save_directory, **options)


def _sharded(pipeline: Any) -> Iterator[tuple[str, Any, TensorParallelGroup]]:
    """Yield name and module of each sharded component, and the ranks that hold its slices."""
    for name, part in pipeline.components.items():
        if isinstance(part, nn.Module) and (sharding := sharding_of(part)) is not None:
            yield name, getattr(part, "_orig_mod", part), sharding.group


@contextmanager
def _saved_already(parts: Mapping[str, Any]) -> Iterator[None]:
    """Let saving these do nothing for a while."""
    with ExitStack() as changes:
        for part in parts.values():
            changes.enter_context(mock.patch.object(part, "save_pretrained", return_value=None))
        yield
