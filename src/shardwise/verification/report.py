"""What a verification found: one row for each compared module, in execution order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

_SHOWN = 10  # rows of each kind in the printed report


@dataclass(frozen=True)
class ModuleError:
    """How far one module of the sharded model is from the same module in one process, on the same input.

    Attributes:
        path: Its path in the model; `""` is the model itself.
        kind: The name of its class.
        error: Largest absolute difference over the outputs, each relative to the largest absolute value of the
            reference; the worst call on the worst rank. Infinite where the module raised, or where a shape, an
            integer or a finite value is not that of the reference.
        bound: Up to where `error` is rounding; see `shardwise.verification.bound`.
        one_process: In half precision, the distance of one process to fp32; `error` then is that of the ranks.
        rank: The rank that was furthest off.
        note: What went wrong, where `error` is infinite.
    """

    path: str
    kind: str
    error: float
    bound: float
    one_process: float | None = None
    rank: int = 0
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether the difference is rounding."""
        return self.error <= self.bound

    @property
    def excess(self) -> float:
        """`error` in units of `bound`: above 1 is a mistake."""
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound > 0 and self.error == self.error else inf

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain data; an infinite error is None."""
        return {
            "path": self.path,
            "kind": self.kind,
            "error": self.error if isfinite(self.error) else None,
            "bound": self.bound,
            "one_process": self.one_process,
            "rank": self.rank,
            "ok": self.ok,
            "note": self.note,
        }


@dataclass(frozen=True)
class VerifyReport:
    """A printable report of a sharded model beside one process, module by module.

    Attributes:
        model: Name of the model's class.
        degree: Number of ranks.
        dtype: What was computed in, e.g. `"float32"`.
        device: Where, e.g. `"cpu"`.
        modules: One row for each module whose inputs and outputs are whole on every rank, in the order in which
            they finish: children before the module that calls them.
        seconds: How long it took.
    """

    model: str
    degree: int
    dtype: str
    device: str
    modules: tuple[ModuleError, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether something was compared and every difference is rounding."""
        return bool(self.modules) and self.first is None

    @property
    def first(self) -> str | None:
        """Path of the first module that diverges: the smallest such module in its place; None if there is none."""
        return next((row.path for row in self.modules if not row.ok), None)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, ready for JSON."""
        return {
            "model": self.model,
            "tp_degree": self.degree,
            "dtype": self.dtype,
            "device": self.device,
            "ok": self.ok,
            "first": self.first,
            "seconds": self.seconds,
            "modules": [row.as_dict() for row in self.modules],
        }

    def __str__(self) -> str:
        """Return a headline, the modules that diverge, and those that come closest to their bound."""
        where = f"{self.model}, {self.degree} ranks and one process, {self.dtype} on {self.device}"
        wrong = [row for row in self.modules if not row.ok]
        counted = f"{len(self.modules)} modules compared in {self.seconds:.1f} s"
        if not wrong:
            nearest = sorted(self.modules, key=lambda row: -row.excess)[:3]
            verdict = "equal up to rounding" if self.modules else "NOTHING COMPARED"
            return "\n".join([f"{where}: {verdict}; {counted}", "nearest to their bound:", *_table(nearest)])
        more = len(wrong) - _SHOWN
        return "\n".join(
            [
                f"{where}: {len(wrong)} modules DIVERGE; {counted}",
                f"first: {shown(wrong[0].path)}",
                *_table(wrong[:_SHOWN]),
                *([f"  and {more} more"] if more > 0 else []),
            ]
        )


def shown(path: str) -> str:
    """Return a module's path as a reader sees it."""
    return path or "(the model itself)"


def _table(rows: Iterable[ModuleError]) -> list[str]:
    """Return one line for each row, in columns."""
    cells = [(shown(row.path), row.kind, _figures(row)) for row in rows]
    wide = [max((len(cell[i]) for cell in cells), default=0) for i in range(2)]
    return [f"  {path:{wide[0]}}  {kind:{wide[1]}}  {figures}" for path, kind, figures in cells]


def _figures(row: ModuleError) -> str:
    if row.note:
        return f"rank {row.rank}: {row.note}"
    alone = f", one process {row.one_process:.1e}" if row.one_process is not None else ""
    return f"error {row.error:.1e}{alone}, bound {row.bound:.1e}, rank {row.rank}"
