"""What a rank holds, by the number of ranks, as a picture: its own part, and what every other rank holds too."""

from __future__ import annotations

from pathlib import Path

from shardwise.plan.estimate import Estimate

_OWN, _SAME, _TEXT = "#3b6ea8", "#c9a24a", "#222222"


def draw_bytes(estimate: Estimate, path: Path) -> None:
    """Draw the weight bytes of a rank at each degree of an estimate, sharded and replicated, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [str(degree) for degree in estimate.degrees]
    total = [share.weight_bytes_per_rank / 2**30 for share in estimate.degrees.values()]
    same = [
        share.weight_bytes_per_rank * share.replicated_share / 2**30 for share in estimate.degrees.values()
    ]
    axes.bar(names, same, color=_SAME, label="on every rank", width=0.6)
    own = [whole - part for whole, part in zip(total, same, strict=True)]
    axes.bar(names, own, bottom=same, color=_OWN, label="this rank's own", width=0.6)
    for place, height in enumerate(total):
        axes.annotate(
            f"{height:.2f}", (place, height), ha="center", va="bottom", fontsize=9, color=_TEXT,
            xytext=(0, 2), textcoords="offset points",
        )  # fmt: skip
    axes.set(xlabel="ranks", ylabel="GiB of weights on a rank")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)
    axes.legend(frameon=False)
    axes.set_title(f"{estimate.model}, {estimate.itemsize} bytes a parameter", loc="left", fontsize=10)
    figure.savefig(path, format="png")
