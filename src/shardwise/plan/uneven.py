"""Heads and widths that the degree does not divide: which modules are cut unevenly, and in how many units.

Only if the user allows it (`TensorParallelConfig(uneven=True)`). A unit is a head. What can be cut evenly stays so, the
feed-forwards above all; where an attention and a feed-forward are fused in one layer, both follow the heads. Nothing
here decides whether a plan is right: the static check sees two cuts that meet and differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import gcd

from torch import nn

from shardwise.plan import heads
from shardwise.plan.styles import (
    AcrossHeadNorm,
    LinearStyle,
    SliceInput,
    SliceOutput,
    SliceParameter,
    Style,
    StyleFault,
)

Entry = tuple[str, str, Style]
"""Path of a module, its plan key and its style."""


def attentions(
    modules: Mapping[str, nn.Module], owners: Iterable[heads.Owner], degree: int
) -> dict[str, int]:
    """Return path -> number of heads for each planned module in or beside an attention of uneven heads.

    Of fewer key heads than query heads, each unit is a key head and the query heads that read it. An attention with
    fewer heads than ranks has nothing for some of them, and is left out.
    """
    found: dict[str, int] = {}
    for owner in owners:
        counts = [n for path in owner.projections for n in heads.head_counts(owner, path, owner.width)]
        units = gcd(*counts)
        if units > degree and units % degree:
            found |= dict.fromkeys(_together(modules, owner), units)
    return found


def _together(modules: Mapping[str, nn.Module], owner: heads.Owner) -> Iterator[str]:
    """Yield an attention, what is planned of it, and the layers beside it that a block fuses with it."""
    yield owner.path
    for path, (_, style) in owner.planned.items():
        if path.startswith(f"{owner.path}.") and isinstance(style, (AcrossHeadNorm, LinearStyle)):
            yield path
    block = owner.path.rpartition(".")[0]
    beside = list(_beside(modules, owner.planned, block)) if block else []
    yield from beside
    if beside:
        yield block  # it may keep the widths of those layers


def _beside(
    modules: Mapping[str, nn.Module], planned: Mapping[str, tuple[str, Style]], block: str
) -> Iterator[str]:
    """Yield the layers that a block holds itself, beside its attention."""
    for path, (_, style) in planned.items():
        inside = path.startswith(f"{block}.") and isinstance(style, LinearStyle)
        if inside and not style.may_stay_whole and heads.owner_path(modules, path) == block:
            yield path


def shared(
    modules: Mapping[str, nn.Module],
    owners: Iterable[heads.Owner],
    entries: Sequence[Entry],
    found: Mapping[str, int],
    degree: int,
) -> Iterator[Entry]:
    """Yield the entries of a plan with the number of units in those that are cut unevenly.

    Beside what `attentions` found, that is what is laid over heads, if all attentions have one number of them, and
    what cannot be cut evenly: a feed-forward by its features, the rest by the heads if they fit.
    """
    everywhere = set(found.values())
    in_attentions = {path for owner in owners if owner.projections for path in owner.linears}
    for path, key, style in entries:
        over_heads = isinstance(style, (SliceInput, SliceOutput, SliceParameter))
        units = [found[path]] if path in found else []
        if not units and (over_heads or not _fits(style, modules[path], degree)):
            units = [] if path in in_attentions else _by_features(style, modules[path], degree)
            units += list(everywhere) if len(everywhere) == 1 else []
        tried = (style.shared_in(number) for number in units if style.copies == 1)
        yield path, key, next((cut for cut in tried if _fits(cut, modules[path], degree)), style)


def _by_features(style: Style, module: nn.Module, degree: int) -> list[int]:
    """Return the number of units that a layer's blocks are cut in, if they can be.

    Products like wide pieces, and ranks like equal ones: the pieces are as wide as leaves eight for each rank.
    """
    try:
        size = gcd(*style.shard_of(module).blocks) if isinstance(style, LinearStyle) else 0
    except StyleFault:
        return []  # reported where the style is applied
    widths = [width for width in (64, 32, 16, 8, 4, 2, 1) if size % width == 0]
    return [size // next((width for width in widths if size // width >= 8 * degree), 1)] if size else []


def _fits(style: Style, module: nn.Module, degree: int) -> bool:
    try:
        return not any(True for _ in style.faults(module, degree))
    except StyleFault:
        return True  # reported where the style is applied
