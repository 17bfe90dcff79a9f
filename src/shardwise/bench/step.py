"""`shardwise bench step`: one forward of four families, by one process, by shardwise and by diffusers' own ranks."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from shardwise import models
from shardwise.bench.checkpoint import write_model
from shardwise.bench.gauges import conditions, middle, require_devices, require_linux
from shardwise.bench.ranks import run_fresh
from shardwise.bench.steps import REAL, SMALL, Case, cases, measure_calls, measure_steps
from shardwise.models.lookup import skeleton

logger = logging.getLogger(__name__)


def bench_step(
    ranks: int,
    *,
    repeats: int = 9,
    device: str = "cpu",
    measured: Sequence[Case] | None = None,
    say: Callable[[str], object] = logger.info,
) -> dict[str, Any]:
    """Run a forward of each case in each way, in turns, and return the medians.

    In bf16, without gradients, by one thread for each core that a rank has. One process runs alone while the other
    ranks wait.

    Args:
        ranks: Number of ranks.
        repeats: Number of turns.
        device: The type of the devices. With fewer of them than ranks they are shared, and diffusers is left out.
        measured: The cases, by default four families at real widths and at small ones.
        say: Told what is going on.

    Raises:
        UnsupportedOption: the system does not count what is measured, or has no such device.
        RankFailure: a rank failed.
    """
    require_linux()
    require_devices(device)
    measured = cases() if measured is None else measured
    found = [_case(case, ranks, repeats, device, say) for case in measured]
    smallest = next((case for case in measured if case.size == SMALL), measured[0])
    return {
        "ranks": ranks,
        "repeats": repeats,
        **conditions(device),
        "cases": found,
        "colwise_call": _calls(smallest, ranks, device),
    }


def _case(case: Case, ranks: int, repeats: int, device: str, say: Callable[[str], object]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
        nbytes = write_model(Path(folder), _whole(case))
        turns = max(3, repeats // 2) if case.size == REAL else repeats  # they take seconds
        results = run_fresh(measure_steps, ranks, case, Path(folder), turns, device=device)
    ways = {way: _summary([result[way] for result in results]) for way in results[0]}
    said = ", ".join(f"{way} {figures['wall_s'] * 1e3:.0f} ms" for way, figures in ways.items())
    say(f"{case.name}, {case.size}: {said}")
    return {"name": case.name, "size": case.size, "config": _plain(case.config), "batch": case.batch,
            "checkpoint_bytes": nbytes, "ways": ways}  # fmt: skip


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as JSON has it."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in config.items()}


def _whole(case: Case) -> Any:
    return skeleton(getattr(models, case.name), **case.config)


def _summary(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the medians over turns of the slowest rank's time and of the busiest rank's CPU time."""
    first = ranks[0]
    return {
        "wall_s": middle(max(turn) for turn in zip(*(r["wall_s"] for r in ranks), strict=True)),
        "cpu_s": middle(max(turn) for turn in zip(*(r["cpu_s"] for r in ranks), strict=True)),
        **{name: first[name] for name in ("all_reduces", "all_reduce_bytes", "difference")},
    }


def _calls(case: Case, ranks: int, device: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
        write_model(Path(folder), _whole(case))
        results = run_fresh(measure_calls, ranks, case, Path(folder), device=device)
    colwise, plain = (median(r[name] for r in results) for name in ("colwise_us", "plain_us"))
    return {"colwise_us": round(colwise, 2), "plain_us": round(plain, 2), "ratio": round(colwise / plain, 3)}
