"""Holds the static check against the record of what wrong plans really do, and prints the table of docs/check.md.

Exits 1 if a harmful mutant is missed, or a harmless one is reported.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import click
from tools.mutation.cases import Case, case, case_names
from tools.mutation.mutants import Mutant
from tools.mutation.truth import DEGREES, RECORD, all_mutants

from shardwise.errors import Finding, PlanError
from shardwise.plan.check import check_plan
from shardwise.plan.resolve import resolve
from shardwise.runtime.shard import localized_twin, meta_twin

HARMFUL = ("wrong", "raises", "refused")


@dataclass
class Tally:
    """What the check made of the mutants of a case."""

    outcomes: Counter[str] = field(default_factory=Counter)
    caught: int = 0
    at_the_place: int = 0
    missed: list[str] = field(default_factory=list)
    false_alarms: list[str] = field(default_factory=list)

    @property
    def harmful(self) -> int:
        """Mutants that change the numbers or raise."""
        return sum(self.outcomes[kind] for kind in HARMFUL)

    def add(self, other: Tally) -> None:
        """Count the mutants of another case too."""
        self.outcomes += other.outcomes
        self.caught += other.caught
        self.at_the_place += other.at_the_place
        self.missed += other.missed
        self.false_alarms += other.false_alarms

    def row(self, name: str, degree: int) -> str:
        """Return the line of the table."""
        silent, loud = self.outcomes["wrong"], self.outcomes["raises"] + self.outcomes["refused"]
        return (
            f"| {name} | {degree} | {self.outcomes.total()} | {self.harmful} ({silent}/{loud}) | {self.caught} "
            f"| {self.at_the_place} | {len(self.missed)} | {len(self.false_alarms)} |"
        )


def verdict(of: Case, mutant: Mutant, degree: int) -> tuple[Finding, ...]:
    """Return what resolving and checking a mutant finds."""
    try:
        resolved = resolve(of.model, mutant.plan, degree)
    except PlanError as error:
        return error.findings
    return check_plan(meta_twin(of.model), resolved, of.inputs, localized_twin).findings


def names_the_place(mutant: Mutant, findings: tuple[Finding, ...]) -> bool:
    """Return whether a finding is in the mutated module or its owner, or names it."""
    targets = [part.rpartition(".")[0] or part for part in mutant.target.split(" + ")]
    for finding in findings:
        text = f"{finding.module} {finding.plan_key} {finding.message} {finding.fix}"
        blockless = ".".join("*" if part.isdigit() else part for part in text.split("."))
        if any(target in text or target in blockless for target in targets):
            return True
    return False


def tally(name: str, degree: int, truth: dict[str, list[object]]) -> Tally:
    """Check every recorded mutant of a case."""
    of, result = case(name), Tally()
    for mutant in all_mutants(of):
        outcome = str(truth[mutant.name][0])
        findings = verdict(of, mutant, degree)
        result.outcomes[outcome] += 1
        if outcome in HARMFUL:
            result.caught += bool(findings)
            result.at_the_place += names_the_place(mutant, findings)
            if not findings:
                result.missed.append(mutant.name)
        elif findings:
            result.false_alarms.append(f"{mutant.name}: {findings[0].kind} at {findings[0].module}")
    return result


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
def main(names: tuple[str, ...]) -> None:
    record = json.loads(RECORD.read_text())
    sums = {degree: Tally() for degree in DEGREES}
    click.echo(
        "| model | ranks | mutants | harmful (silent/raising) | caught | at the place | missed | false alarms |"
    )
    click.echo("|---|---|---|---|---|---|---|---|")
    for name in names or case_names():
        for degree in DEGREES:
            start = time.perf_counter()
            t = tally(name, degree, record[name][str(degree)])
            sums[degree].add(t)
            click.echo(t.row(name, degree))
            for line in [*(f"missed: {m}" for m in t.missed), *(f"false alarm: {m}" for m in t.false_alarms)]:
                click.echo(line, err=True)
            click.echo(f"{name} at {degree}: {time.perf_counter() - start:.0f} s", err=True)
    for degree, t in sums.items():
        click.echo(t.row("all", degree))
    sys.exit(1 if any(t.missed or t.false_alarms for t in sums.values()) else 0)


if __name__ == "__main__":
    main()
