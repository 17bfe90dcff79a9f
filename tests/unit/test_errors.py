"""The exceptions: what they derive from, how they read, and that they survive the way between processes."""

import builtins
import inspect
import pickle
import re
from dataclasses import FrozenInstanceError, replace

import pytest

from shardwise import errors
from shardwise.errors import Finding, PlanError, ShardwiseError

TREE = dict(re.findall(r"[├└]── (\w+)\s+\((\w+)\)", errors.__doc__ or ""))
"""Class name -> name of the built-in class it also is, as the module's docstring draws it."""

BLOCK = Finding("IndivisibleBlock", "blocks.0.ff", "block 3 of 5 has 10 rows", "use 1, 2", "blocks.*.ff")
TYPO = Finding("UnmatchedKey", "block.0", "matches no module", "did you mean 'blocks.0'?", "block.0")


def test_documented_tree_names_every_exception() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, ShardwiseError) and value is not ShardwiseError
    }
    assert set(TREE) == defined
    assert len(defined) >= 8


@pytest.mark.parametrize(("name", "builtin"), TREE.items())
def test_error_is_caught_as_shardwise_error_and_as_the_documented_builtin(name: str, builtin: str) -> None:
    cls = getattr(errors, name)
    assert issubclass(cls, ShardwiseError)
    assert issubclass(cls, getattr(builtins, builtin))


@pytest.mark.parametrize("name", sorted(set(TREE) - {"PlanError"}))
def test_error_keeps_class_and_message_through_pickle(name: str) -> None:
    error = getattr(errors, name)("what is wrong, and what would fix it")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (type(error), str(error))


def test_plan_error_keeps_its_findings_through_pickle() -> None:
    error = PlanError([BLOCK, TYPO], "Model at tp_degree 4", [1, 2])
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is PlanError
    assert (copy.findings, copy.subject, copy.degrees) == ((BLOCK, TYPO), "Model at tp_degree 4", (1, 2))
    assert str(copy) == str(error)


def test_finding_reads_as_place_fault_and_fix() -> None:
    assert str(BLOCK) == (
        'IndivisibleBlock: blocks.0.ff (plan key "blocks.*.ff")\n  block 3 of 5 has 10 rows\n  fix: use 1, 2'
    )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"count": 7}, 'IndivisibleBlock: blocks.0.ff (plan key "blocks.*.ff") x7'),
        ({"plan_key": None}, "IndivisibleBlock: blocks.0.ff"),
        ({"plan_key": ""}, 'IndivisibleBlock: blocks.0.ff (plan key "")'),
        ({"source": "model.py:12"}, "  model.py:12: block 3 of 5 has 10 rows"),
    ],
)
def test_finding_shows_what_is_known_and_nothing_else(change: dict[str, object], line: str) -> None:
    assert line in str(replace(BLOCK, **change)).splitlines()


def test_finding_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        BLOCK.message = "other"


@pytest.mark.parametrize(
    ("findings", "subject", "headline"),
    [
        ([TYPO], "Model", "1 problem in the tensor parallel plan of Model"),
        ([TYPO, BLOCK], "Model", "2 problems in the tensor parallel plan of Model"),
        ([TYPO], "", "1 problem in the tensor parallel plan"),
    ],
)
def test_plan_error_counts_its_findings_in_the_headline(
    findings: list[Finding], subject: str, headline: str
) -> None:
    assert str(PlanError(findings, subject)).splitlines()[0] == headline


def test_plan_error_shows_every_finding() -> None:
    text = str(PlanError(iter([TYPO, BLOCK]), "Model"))
    assert str(TYPO) in text
    assert str(BLOCK) in text


@pytest.mark.parametrize(
    ("findings", "degrees", "shown"),
    [([BLOCK], [1, 2], True), ([TYPO], [1, 2], False), ([BLOCK], None, False), ([BLOCK, TYPO], [1], True)],
)
def test_plan_error_lists_degrees_only_where_the_degree_is_at_fault(
    findings: list[Finding], degrees: list[int] | None, shown: bool
) -> None:
    last = str(PlanError(findings, "Model", degrees)).splitlines()[-1]
    assert last.startswith("degrees that fit the whole plan: 1") == shown
