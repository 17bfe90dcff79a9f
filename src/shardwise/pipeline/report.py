"""What each rank holds of a pipeline, component by component."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from shardwise.runtime.placement import placement
from shardwise.runtime.shard import sharding_of


@dataclass(frozen=True)
class ComponentReport:
    """One component of a pipeline that has weights. Bytes are those of parameters; the sequences are by rank."""

    name: str
    class_name: str
    styles: Mapping[str, int]
    """Style of the plan -> number of modules that have it; empty if the component is whole on every rank."""
    bytes_one_process: int
    bytes_sharded: Sequence[int]
    bytes_replicated: Sequence[int]
    seconds: Sequence[float]
    """To load it; 0 for one that was passed, or loaded with all that are whole."""

    @property
    def sharded(self) -> bool:
        """Whether each rank holds slices of it."""
        return bool(self.styles)

    @property
    def bytes(self) -> list[int]:
        """Bytes that each rank holds."""
        return [sum(both) for both in zip(self.bytes_sharded, self.bytes_replicated, strict=True)]


@dataclass(frozen=True)
class PipelineReport:
    """A printable report of a pipeline: what each rank holds of each component, and what loading it took."""

    pipeline: str
    components: tuple[ComponentReport, ...]
    seconds_whole: Sequence[float]
    """To load all components that are whole, and put them on the device; by rank."""

    @property
    def weight_bytes(self) -> list[int]:
        """Bytes of parameters that each rank holds."""
        return [sum(held) for held in zip(*(component.bytes for component in self.components), strict=True)]

    @property
    def weight_bytes_one_process(self) -> int:
        """Bytes of parameters of the whole pipeline."""
        return sum(component.bytes_one_process for component in self.components)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data that `json` can write."""
        return {
            **asdict(self),
            "weight_bytes": self.weight_bytes,
            "weight_bytes_one_process": self.weight_bytes_one_process,
        }

    def __str__(self) -> str:
        """Return a table, one line per component, with the totals last."""
        head = ("component", "class", "one process", "a rank, at most", "of it whole", "seconds", "styles")
        rows: list[tuple[str, ...]] = [head]
        rows += [_row(component) for component in self.components]
        whole, most = self.weight_bytes_one_process, max(self.weight_bytes, default=0)
        share = f" ({most / whole:.1%})" if whole else ""
        rows.append(("all", "", _mib(whole), _mib(most) + share, "", f"{max(self.seconds_whole):.1f}", ""))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        return "\n".join([f"{self.pipeline} on {len(self.seconds_whole)} ranks", *lines])


def _row(component: ComponentReport) -> tuple[str, ...]:
    return (
        component.name,
        component.class_name,
        _mib(component.bytes_one_process),
        _mib(max(component.bytes)),
        _mib(max(component.bytes_replicated)),
        f"{max(component.seconds):.1f}" if component.sharded else "",
        ", ".join(f"{count} {style}" for style, count in component.styles.items()) or "whole",
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"


def held(module: nn.Module) -> list[int]:
    """Return the bytes of a module that are sharded, those that are whole, and those of one process."""
    here = placement(module)
    return [here.weight_bytes - here.replicated_bytes, here.replicated_bytes, here.weight_bytes_one_process]


def component_report(
    name: str, module: nn.Module, everywhere: Sequence[Sequence[int]], seconds: Sequence[float]
) -> ComponentReport:
    """Return the report of a component.

    Args:
        name: Of the component in its pipeline.
        module: The component.
        everywhere: What `held` returned on each rank.
        seconds: To load it, on each rank.
    """
    sharded, replicated, whole = zip(*everywhere, strict=True)
    sharding = sharding_of(module)
    styles = Counter(planned.style.label for planned in sharding.plan.modules) if sharding else {}
    return ComponentReport(
        name, type(module).__name__, dict(styles), max(whole), sharded, replicated, tuple(seconds)
    )
