"""A new folder that is complete or absent: it is filled under another name beside its own, and then renamed."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from shardwise.errors import CheckpointError

Superseded = Callable[[Iterable[str]], set[str]]
"""Names of what is in a folder -> those that a new folder takes the place of."""


class NewFolder:
    """A folder under another name while the context is open; `publish` gives it its own.

    Left without, it and the folders made for it are removed. Only a process that is killed leaves it behind. A folder
    for a `job` stays where it is, and is found again by whoever does the same job.

    Args:
        target: What the folder is to be called. A folder of this name is replaced if it holds nothing else than
            what the new one takes the place of.
        superseded: What that is.
        job: What tells jobs apart, if one that was stopped is to be gone on with.

    Raises:
        CheckpointError: the target holds something else, or the folder cannot be made.
    """

    def __init__(self, target: Path, superseded: Superseded, job: str | None = None) -> None:
        self.target = Path(os.path.realpath(target))
        self._superseded, self._job = superseded, job
        token = job or uuid.uuid4().hex[:8]
        self.path = self.target.with_name(f".{self.target.name}.saving-{token}")
        self._old = self.target.with_name(f".{self.target.name}.replaced-{token}")
        self._parents: list[Path] = []

    def __enter__(self) -> NewFolder:
        self._check_target()
        self._parents = [parent for parent in self.target.parents if not parent.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=self._job is not None)
        except OSError as error:
            self._clean()
            raise CheckpointError(f"no folder can be made beside {self.target}: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path.exists() and self._job is None:
            self._clean()

    def publish(self) -> None:
        """Give the folder its own name; what had it before is removed.

        Raises:
            CheckpointError: it cannot be renamed; what was there before is there still.
        """
        self._check_target()
        try:
            _sync(self.path)
            replaces = self.target.exists()
            if replaces:
                self.target.rename(self._old)
            try:
                self.path.rename(self.target)
            except BaseException:
                if replaces:
                    self._old.rename(self.target)
                raise
            _sync(self.target.parent)
        except OSError as error:
            raise CheckpointError(f"{self.target} cannot be put in its place: {error}") from error
        finally:
            if self.target.exists():
                shutil.rmtree(self._old, ignore_errors=True)

    def _check_target(self) -> None:
        if not os.path.lexists(self.target):
            return
        if not self.target.is_dir():
            raise CheckpointError(f"{self.target} is a file; a checkpoint is a folder: choose another name")
        names = os.listdir(self.target)
        others = sorted(set(names) - self._superseded(names))
        if others:
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            raise CheckpointError(
                f"{self.target} holds {', '.join(others[:3])}{more}, which this checkpoint does not replace: "
                "save into a folder of its own"
            )

    def _clean(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        for parent in self._parents:
            try:
                parent.rmdir()
            except OSError:  # somebody else has put something there, or it was not made
                return


def _sync(folder: Path) -> None:
    """Return when the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
