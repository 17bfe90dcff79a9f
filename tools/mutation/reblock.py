"""Cuts several layers of an attention or feed-forward in other blocks: some of those that meet, or all.

Layers that are re-blocked together agree with one another; the fault is where they meet the rest. Re-blocking
all of them puts the features in another order, the same everywhere: harmless, unless a block ends inside a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from shardwise.plan.styles import PackedColwiseParallel, PackedRowwiseParallel, Style

Part = tuple[str, int]
"""One block of a layer: its plan key, and which of its blocks."""

HALVES = [1, 1]
UNEQUAL = [1, 3]


def reblocked(
    groups: Mapping[str, Sequence[str]], blocks: Mapping[str, Sequence[int]], rowwise: frozenset[str]
) -> Iterator[tuple[str, str, dict[str, Style]]]:
    """Yield (kind of fault, plan key, entries that replace those of the right plan).

    Args:
        groups: Attention or feed-forward -> plan keys of its layers, each rowwise one after those that feed it.
        blocks: Plan key -> the blocks in which the right plan cuts the weight.
        rowwise: The keys whose input is cut; the output of the others is.
    """
    for name, keys in _complete(groups, rowwise).items():
        for parts, cuts in _choices(_streams(keys, blocks, rowwise), blocks, rowwise):
            for cut in cuts if len(parts) > 1 else ():
                if all(blocks[key][i] % sum(cut) == 0 for key, i in parts):
                    labels = (_label(name, key, i, len(blocks[key])) for key, i in parts)
                    yield (
                        f"re-blocked {cut}: {', '.join(labels)}",
                        parts[0][0],
                        _cut(parts, blocks, rowwise, cut),
                    )


def _complete(groups: Mapping[str, Sequence[str]], rowwise: frozenset[str]) -> dict[str, list[str]]:
    """Return the groups, those of a block that lack their colwise or rowwise layers joined into one."""
    found: dict[str, list[str]] = {}
    for name, keys in groups.items():
        whole = len({key in rowwise for key in keys}) == 2
        found.setdefault(name if whole else name.rpartition(".")[0], []).extend(keys)
    return found


def _streams(
    keys: Iterable[str], blocks: Mapping[str, Sequence[int]], rowwise: frozenset[str]
) -> list[list[Part]]:
    """Return the blocks of a group's layers, in a list for each rowwise layer: it, and what feeds it."""
    streams: list[list[Part]] = [[]]
    for key in keys:
        streams[-1] += [(key, i) for i in range(len(blocks[key]))]
        if key in rowwise:
            streams.append([])
    return [stream for stream in streams if stream]


def _choices(
    streams: list[list[Part]], blocks: Mapping[str, Sequence[int]], rowwise: frozenset[str]
) -> Iterator[tuple[Sequence[Part], list[list[int]]]]:
    """Yield which blocks of a group are cut together, and the ways to cut them."""
    if len(streams) > 1:
        everything = [part for stream in streams for part in stream]
        yield everything, [HALVES, UNEQUAL]
        yield [part for part in everything if part[0] not in rowwise], [HALVES]
        for alike in zip(*streams, strict=False):
            yield alike, [HALVES]
    for stream in streams:
        yield stream, [HALVES, UNEQUAL]
        yield stream[:2], [HALVES]
        yield stream[-2:], [HALVES]
        for meeting in _meetings(stream, blocks, rowwise):
            yield meeting, [HALVES, UNEQUAL]
            for left_out in meeting:
                yield [part for part in meeting if part != left_out], [HALVES]


def _meetings(
    stream: list[Part], blocks: Mapping[str, Sequence[int]], rowwise: frozenset[str]
) -> Iterator[list[Part]]:
    """Yield the blocks that meet: all, or, where the rowwise layer reads a concatenation, those of each part's size."""
    read = {blocks[key][i] for key, i in stream if key in rowwise}
    if len(read) < 2:
        yield stream
        return
    for size in sorted(read):
        yield [(key, i) for key, i in stream if blocks[key][i] == size]


def _cut(
    parts: Sequence[Part], blocks: Mapping[str, Sequence[int]], rowwise: frozenset[str], cut: list[int]
) -> dict[str, Style]:
    """Return the entries that cut each of `parts` in proportion, and leave the other blocks as they are."""
    entries: dict[str, Style] = {}
    for key in dict.fromkeys(key for key, _ in parts):
        finer: list[int] = []
        for i, size in enumerate(blocks[key]):
            finer += [size * share // sum(cut) for share in cut] if (key, i) in parts else [size]
        entries[key] = (PackedRowwiseParallel if key in rowwise else PackedColwiseParallel)(finer)
    return entries


def _label(group: str, key: str, index: int, count: int) -> str:
    return key.removeprefix(f"{group}.") + (f"[{index}]" if count > 1 else "")
