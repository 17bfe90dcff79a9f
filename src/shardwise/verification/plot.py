"""The errors of a verification as a picture: one strip, a bar for each module, in execution order."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from math import isfinite, log10
from pathlib import Path
from typing import Any

from shardwise.errors import UnsupportedOption
from shardwise.verification.report import ModuleError, VerifyReport, shown

_RIGHT, _WRONG, _BOUND, _GRAY = "#3b6ea8", "#c8372d", "#222222", "#8a8a8a"
_LONGEST = 60  # characters of a path in the picture
_MOST_LINES = 150
_MOST_NAMES = 16


def draw_strip(report: VerifyReport, path: Path) -> None:
    """Draw the error of each module beside its bound, on a logarithmic axis, as a PNG.

    Bars are the modules, in execution order; red ones diverge, and the first of them is named. Modules that are equal
    bit by bit have no bar. A module that raised, or gave something of another shape, has a bar of full height.

    Raises:
        UnsupportedOption: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = report.modules
    figure = Figure(figsize=(11, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    low, high = _limits(rows)
    _draw_bars(axes, rows, low, high)
    _name_first(axes, rows, high)
    _name_parts(axes, rows)
    axes.set(xlim=(-0.5, max(len(rows), 1) - 0.5), yscale="log", ylim=(low, high))
    axes.set_ylabel("largest error,\nrelative")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    verdict = "equal up to rounding" if report.ok else f"{sum(not row.ok for row in rows)} diverge"
    axes.set_title(
        f"{report.model}: {report.degree} ranks and one process, {report.dtype} on {report.device}: "
        f"{len(rows)} modules, {verdict}",
        loc="left",
        fontsize=10,
    )
    figure.savefig(path, format="png")


def require_matplotlib() -> None:
    """Raise if no picture can be drawn, before the work of finding out what is in it.

    Raises:
        UnsupportedOption: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise UnsupportedOption("the plot needs matplotlib: pip install 'shardwise[plot]'")


def _limits(rows: Sequence[ModuleError]) -> tuple[float, float]:
    """Return whole decades around all errors and bounds."""
    values = [v for row in rows for v in (row.error, row.bound) if v > 0 and isfinite(v)] or [1e-7, 1.0]
    return 10.0 ** (int(log10(min(values)) - 1)), 10.0 ** max(int(log10(max(values)) + 2), 1)


def _draw_bars(axes: Any, rows: Sequence[ModuleError], low: float, high: float) -> None:
    places = range(len(rows))
    heights = [min(row.error, high) if row.error == row.error else high for row in rows]
    colors = [_RIGHT if row.ok else _WRONG for row in rows]
    axes.bar(places, [h - low if h > low else 0 for h in heights], bottom=low, width=0.8, color=colors)
    edges = [place - 0.5 for place in range(len(rows) + 1)]
    axes.stairs(
        [row.bound for row in rows],
        edges,
        baseline=None,
        color=_BOUND,
        linewidth=1.0,
        label="bound: above is a mistake",
    )
    if any(row.one_process is not None for row in rows):
        alone = [row.one_process or 0 for row in rows]
        axes.stairs(alone, edges, baseline=None, color=_GRAY, linewidth=1.0, label="one process, from fp32")
    axes.legend(loc="upper right", fontsize=8, frameon=False, ncols=2)


def _name_first(axes: Any, rows: Sequence[ModuleError], high: float) -> None:
    """Write the path of the first module that diverges at its bar."""
    first = next((place for place, row in enumerate(rows) if not row.ok), None)
    if first is None:
        return
    right_half = first > len(rows) / 2
    axes.annotate(
        f"first: {shown(rows[first].path)[-_LONGEST:]}",
        (first, min(rows[first].error, high)),
        xytext=(-8 if right_half else 8, 6),
        textcoords="offset points",
        ha="right" if right_half else "left",
        fontsize=8,
        color=_WRONG,
    )


def _name_parts(axes: Any, rows: Sequence[ModuleError]) -> None:
    """Divide the strip where a part of the model, such as a block, has finished, and name the parts below."""
    parts: list[tuple[str, int, int]] = []
    for place, row in enumerate(rows):
        name = _part(row.path)
        if parts and parts[-1][0] == name:
            parts[-1] = (name, parts[-1][1], place)
        else:
            parts.append((name, place, place))
    for _, start, _ in parts[1:] if len(parts) <= _MOST_LINES else []:
        axes.axvline(start - 0.5, color="#d0d0d0", linewidth=0.6, zorder=0)
    wide = [part for part in parts if part[2] > part[1]]
    wide = wide[:: -(-len(wide) // _MOST_NAMES) or 1]
    axes.set_xticks([(start + end) / 2 for _, start, end in wide], [name for name, _, _ in wide])
    axes.tick_params(axis="x", labelsize=7, length=0, labelrotation=20)
    for label in axes.get_xticklabels():
        label.set_ha("right")


def _part(path: str) -> str:
    """Return the block or child of the model that a module belongs to."""
    names = path.split(".")
    numbered = next((i for i, name in enumerate(names) if name.isdigit()), 0)
    return ".".join(names[: numbered + 1])
