"""Plans as JSON files: read, written, and refused with every fault at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from diffusers import Flux2Transformer2DModel as Stock

from shardwise import (
    DivideAttributes,
    IfPresent,
    PackedColwiseParallel,
    PackedRowwiseParallel,
    SliceOutput,
    SliceParameter,
)
from shardwise.errors import PlanError
from shardwise.plan.files import read_plan, write_plan
from shardwise.plan.styles import ColwiseParallel, as_style

PLAN = {
    "blocks.*.to_q": "colwise",
    "blocks.*.norm": "across_head_norm",
    "blocks.*.up": PackedColwiseParallel([1, 1]),
    "blocks.*.qkv": PackedColwiseParallel(),
    "blocks.*.gate": SliceParameter("table", -1),
    "blocks.*.down": PackedRowwiseParallel([1, 3]),
    "blocks.*.attn": DivideAttributes("heads", "inner_dim"),
    "blocks.*.none": DivideAttributes(),
    "rope": SliceOutput(2),
    "blocks.*.add_k": IfPresent("colwise"),
    "blocks.*.add_up": IfPresent(PackedColwiseParallel([1, 1])),
}


def read(folder: Path, text: str) -> dict[str, object]:
    (folder / "plan.json").write_text(text)
    return read_plan(folder / "plan.json")


def test_written_plan_reads_back_as_the_same(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == PLAN


def test_styles_and_markers_of_diffusers_are_written_as_what_they_mean(tmp_path: Path) -> None:
    plan = {"to_q": ColwiseParallel(), **Stock._tp_plan}
    write_plan(plan, tmp_path / "plan.json")
    found = read_plan(tmp_path / "plan.json")
    assert found["to_q"] == "colwise"
    assert {key: as_style(value) for key, value in found.items()} == {k: as_style(v) for k, v in plan.items()}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('"sideways"', "'sideways' is not the name of a style"),
        ("3", "3 is neither a name nor an object"),
        ("null", "neither"),
        ('{"blocks": [1, 1]}', "neither"),
        ('{"style": "Style"}', "'Style' is not the name"),
        ('{"style": "_Packed"}', "not the name"),
        ('{"style": "Path"}', "not the name"),
        ('{"style": "as_style"}', "not the name"),
        ('{"style": "PackedColwiseParallel", "block": [1]}', "block"),
        ('{"style": "PackedColwiseParallel", "blocks": [0, 1]}', "positive"),
        ('{"style": "PackedColwiseParallel", "blocks": "11"}', "blocks"),
        ('{"style": "DivideAttributes", "names": "heads"}', "names is a list"),
    ],
)
def test_entry_that_means_nothing_is_a_finding_with_its_key(tmp_path: Path, entry: str, message: str) -> None:
    with pytest.raises(PlanError, match="1 problem") as caught:
        read(tmp_path, f'{{"to_q": "colwise", "up": {entry}}}')
    (finding,) = caught.value.findings
    assert (finding.kind, finding.plan_key) == ("UnknownStyle", "up")
    assert message in finding.message


def test_all_faults_come_at_once(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="2 problems"):
        read(tmp_path, '{"a": "x", "b": "colwise", "c": 1}')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ('["colwise"]', "holds a list"),
        ('{"a": "colwise", "a": "rowwise"}', "'a' is there twice"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_file_that_is_no_plan_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        read(tmp_path, text)
    assert caught.value.findings[0].kind == "NotAPlan"


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        read_plan(tmp_path / "none.json")


def test_blocks_that_are_a_function_cannot_be_written(tmp_path: Path) -> None:
    plan = {"up": PackedColwiseParallel(lambda linear: [1, 1]), "down": 3, "to_q": "colwise"}
    with pytest.raises(PlanError, match="2 problems") as caught:
        write_plan(plan, tmp_path / "plan.json")
    assert [finding.plan_key for finding in caught.value.findings] == ["up", "down"]
    assert not (tmp_path / "plan.json").exists()
