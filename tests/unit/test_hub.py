"""Repositories of the hub: a revision becomes one commit, and ranks whose node has the files ask nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import EntryNotFoundError

from shardwise.checkpoint import files, hub
from shardwise.checkpoint.files import Source, locate
from shardwise.checkpoint.hub import already_here, at_commit, commit_of
from shardwise.errors import CheckpointError
from tests.unit.test_files import COMMITS, REPO, SINGLE, cached, names, put, put_in_cache


@pytest.mark.parametrize("subfolder", [None, "", "transformer", "a/snapshots"])
@pytest.mark.parametrize("revision", [None, "main", "older", COMMITS["older"]])
def test_commit_is_that_of_the_revision(tmp_path: Path, subfolder: str | None, revision: str | None) -> None:
    for known in COMMITS:
        put_in_cache(tmp_path, known, f"{subfolder}/config.json" if subfolder else "config.json", known)
    options = cached(tmp_path, **({"revision": revision} if revision else {}))
    expected = COMMITS["main" if revision in (None, "main") else "older"]
    assert commit_of(Source(REPO, subfolder, hub=options)) == expected


def test_local_folder_has_no_commit_and_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(hub, "hf_hub_download")
    assert commit_of(Source(str(tmp_path))) is None


@pytest.mark.parametrize(
    "error", [EntryNotFoundError("none"), ConnectionError("no network"), OSError("disk")]
)
def test_commit_that_nobody_can_tell_is_none(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(hub, "hf_hub_download", fail)
    assert commit_of(Source(REPO)) is None
    assert commit_of(Source("not/an/id")) is None


def test_file_outside_of_a_cache_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "hf_hub_download", lambda *args, **kwargs: str(tmp_path / "config.json"))
    assert commit_of(Source(REPO)) is None


def test_pinned_source_stays_with_its_commit_when_the_branch_moves(tmp_path: Path) -> None:
    old = put_in_cache(tmp_path, "older", SINGLE, "old weights")
    put_in_cache(tmp_path, "older", "config.json", "{}")
    pinned = at_commit(source := Source(REPO, hub=cached(tmp_path, revision="older")), COMMITS["older"])
    new = put_in_cache(tmp_path, "main", SINGLE, "new weights")
    (tmp_path / f"models--{REPO.replace('/', '--')}" / "refs" / "older").write_text(COMMITS["main"])
    assert locate(pinned)[0].resolve() == old
    assert locate(source)[0].resolve() == new
    assert at_commit(source, None) == source


def test_source_that_is_here_is_found_without_asking_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_cache(tmp_path, "main", SINGLE, "weights")
    options = {"cache_dir": str(tmp_path), "revision": COMMITS["main"], "force_download": True}
    asked: list[dict[str, Any]] = []
    download = files.hf_hub_download
    monkeypatch.setattr(
        files, "hf_hub_download", lambda *args, **kwargs: asked.append(kwargs) or download(*args, **kwargs)
    )
    assert names(locate(already_here(Source(REPO, hub=options)))) == [SINGLE]
    assert all(options["local_files_only"] and "force_download" not in options for options in asked)


def test_source_that_should_be_here_and_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=REPO):
        locate(already_here(Source(REPO, hub={"cache_dir": str(tmp_path)})))


def test_local_folder_that_is_here_is_itself(tmp_path: Path) -> None:
    put(tmp_path, SINGLE)
    assert names(locate(already_here(Source(str(tmp_path))))) == [SINGLE]
