"""A sample of the wrong plans on record: the static check finds the harmful ones and passes the harmless ones.

What each of them really does was recorded on 2 and 4 ranks by `tools/mutation/truth.py`; `make mutation` holds
the check against the whole record.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import groupby
from random import Random
from typing import Any

import pytest
from tools.mutation.cases import Case, case, case_names
from tools.mutation.mutants import Mutant
from tools.mutation.report import HARMFUL, verdict
from tools.mutation.truth import DEGREES, RECORD, all_mutants

PER_CASE = 8
"""Mutants drawn from each model and degree; the whole record has about 150."""


@cache
def truth() -> dict[str, dict[str, dict[str, list[Any]]]]:
    return json.loads(RECORD.read_text())


@cache
def built(name: str) -> tuple[Case, tuple[Mutant, ...]]:
    of = case(name)
    return of, tuple(all_mutants(of))


def sample(name: str, degree: int) -> list[Mutant]:
    """Draw mutants so that rare outcomes are there: half harmful and silent, the rest of the other outcomes."""
    record = truth()[name][str(degree)]
    rng = Random(f"{name} {degree}")
    by_outcome = sorted(built(name)[1], key=lambda m: record[m.name][0])
    drawn: list[Mutant] = []
    for outcome, group in groupby(by_outcome, key=lambda m: record[m.name][0]):
        share = {"wrong": PER_CASE // 2, "same": PER_CASE // 4}.get(outcome, PER_CASE // 4)
        found = list(group)
        drawn += rng.sample(found, min(share, len(found)))
    return drawn


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("name", case_names())
def test_harmful_plans_are_found_and_harmless_ones_pass(name: str, degree: int) -> None:
    of, _ = built(name)
    for mutant in sample(name, degree):
        outcome, error = truth()[name][str(degree)][mutant.name]
        findings = verdict(of, mutant, degree)
        if outcome in HARMFUL:
            assert findings, f"missed: {mutant.name} ({outcome}, error {error})"
        else:
            assert not findings, f"false alarm: {mutant.name}: {findings[0]}"


def test_record_is_of_the_mutants_that_the_plans_have_today() -> None:
    for name in case_names():
        names = {mutant.name for mutant in built(name)[1]}
        for degree in DEGREES:
            assert truth()[name][str(degree)].keys() == names


def test_record_holds_silent_faults_of_every_model() -> None:
    for name in case_names():
        outcomes = [outcome for outcome, _ in truth()[name]["2"].values()]
        assert outcomes.count("wrong") >= 5
        assert outcomes.count("same") >= 5
