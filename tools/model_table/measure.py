"""The measured column: the largest difference between N ranks and one process, relative to the largest output."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tools.rounding import ROUNDS_IN_ANY_DTYPE, exactly

from shardwise import TensorParallelConfig, enable_parallelism, models
from shardwise.launch import run_ranks
from shardwise.models.lookup import family_of, tiny_case
from shardwise.plan.rules import tensors_in
from shardwise.verification.run import tiny_model

ERRORS = Path(__file__).parents[2] / "tests" / "data" / "model_errors.json"
DEGREES = (2, 4)
SEED = 1
ROUNDED = ", rounded"
"""What is added to a degree for the difference with a model's own rounding to bf16."""


def measured(names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Return class -> degree -> the largest relative difference over all ranks, as JSON has it.

    Of classes that round to bf16 in any dtype that is left out, and the difference with it is kept beside.
    """
    found: dict[str, dict[str, float]] = {name: {} for name in names}
    rounding = tuple(name for name in names if name in ROUNDS_IN_ANY_DTYPE)
    for degree in DEGREES:
        for some, rounded in ((names, False), (rounding, True)):
            for name, *errors in zip(some, *run_ranks(_errors, degree, some, rounded), strict=True):
                found[name][f"{degree}{ROUNDED * rounded}"] = float(f"{max(errors):.1e}")
    return found


def _errors(names: Sequence[str], rounded: bool) -> list[float]:
    torch.set_num_threads(1)
    return [_error(name, rounded) for name in names]


@torch.no_grad()
def _error(name: str, rounded: bool) -> float:
    cls = getattr(models, name)
    _, inputs = tiny_case(family_of(cls))
    whole = tiny_model(cls, SEED).eval()
    sharded = enable_parallelism(
        copy.deepcopy(whole), config=TensorParallelConfig(dist.get_world_size(), check=False)
    )
    with nullcontext() if rounded else exactly(whole):
        wanted, found = (_tensors(model(**copy.deepcopy(inputs))) for model in (whole, sharded))
    scale = max(tensor.abs().max().item() for tensor in wanted)
    return max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True)) / scale


def _tensors(output: Any) -> list[torch.Tensor]:
    return list(tensors_in(output.to_tuple() if hasattr(output, "to_tuple") else output))
