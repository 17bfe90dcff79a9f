"""The figures as pictures: bars of the same length for the same number, one panel for each thing measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_OURS, _THEIRS, _ALONE, _TEXT = "#3b6ea8", "#c9a24a", "#8a8a8a", "#222222"
Bars = Sequence[tuple[str, float, str]]
"""Name, height and color of each bar."""


def draw_loads(found: Mapping[str, Any], path: Path) -> None:
    """Draw time, CPU time and memory of each kind of load, as a PNG."""
    variants = found["variants"]
    panels = [
        ("seconds", _bars(variants, "wall_s", 1.0)),
        ("CPU seconds, all ranks", _bars(variants, "cpu_s", 1.0)),
        ("memory beside the shard, MiB", _bars(variants, "peak_beyond_shard_bytes", 2**-20)),
    ]
    size = found["checkpoint_bytes"] / 1e9
    cores = found["hardware"]["cores"]
    floor = found["sequential_read"]["warm_s"]
    title = (
        f"{size:.2f} GB on {found['ranks']} ranks and {cores} cores; read from end to end in {floor:.2f} s"
    )
    _draw(panels, title, path)


def draw_steps(found: Mapping[str, Any], path: Path) -> None:
    """Draw the time of one forward in each way, as a PNG."""
    panels = []
    for size in dict.fromkeys(case["size"] for case in found["cases"]):
        bars = [
            (f"{case['name']}, {way}", figures["wall_s"] * 1e3, _color(way))
            for case in found["cases"]
            if case["size"] == size
            for way, figures in case["ways"].items()
        ]
        panels.append((f"ms, {size}", bars))
    _draw(panels, f"one forward on {found['ranks']} ranks and {found['hardware']['cores']} cores", path)


def _bars(variants: Mapping[str, Any], name: str, scale: float) -> Bars:
    return [(v["title"], v[name] * scale, _color(v["title"])) for v in variants.values()]


def _color(name: str) -> str:
    return _OURS if name.startswith("shardwise") else _THEIRS if name.startswith("diffusers") else _ALONE


def _draw(panels: Sequence[tuple[str, Bars]], title: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = max(len(bars) for _, bars in panels)
    figure = Figure(figsize=(4.2 * len(panels) + 2, 0.36 * rows + 1.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    shared = len({tuple(name for name, _, _ in bars) for _, bars in panels}) == 1
    for axes, (label, bars) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        names, heights, colors = zip(*bars, strict=True)
        places = range(len(bars))
        axes.barh(places, heights, color=colors, height=0.7)
        axes.invert_yaxis()
        axes.set_yticks(places, names if not shared or axes.get_subplotspec().is_first_col() else [])
        for place, height in zip(places, heights, strict=True):
            axes.annotate(
                f"{height:.3g}" if height < 1000 else f"{height:.0f}", (height, place), xytext=(3, 0),
                textcoords="offset points", va="center", fontsize=8, color=_TEXT,
            )  # fmt: skip
        axes.set_xlabel(label)
        axes.margins(x=0.15)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, format="png")
