"""Where a job is: every rank says what it does, the first one shows it and writes it down."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from shardwise.bench.gauges import memory
from shardwise.errors import OutputError
from shardwise.generate.display import Display
from shardwise.generate.events import append
from shardwise.pipeline import PipelineReport
from shardwise.runtime.board import Board
from shardwise.runtime.group import TensorParallelGroup

_EVERY = 0.1
"""Seconds between two notes of a rank about the same load."""


class Progress:
    """What the ranks of one job report of themselves.

    Loading and denoising are told by every rank through a `Board`, so that no rank waits to report. Only the first
    rank has a display and a file of events.
    """

    def __init__(self, group: TensorParallelGroup, events: str | None) -> None:
        self._group, self._board = group, Board(group)
        self._events = events if group.rank == 0 else None
        self._display = Display() if group.rank == 0 else None
        self._failure: OutputError | None = None
        self._loads: dict[str, _Load] = {}
        self._lock = threading.Lock()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the display meanwhile."""
        if self._display is None:
            yield
            return
        with self._display:
            yield
            self._display.finish()

    def tell(self, event: str, **data: Any) -> None:
        """Write an event down; if that fails, `check` says so."""
        if self._failure is None:
            try:
                append(self._events, event, **data)
            except OutputError as error:
                self._failure = error

    def check(self) -> None:
        """Raise if an event could not be written; to be called where the other ranks hear of it.

        Raises:
            OutputError: likewise.
        """
        if self._failure is not None:
            raise self._failure

    def phase(self, name: str) -> None:
        """Say that something begins, and that all before it is done."""
        self.tell("phase", phase=name, memory=self._memory())
        if self._display is not None:
            self._display.finish()
            self._display.show(name, 0, None)

    def load(self, subject: str, arrived: int, total: int) -> None:
        """Say that bytes of a component have arrived on this rank; threads may call this at once."""
        name = subject.rpartition("/")[2]  # components lie in folders of their names
        with self._lock:
            load = self._loads.setdefault(name, _Load(total))
            load.arrived += arrived
            if load.arrived < total and time.monotonic() - load.told < _EVERY:
                return
            load.told = time.monotonic()
            self._board.post(f"load/{name}", [load.arrived, total])
            if self._display is not None:
                self._show_load(self._display, name, total)

    def _show_load(self, display: Display, name: str, total: int) -> None:
        """Show how far each rank is, and write it down; a rank that has said nothing yet will read as much as this."""
        notes = [note or [0, total] for note in self._board.read(f"load/{name}")]
        done, all_of_it = (sum(column) for column in zip(*notes, strict=True))
        per_rank = " + ".join(_mib(note[0]) for note in notes)
        display.show(name, done, all_of_it, f"{per_rank} MiB")
        self.tell("load", component=name, bytes=[note[0] for note in notes], total=all_of_it)

    def loaded(self, report: PipelineReport) -> None:
        """Say what each rank holds of the pipeline, once all of it is loaded."""
        if self._display is not None:
            for name, load in self._loads.items():  # other ranks may have ended later than this one
                self._show_load(self._display, name, load.total)
        self.tell("loaded", components=[{**asdict(part), "bytes": part.bytes} for part in report.components])
        per_rank = " + ".join(_mib(nbytes) for nbytes in report.weight_bytes)
        whole, device = _mib(report.weight_bytes_one_process), self._group.device.type
        self.note("loading", f"{per_rank} MiB of weights on {device}, {whole} in one process")

    def note(self, name: str, text: str) -> None:
        """Show a line about something that is done."""
        if self._display is not None:
            self._display.show(name, 1, 1, text)

    def step(self, done: int, total: int, seconds: float) -> None:
        """Say that a denoising step is done, and what it took."""
        held = self._memory()
        self.tell("step", step=done, of=total, seconds=round(seconds, 4), memory=held)
        if self._display is not None:
            per_rank = " + ".join(_mib(used or 0) for used in held)
            self._display.show("denoising", done, total, f"{seconds:.2f} s a step, memory {per_rank} MiB")

    def _memory(self) -> Sequence[int | None]:
        """Note the most memory this rank has used so far, and return what each has noted last."""
        self._board.post("memory", peak_memory(self._group.device))
        return self._board.read("memory") if self._group.rank == 0 else []


class _Load:
    """How far the load of a component is on this rank."""

    def __init__(self, total: int) -> None:
        self.total, self.arrived, self.told = total, 0, 0.0


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process has used so far: of its accelerator, or on a CPU of its memory."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    try:
        return memory()["VmHWM"]
    except OSError:  # not Linux
        return 0


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f}"


class Steps:
    """Stands in for a pipeline's progress bar: tells of each step, and of the end."""

    def __init__(self, bar: Any, progress: Progress) -> None:
        self._bar, self._progress = bar, progress
        self._done, self._last = 0, time.perf_counter()
        progress.phase("denoising")

    def update(self, steps: int = 1) -> None:
        """Count steps."""
        now = time.perf_counter()
        self._done += steps
        self._progress.step(self._done, self._bar.total or self._done, (now - self._last) / max(steps, 1))
        self._last = now

    def __iter__(self) -> Iterator[Any]:
        for item in self._bar:
            yield item
            self.update()
        self._progress.phase("decoding")

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            self._progress.phase("decoding")

    def __getattr__(self, name: str) -> Any:
        """Pass everything else on to the bar, which is not shown."""
        return getattr(self._bar, name)


def watch_steps(pipeline: Any, progress: Progress) -> None:
    """Have a pipeline tell `progress` of its denoising steps, in place of its own bar."""
    bar = pipeline.progress_bar  # others may have wrapped it: they are told as before
    pipeline.set_progress_bar_config(disable=True)
    pipeline.progress_bar = lambda *args, **kwargs: Steps(bar(*args, **kwargs), progress)
