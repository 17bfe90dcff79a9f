"""`shardwise doctor`: the command's front end. It imports no torch, so that it can say why ranks do not start."""

from __future__ import annotations

import json
import socket
from datetime import timedelta
from typing import Any

import click
from rich.console import Console

from shardwise.doctor.checks import network_checks
from shardwise.doctor.network import RESOLVE_SECONDS, is_address, network
from shardwise.errors import RankFailure, ShardwiseError
from shardwise.launch import found, is_first, run_ranks
from shardwise.launch.found import Found
from shardwise.launch.machine import cuda_devices
from shardwise.launch.reach import addresses_of

WORKER = "shardwise.doctor.worker:examine"
PATIENCE = timedelta(seconds=15)


@click.command()
@click.option(
    "--tp",
    type=click.IntRange(min=1),
    help="Number of ranks; by default those there are, or one for each device, or two on CPUs.",
)
@click.option(
    "--model", metavar="FOLDER", help="A pipeline's folder, of which all machines should have equal copies."
)
@click.option(
    "--device", type=click.Choice(["cuda", "cpu"]), help="By default CUDA if each rank can have one."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def doctor(tp: int | None, model: str | None, device: str | None, as_json: bool) -> None:
    """Look at the machines that ranks are to run on, and at the way between them.

    By itself it starts ranks on this machine; under torchrun, srun or in pods of Kubernetes it looks at all of them.

    Exits 1 if something is wrong, 2 if the question is.
    """
    try:
        place = found()
        report = _unreachable(place) or _examined(place, tp, model, device)
    except ShardwiseError as error:
        click.echo(f"Error: {error}", err=True)
        raise SystemExit(2) from error
    wrong = any(check["problems"] for check in report["checks"])
    if is_first() or not report["ranks"]:
        _show(report, as_json)
    raise SystemExit(1 if wrong else 0)


def _unreachable(place: Found | None) -> dict[str, Any] | None:
    """Return a report if ranks of several machines would not find each other, which they could only wait for."""
    if place is None or place.local_count == place.count:
        return None
    problems = [
        problem for check in network_checks([network(place.index, [])], True) for problem in check.problems
    ]
    if place.index > 0 and not is_address(place.address):
        try:
            addresses_of(place.address, RESOLVE_SECONDS)
        except OSError as error:
            problems.append(
                f"{socket.gethostname()} (process {place.index} of {place.by}): the name {place.address} of the first "
                f"one's machine does not resolve ({error}): add it to /etc/hosts or to the DNS, or set MASTER_ADDR to "
                "its address"
            )
    return _report("network", problems) if problems else None


def _examined(place: Found | None, tp: int | None, model: str | None, device: str | None) -> dict[str, Any]:
    ranks = tp or _ranks(place, device)
    try:
        results = run_ranks(WORKER, ranks, model, device=device, timeout=PATIENCE, patience=PATIENCE)
    except RankFailure as error:
        return _report("ranks", [str(error)])
    report: dict[str, Any] = next(result for result in results if result is not None)
    return report


def _ranks(place: Found | None, device: str | None) -> int:
    """Return how many ranks there are, or could be."""
    devices = (cuda_devices() or 0) if device != "cpu" else 0
    if place is None:
        return devices or 2
    return place.count * (max(devices, 1) if place.may_divide else 1)


def _report(name: str, problems: list[str]) -> dict[str, Any]:
    """Return the report of a job whose ranks have not met."""
    return {
        "ranks": [],
        "checks": [{"name": name, "says": "", "problems": problems}],
        "links": [],
        "seconds": None,
    }


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(report, indent=1))
        return
    from shardwise.doctor.show import check_table, link_table

    console = Console(width=max(100, Console().width))
    console.print(check_table(report))
    if report["links"]:
        console.print(link_table(report))
