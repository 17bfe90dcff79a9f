"""What each rank does for `shardwise doctor`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.checkpoint.copies import compare_copies, files_of
from shardwise.config import TensorParallelConfig
from shardwise.doctor.checks import Check, Facts, checks, who
from shardwise.doctor.facts import facts
from shardwise.doctor.links import measured
from shardwise.errors import CheckpointError, RankFailure
from shardwise.runtime.group import TensorParallelGroup

_PATIENCE = timedelta(seconds=10)
_NAMES = 5


def examine(model: str | None) -> dict[str, Any]:
    """Return what all ranks have found, the same on each of them.

    Args:
        model: A folder that all ranks should have, with equal files.

    Returns:
        `ranks`, what each said of itself; `checks`, each with `name`, `says` and `problems`; `links`, what all-reduces
        take; `seconds`.
    """
    start = time.perf_counter()
    group = TensorParallelGroup.of(TensorParallelConfig(dist.get_world_size()))
    said: list[Facts] = group.exchange(facts(group, model), _PATIENCE)
    found = checks(said, _weights(model))
    if model is not None:
        found.append(_copies(group, said, model))
    links = measured(group) if group.degree > 1 else []
    return {
        "ranks": said,
        "checks": [{**asdict(check), "problems": list(check.problems)} for check in found],
        "links": links,
        "seconds": round(time.perf_counter() - start, 2),
    }


def _weights(model: str | None) -> int:
    """Return the bytes of the weights in a pipeline's folder, of variants those of all; 0 without one."""
    if model is None or not Path(model).is_dir():
        return 0
    return sum(
        path.stat().st_size for path in files_of(Path(model)).values() if path.suffix == ".safetensors"
    )


def _copies(group: TensorParallelGroup, said: Sequence[Facts], model: str) -> Check:
    """Compare the copies of a model that the ranks would read."""
    missing = [
        f"{who(fact)}: there is no folder {model}: copy it there" for fact in said if fact["files"] is None
    ]
    if missing:
        return Check("model", model, tuple(missing))
    everything = set().union(*(fact["files"] for fact in said))
    for fact in said:
        lacks = sorted(everything - set(fact["files"]))
        if lacks:
            more = f" and {len(lacks) - _NAMES} more" if len(lacks) > _NAMES else ""
            missing.append(f"{who(fact)}: {model} lacks {', '.join(lacks[:_NAMES])}{more}: copy them there")
    try:
        compare_copies(group, "comparing the copies", _PATIENCE, files_of(Path(model)))
    except (RankFailure, CheckpointError) as error:
        missing.append(f"{error}\n  ({', '.join(who(fact) for fact in said)})")
    return Check("model", f"{model}, {len(everything)} files", tuple(missing))
