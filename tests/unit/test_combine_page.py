"""docs/combine.md is what has been measured, and that is within the bounds."""

from __future__ import annotations

import copy

from tools.combine.page import PAGE, page, record

from tests import tolerances
from tests.combine import CELLS, FAMILIES


def test_page_is_current() -> None:
    assert PAGE.read_text() == page(record())


def test_every_cell_was_measured_and_is_within_the_bound() -> None:
    found = record()
    assert list(found) == list(CELLS)
    for what, classes in found.items():
        assert list(classes) == FAMILIES
        for degrees in classes.values():
            assert set(degrees) == {"2", "4"}
            for error in degrees.values():
                bound = tolerances.QUANTIZED_RATIO * error["alone"] if "int8" in what else tolerances.FP32
                assert error.get("sharded", 0.0) < bound


def test_page_follows_the_figures() -> None:
    found = copy.deepcopy(record())
    found["LoRA"][FAMILIES[0]]["2"]["sharded"] = 0.123
    assert "1.2e-01" in page(found)
    assert page(found) != PAGE.read_text()
