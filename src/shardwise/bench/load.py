"""`shardwise bench load`: every kind of load, interleaved, each in fresh processes, and the medians."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from shardwise.bench.checkpoint import HEADS, Sizes, sizes_for, write_checkpoint
from shardwise.bench.gauges import (
    SequentialRead,
    conditions,
    drop_from_memory,
    middle,
    require_devices,
    require_linux,
    turns,
)
from shardwise.bench.loads import KINDS, config_of, measure, shard_bytes, weight_files
from shardwise.bench.ranks import run_fresh
from shardwise.errors import RankFailure

logger = logging.getLogger(__name__)

COLD = ("shardwise", "shardwise_ready", "diffusers", "diffusers_ready")
"""Kinds that are also measured with files that are on storage only."""

_REHEARSAL = Sizes(heads=4, double_blocks=0, single_blocks=1)

Said = Callable[[str], object]


def bench_load(
    ranks: int,
    size_gb: float,
    *,
    modulations: bool = True,
    repeats: int = 3,
    cold: bool = True,
    folder: Path | None = None,
    kinds: Sequence[str] | None = None,
    device: str = "cpu",
    say: Said = logger.info,
) -> dict[str, Any]:
    """Load a checkpoint in every way, and return what each took: medians over `repeats` turns.

    Each load has processes of its own, so that memory and bytes are its own. In a turn each kind is loaded once; the
    order changes from turn to turn. All kinds load the same slices, and that their numbers are the same is checked.

    Args:
        ranks: Number of ranks.
        size_gb: Size of the checkpoint in 1e9 bytes. Of 2.6 or more the tensors have FLUX.2-dev's shapes; below it
            fewer heads.
        modulations: Whether all cut the modulations, as shardwise does by default; or leave them whole, as diffusers'
            own plan does.
        repeats: Number of turns.
        cold: Whether to measure also with files that are on storage only.
        folder: Where the checkpoint is written, and left; by default it is removed.
        kinds: Names of `KINDS`, in place of all that there are for the device.
        device: The type of the devices that slices go to.
        say: Told what is going on.

    Raises:
        UnsupportedOption: the system does not count what is measured, or has no such device.
        RankFailure: a load failed, or two kinds loaded different numbers.
    """
    require_linux()
    require_devices(device)
    if kinds is None:  # memory of a device is in place before, always
        kinds = [name for name, kind in KINDS.items() if device == "cpu" or not kind.ready]
    sizes = sizes_for(round(size_gb * 1e9))
    with _folder(folder) as place:
        checkpoint, rehearsal = place / "checkpoint", place / "rehearsal"
        say(f"writing {size_gb:g} GB to {checkpoint}")
        nbytes = write_checkpoint(checkpoint, sizes)
        write_checkpoint(rehearsal, _REHEARSAL)
        bench = _Bench(ranks, checkpoint, rehearsal, modulations, device, say)
        for turn in range(repeats):
            bench.turn(turn, turns(kinds, turn), cold)
        plan = shard_bytes(checkpoint, config_of(checkpoint, ranks, modulations))
        return {
            "ranks": ranks,
            "checkpoint_bytes": nbytes,
            "checkpoint": _described(sizes, weight_files(checkpoint)),
            "modulations_sharded": modulations,
            "plan_bytes_per_rank": max(plan),
            "repeats": repeats,
            **conditions(device),
            "sequential_read": bench.floor(),
            "variants": {kind: bench.figures(kind) for kind in kinds},
        }


@contextmanager
def _folder(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as temporary:
        yield Path(temporary)


def _described(sizes: Sizes, files: Sequence[Path]) -> dict[str, Any]:
    return {
        "heads": sizes.heads,
        "double_blocks": sizes.double_blocks,
        "single_blocks": sizes.single_blocks,
        "real_shapes": sizes.heads == HEADS,
        "files": len(files),
    }


class _Bench:
    """One checkpoint, and what has been measured on it so far."""

    def __init__(
        self, ranks: int, checkpoint: Path, rehearsal: Path, modulations: bool, device: str, say: Said
    ) -> None:
        self._ranks, self._modulations, self._device, self._say = ranks, modulations, device, say
        self._checkpoint, self._rehearsal = checkpoint, rehearsal
        self._files = weight_files(checkpoint)
        self._reads: dict[str, list[float]] = {"warm_s": [], "cold_s": []}
        self._results: dict[tuple[str, bool], list[list[dict[str, Any]]]] = {}
        self._sums: list[dict[str, str]] | None = None

    def turn(self, number: int, order: Iterable[str], cold: bool) -> None:
        """Measure each kind once, and the files' sequential read."""
        read = SequentialRead(self._files)
        if cold and drop_from_memory(self._files):
            self._reads["cold_s"].append(read.seconds())
        read.seconds()
        self._reads["warm_s"].append(read.seconds())
        for state in (False, True) if cold else (False,):
            for kind in order:
                if not state or kind in COLD:
                    self._measure(kind, state, check=number == 0 and not state and not KINDS[kind].floor)
            read.seconds()  # what the cold ones have left out

    def _measure(self, kind: str, cold: bool, check: bool) -> None:
        args = (kind, self._checkpoint, self._rehearsal, self._modulations, cold, check)
        results = run_fresh(measure, self._ranks, *args, device=self._device)
        if check:
            self._compare(kind, [result.pop("check_sums") for result in results])
        if all(result["cold"] for result in results) or not cold:
            self._results.setdefault((kind, cold), []).append(results)
        wall = max(result["wall_s"] for result in results)
        self._say(f"{kind}, {self._ranks} ranks, {'cold' if cold else 'warm'}: {wall:.2f} s")

    def _compare(self, kind: str, sums: list[dict[str, str]]) -> None:
        self._sums = self._sums or sums
        require_same(kind, self._sums, sums)

    def floor(self) -> dict[str, float]:
        """Return the median seconds of a sequential read of the files."""
        return {state: middle(seconds) for state, seconds in self._reads.items() if seconds}

    def figures(self, kind: str) -> dict[str, Any]:
        """Return the medians of a kind; `cold` beside the warm ones, where it was measured."""
        found = {cold: self._results[kind, cold] for cold in (False, True) if (kind, cold) in self._results}
        figures = {"title": KINDS[kind].title, **summary(found[False])}
        return figures | ({"cold": summary(found[True])} if True in found else {})


