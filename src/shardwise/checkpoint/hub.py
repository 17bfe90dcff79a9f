"""Repositories of the hub: one commit for all ranks, and one download for each node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

from shardwise.checkpoint.files import Source


def commit_of(source: Source, name: str = "config.json") -> str | None:
    """Return the commit that a repository's revision means now, or None for a local folder.

    None as well where nobody can tell: whoever reads the configuration next says what is wrong.

    Args:
        source: The checkpoint.
        name: Of the file that it is asked for by.
    """
    if Path(source.location).is_dir():
        return None
    config = Path(source.subfolder or "", name)
    try:
        found = Path(hf_hub_download(source.location, config.as_posix(), **source.hub))
    except (OSError, EntryNotFoundError, HfHubHTTPError, HFValidationError):
        return None
    snapshot = found.parents[len(config.parts) - 1]
    return snapshot.name if snapshot.parent.name == "snapshots" else None


def at_commit(source: Source, commit: str | None) -> Source:
    """Return the source with its revision pinned, so that no rank sees a newer one."""
    return replace(source, hub={**source.hub, "revision": commit}) if commit else source


def already_here(source: Source) -> Source:
    """Return the source for a rank whose node has it already: it asks nobody, and downloads nothing."""
    hub = {name: value for name, value in source.hub.items() if name != "force_download"}
    return replace(source, hub={**hub, "local_files_only": True})
