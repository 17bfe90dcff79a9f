"""docs/pipelines.md is what the constructors of diffusers' pipelines and the classes with a plan give today."""

from __future__ import annotations

from tools.pipeline_table import PAGE, fate, page, pipelines

from shardwise import models
from tests.whole_pipelines import SMALL, TESTED


def test_page_is_current() -> None:
    assert PAGE.read_text() == page()


def test_every_transformer_with_a_plan_that_some_pipeline_takes_is_listed_as_sharded() -> None:
    listed = {cls for _, parts in pipelines() for classes in parts.values() for cls in classes}
    taken = listed & set(models.FAMILIES)
    assert len(taken) > 50
    assert all(fate(cls) == "sharded" for cls in taken)


def test_components_of_a_tested_pipeline_are_those_that_are_sharded_in_it() -> None:
    found = dict(pipelines())
    assert found.keys() >= TESTED.keys()
    for name, (_, _, sharded) in SMALL.items():
        parts = {
            part for part, classes in found[name].items() if any(fate(cls) == "sharded" for cls in classes)
        }
        assert sorted(parts) == sharded
