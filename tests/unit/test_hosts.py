"""Ranks by machine: who becomes whose neighbour, and the line that says where neighbours are apart."""

from __future__ import annotations

import logging

import pytest

from shardwise.runtime import hosts
from shardwise.runtime.hosts import placed, tell_crossing


def crossings(order: list[int], names: str, block: int) -> int:
    """Return how many blocks of ranks lie across machines."""
    rows = [[names[rank] for rank in order[i : i + block]] for i in range(0, len(order), block)]
    return sum(len(set(row)) > 1 for row in rows)


@pytest.mark.parametrize(
    ("names", "block", "order", "across"),
    [
        ("aabb", 2, [0, 1, 2, 3], 0),
        ("abab", 2, [0, 2, 1, 3], 0),  # numbered round the machines
        ("abab", 1, [0, 2, 1, 3], 0),
        ("abab", 4, [0, 2, 1, 3], 1),  # cannot be otherwise
        ("aaabbbbc", 2, [0, 1, 3, 4, 5, 6, 2, 7], 1),  # 2 if ranks were only sorted
        ("abbbbbbc", 2, [0, 7, 1, 2, 3, 4, 5, 6], 1),  # rank 0 is first also where it is left over
        ("abcabcabcabc", 4, [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11], 0),
    ],
)
def test_blocks_lie_inside_machines_wherever_they_can(
    names: str, block: int, order: list[int], across: int
) -> None:
    found = placed(names, block)
    assert found == order
    assert sorted(found) == list(range(len(names)))
    assert crossings(found, names, block) == across


def test_ranks_in_their_own_order_would_lie_across() -> None:
    # The negative control of the test above.
    assert crossings([0, 1, 2, 3], "abab", 2) == 2


def test_ranks_across_machines_are_told_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "_told", set())
    with caplog.at_level(logging.WARNING):
        tell_crossing("tp", [["a", "1"], ["a", "1"]])
        assert not caplog.records
        for _ in range(2):
            tell_crossing("tp", [["a", "1"], ["a", "1"], ["a", "2"], ["b", "3"]])
    (record,) = caplog.records
    assert record.getMessage().startswith("tp=4 lies across 3 machines (a, a, b): each of its sums")
    assert "\n" not in record.getMessage()
