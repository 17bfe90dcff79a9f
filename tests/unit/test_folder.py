"""A folder is complete or absent, whatever fails on the way."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import pytest

from shardwise.checkpoint.folder import NewFolder
from shardwise.errors import CheckpointError


def replaced(names: Iterable[str]) -> set[str]:
    return {name for name in names if name.startswith("model")}


def listing(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def fill(target: Path, text: str = "new") -> None:
    with NewFolder(target, replaced) as folder:
        (folder.path / "model").write_text(text)
        folder.publish()


def test_published_folder_has_its_name_and_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").mkdir()
    fill(tmp_path / "a" / "b" / "target")
    assert listing(tmp_path) == ["a", "a/b", "a/b/target", "a/b/target/model", "usual"]
    assert (tmp_path / "a" / "b" / "target").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_folder_is_absent_until_it_is_published(tmp_path: Path) -> None:
    with NewFolder(tmp_path / "target", replaced) as folder:
        (folder.path / "model").write_text("new")
        assert not (tmp_path / "target").exists()
        assert folder.path.parent == tmp_path


def test_without_publishing_nothing_is_left(tmp_path: Path) -> None:
    with NewFolder(tmp_path / "a" / "b" / "target", replaced) as folder:
        (folder.path / "model").write_text("new")
    assert listing(tmp_path) == []


def test_parents_that_somebody_else_uses_by_then_stay(tmp_path: Path) -> None:
    with NewFolder(tmp_path / "a" / "b" / "target", replaced):
        (tmp_path / "a" / "theirs").touch()
    assert listing(tmp_path) == ["a", "a/theirs"]


@pytest.mark.parametrize("old", [[], ["model"], ["model", "model-2"]], ids=str)
def test_folder_that_it_supersedes_is_replaced_as_a_whole(tmp_path: Path, old: list[str]) -> None:
    (tmp_path / "target").mkdir()
    for name in old:
        (tmp_path / "target" / name).write_text("old")
    fill(tmp_path / "target")
    assert listing(tmp_path) == ["target", "target/model"]
    assert (tmp_path / "target" / "model").read_text() == "new"


def test_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    fill(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert listing(tmp_path / "real") == ["model"]


@pytest.mark.parametrize("other", ["README.md", "sub/file"])
def test_folder_with_something_else_is_refused(tmp_path: Path, other: str) -> None:
    (tmp_path / "target" / other).parent.mkdir(parents=True)
    (tmp_path / "target" / other).touch()
    before = listing(tmp_path)
    with pytest.raises(CheckpointError, match="into a folder of its own"):
        fill(tmp_path / "target")
    assert listing(tmp_path) == before


def test_what_came_into_the_folder_meanwhile_is_kept(tmp_path: Path) -> None:
    with NewFolder(tmp_path / "target", replaced) as folder:
        (tmp_path / "target").mkdir()
        (tmp_path / "target" / "theirs").touch()
        with pytest.raises(CheckpointError, match="holds theirs"):
            folder.publish()
    assert listing(tmp_path) == ["target", "target/theirs"]


def test_file_of_this_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file"):
        fill(tmp_path / "target")
    assert (tmp_path / "target").read_text() == "mine"


@pytest.mark.parametrize("exists", [True, False])
def test_rename_that_fails_leaves_what_was_there(tmp_path: Path, exists: bool) -> None:
    if exists:
        fill(tmp_path / "target", "old")
    before, rename = listing(tmp_path), Path.rename

    def fails(self: Path, other: Path) -> Path:
        if ".saving-" in self.name:
            raise OSError("no")
        return rename(self, other)

    with mock.patch.object(Path, "rename", fails), pytest.raises(CheckpointError, match="put in its place"):
        fill(tmp_path / "target")
    assert listing(tmp_path) == before
    assert not exists or (tmp_path / "target" / "model").read_text() == "old"


def test_folder_that_cannot_be_made_leaves_no_parents(tmp_path: Path) -> None:
    mkdir = os.mkdir

    def fails(path: str, *args: int) -> None:
        if ".saving-" in str(path):
            mkdir(path, *args) if not Path(path).parent.exists() else (_ for _ in ()).throw(OSError("no"))
            return
        mkdir(path, *args)

    with (
        mock.patch.object(os, "mkdir", fails),
        pytest.raises(CheckpointError, match="no folder can be made"),
    ):
        fill(tmp_path / "a" / "target")
    assert listing(tmp_path) == []


def test_disk_that_fails_after_the_last_rename_leaves_the_new_folder_only(tmp_path: Path) -> None:
    fill(tmp_path / "target", "old")
    synced: list[Path] = []

    def fails(folder: Path) -> None:
        synced.append(folder)
        if folder == tmp_path:
            raise OSError("no")

    with mock.patch("shardwise.checkpoint.folder._sync", fails), pytest.raises(CheckpointError):
        fill(tmp_path / "target")
    assert len(synced) == 2
    assert listing(tmp_path) == ["target", "target/model"]
    assert (tmp_path / "target" / "model").read_text() == "new"
