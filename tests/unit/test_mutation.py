"""A sample of the wrong plans on record: the static check finds the harmful ones and passes the harmless ones.

What each of them really does was recorded on 2 and 4 ranks by `tools/mutation/truth.py`; `make mutation` holds
the check against the whole record.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tools.mutation.truth
from click.testing import CliRunner
from tools.mutation.cases import Case, case, case_names
from tools.mutation.mutants import Mutant
from tools.mutation.report import HARMFUL, verdict
from tools.mutation.truth import DEGREES, RECORD, all_mutants, main

PER_CASE = 8
"""Mutants drawn from each model and degree; the whole record has about 190."""


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


def test_mutants_of_a_model_have_names_of_their_own() -> None:
    for name in case_names():
        names = [mutant.name for mutant in built(name)[1]]
        assert len(names) == len(set(names))


def test_record_holds_silent_faults_of_every_model() -> None:
    for name in case_names():
        outcomes = [outcome for outcome, _ in truth()[name]["2"].values()]
        assert outcomes.count("wrong") >= 5
        assert outcomes.count("same") >= 5


@pytest.mark.parametrize("degree", DEGREES)
def test_record_holds_silent_and_harmless_ways_to_re_block_layers_of_every_model(degree: int) -> None:
    for name in case_names():
        record = truth()[name][str(degree)].items()
        outcomes = {outcome for mutant, (outcome, _) in record if mutant.startswith("re-blocked")}
        assert {"wrong", "same"} <= outcomes, name


def test_naming_a_case_records_it_and_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "truth.json"
    record.write_text(json.dumps({"Kept": {"2": {"a": ["same", 0.0]}}, "Anew": {"2": {"b": ["same", 0.0]}}}))
    monkeypatch.setattr(tools.mutation.truth, "RECORD", record)
    monkeypatch.setattr(tools.mutation.truth, "run_ranks", lambda *args: [{"c": ["wrong", 1.0]}])
    result = CliRunner().invoke(main, ["Anew"], catch_exceptions=False)
    assert result.exit_code == 0
    anew = {"c": ["wrong", 1.0]}
    assert json.loads(record.read_text()) == {
        "Kept": {"2": {"a": ["same", 0.0]}},
        "Anew": {"2": anew, "4": anew},
    }
