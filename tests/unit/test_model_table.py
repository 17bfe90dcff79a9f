"""docs/models.md is what the plans of today and the recorded measurements give."""

from __future__ import annotations

import json

from tools.model_table.measure import ERRORS
from tools.model_table.table import PAGE, page

from shardwise import models
from tests import tolerances


def test_every_class_has_been_measured_and_is_within_the_bound() -> None:
    errors = json.loads(ERRORS.read_text())
    assert set(errors) == set(models.FAMILIES)
    assert all(
        0 < of_class[degree] < tolerances.FP32 for of_class in errors.values() for degree in ("2", "4")
    )


def test_page_is_current() -> None:
    assert PAGE.read_text() == page(json.loads(ERRORS.read_text()))