def require_same(kind: str, wanted: Sequence[Mapping[str, str]], found: Sequence[Mapping[str, str]]) -> None:
    """Check that a kind of load brought the same numbers as the first one, on each rank.

    Raises:
        RankFailure: naming tensors that differ.
    """
    for rank, (ours, theirs) in enumerate(zip(wanted, found, strict=True)):
        differ = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        if differ:
            names = ", ".join(differ[:3])
            raise RankFailure(f"{kind} loaded other numbers on rank {rank}: {len(differ)} tensors ({names})")


def summary(turns: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the medians over turns of the figures of all ranks: the slowest, the largest, or the sum."""
    return {
        "wall_s": middle(max(r["wall_s"] for r in ranks) for ranks in turns),
        "cpu_s": middle(sum(r["cpu_s"] for r in ranks) for ranks in turns),
        "staging_bytes": round(middle_of(turns, _staging)),
        "file_backed_bytes": round(middle_of(turns, lambda r: r["peak_files"] - r["before_files"])),
        "peak_beyond_shard_bytes": round(middle_of(turns, lambda r: r["highest"] - r["new_bytes"])),
        "bytes_requested_per_rank": round(middle_of(turns, lambda r: r["requested"])),
        "storage_bytes_node": round(median(sum(r["from_storage"] for r in ranks) for ranks in turns)),
        **{
            name: middle(max(r[name] for r in ranks) for ranks in turns)
            for name in ("check_s", "read_s")
            if name in turns[0][0]
        },
        "wall_s_all": [round(max(r["wall_s"] for r in ranks), 4) for ranks in turns],
        "cpu_s_all": [round(sum(r["cpu_s"] for r in ranks), 4) for ranks in turns],
    }


def middle_of(turns: Sequence[Sequence[Mapping[str, Any]]], figure: Callable[[Any], float]) -> float:
    """Return the median over turns of the largest figure of a rank; never below zero."""
    return median(max(0.0, *(figure(result) for result in ranks)) for ranks in turns)


def _staging(result: Mapping[str, Any]) -> float:
    """Return the anonymous memory that a load had at its peak beyond what it leaves: the rank's own slices."""
    return float(result["peak_anonymous"] - result["before_anonymous"] - result["new_bytes"])
