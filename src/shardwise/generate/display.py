"""The one display of a job, on its first rank: a line for each thing that is loaded, and one for each phase."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Display:
    """Lines with a bar, a note and the time that has gone by. Where there is no terminal, they are shown at the end."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        if not console.is_terminal:
            console.width = 120  # nobody knows; it is a file, or another program
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}")
        self._lines = Progress(*columns, TimeElapsedColumn(), console=console)
        self._ids: dict[str, TaskID] = {}

    def show(self, name: str, done: int, total: int | None, note: str = "") -> None:
        """Show how much of something is done; `total` is None where nobody knows."""
        if name not in self._ids:
            self._ids[name] = self._lines.add_task(name, total=total, note=note)
        self._lines.update(self._ids[name], completed=done, total=total, note=note)

    def finish(self) -> None:
        """Show everything so far as done."""
        for task in self._lines.tasks:
            if not task.finished:
                self._lines.update(task.id, total=task.total or 1, completed=task.total or 1)

    def __enter__(self) -> Display:
        self._lines.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.stop()
