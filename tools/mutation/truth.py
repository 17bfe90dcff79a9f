"""Records what each wrong plan really does: the same numbers, wrong ones without an error, or an error.

Every mutant is run on 2 and on 4 ranks against one process, with shardwise's own guards taken away, since the
question is what would happen without them. The record is `tests/data/mutation_truth.json`; naming cases records
those alone, and leaves the others as they are.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
import torch.distributed as dist
from tools.mutation.cases import Case, case, case_names
from tools.mutation.mutants import Mutant, mutants, pairs

from shardwise import TensorParallelConfig
from shardwise.errors import PlanError
from shardwise.launch import run_ranks
from shardwise.plan import heads
from shardwise.plan.resolve import resolve
from shardwise.plan.rules import tensors_in
from shardwise.plan.styles import LinearStyle
from shardwise.runtime.group import TensorParallelGroup
from shardwise.runtime.shard import assign, global_shapes, local_slice, localize

RECORD = Path(__file__).parents[2] / "tests" / "data" / "mutation_truth.json"
DEGREES = (2, 4)
PAIRS = 40
SAME = 1e-4
"""Largest difference, relative to the largest output, that counts as the same numbers; a fault is far above it."""

SEVERITY = ["same", "wrong", "raises", "refused"]


def all_mutants(of: Case) -> list[Mutant]:
    """Return the single faults of a case and some pairs of them."""
    singles = mutants(of.model, of.plan)
    return singles + pairs(singles, of.plan, PAIRS)


@contextmanager
def guards_off() -> Iterator[None]:
    """Let plans through that resolving would refuse for what it knows of heads and declared blocks."""
    with (
        mock.patch.object(heads, "faults", return_value=()),
        mock.patch.object(heads, "indivisible", return_value=()),
        mock.patch.object(LinearStyle, "_check_declared"),
    ):
        yield


def outcomes(name: str) -> dict[str, list[Any]]:
    """Run all mutants of a case on the ranks of the process group; return name -> [outcome, error]."""
    torch.set_num_threads(1)
    of = case(name)
    with torch.no_grad():
        reference = _tensors(of.model(**copy.deepcopy(of.inputs)))
    found = {}
    for mutant in all_mutants(of):
        outcome, error = _run(of, mutant, reference)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, outcome)
        found[mutant.name] = [max(everyone, key=SEVERITY.index), error]
    return found


@torch.no_grad()
def _run(of: Case, mutant: Mutant, reference: list[torch.Tensor]) -> tuple[str, float]:
    try:
        with guards_off():
            model = _sharded(of.model, mutant)
    except PlanError:
        return "refused", -1.0
    try:
        results = _tensors(model(**copy.deepcopy(of.inputs)))
    except Exception:
        return "raises", -1.0
    scale = max(r.abs().max().item() for r in reference)
    if [r.shape for r in results] != [r.shape for r in reference]:
        return "wrong", float("inf")
    error = max((a - b).abs().max().item() for a, b in zip(results, reference, strict=True)) / scale
    return ("same" if error <= SAME else "wrong"), round(error, 7)


def _sharded(model: torch.nn.Module, mutant: Mutant) -> torch.nn.Module:
    """Return this rank's part of a model: every rank has all of it, so that nothing is sent to get there."""
    config = TensorParallelConfig(tp_degree=dist.get_world_size())
    group = TensorParallelGroup.of(config)
    plan = resolve(model, mutant.plan, group.degree)
    own = copy.deepcopy(model)
    shapes = global_shapes(own)
    parameters = own.named_parameters(remove_duplicate=False)
    local = {n: local_slice(p.detach(), plan.layout(n), group.rank, group.degree) for n, p in parameters}
    assign(own, {name: torch.nn.Parameter(tensor) for name, tensor in local.items()})
    localize(own, config, plan, group, shapes)
    return own


def _tensors(output: Any) -> list[torch.Tensor]:
    return list(tensors_in(output.to_tuple() if hasattr(output, "to_tuple") else output))


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
def main(names: tuple[str, ...]) -> None:
    for name in names or case_names():
        for degree in DEGREES:
            found = run_ranks(outcomes, degree, name)[0]
            counts = {kind: sum(outcome == kind for outcome, _ in found.values()) for kind in SEVERITY}
            click.echo(f"{name} at {degree} ranks: {len(found)} mutants, {counts}")
            _record(name, degree, found)


def _record(name: str, degree: int, found: dict[str, list[Any]]) -> None:
    """Put the outcomes of one case in place of those on record; the file is read now, as others may have written."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record.setdefault(name, {})[str(degree)] = found
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
