"""What each rank last said of itself, where the others can read it without waiting."""

from __future__ import annotations

from typing import Any

from shardwise.runtime.group import TensorParallelGroup


class Board:
    """Notes of the ranks of a group, by topic, in the group's store: no collective, and no rank waits for another."""

    def __init__(self, group: TensorParallelGroup) -> None:
        self._store = group.words.store
        self._rank, self._ranks = group.rank, group.degree

    def post(self, topic: str, value: Any) -> None:
        """Replace this rank's note on a topic; it must be plain data that JSON can write."""
        self._store.post(f"board/{topic}/{self._rank}", value)

    def read(self, topic: str) -> list[Any]:
        """Return the last note of each rank on a topic, in rank order, None where there is none yet."""
        return [self._store.glance(f"board/{topic}/{rank}") for rank in range(self._ranks)]
