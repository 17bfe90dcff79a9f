"""docs/performance.md is what the committed figures give."""

from __future__ import annotations

import copy

from tools.performance.page import PAGE, page, results


def test_page_is_current() -> None:
    assert PAGE.read_text() == page(results())


def test_page_follows_the_figures() -> None:
    found = copy.deepcopy(results())
    found["load-2-ranks"]["variants"]["shardwise"]["wall_s"] = 1234.5
    assert page(found) != PAGE.read_text()
    assert "1234.50" in page(found)


def test_figures_say_when_and_on_what_they_were_measured() -> None:
    found = results()
    assert set(found) == {
        "load-2-ranks",
        "load-2-ranks-modulations-whole",
        "load-4-ranks",
        "step-2-ranks",
    }
    for figures in found.values():
        assert figures["date"]
        assert figures["versions"]["diffusers"]
        assert figures["hardware"]["cores"] > 0


def test_loads_were_of_real_shapes() -> None:
    loads = [figures for name, figures in results().items() if name.startswith("load")]
    assert all(figures["checkpoint"]["real_shapes"] for figures in loads)
