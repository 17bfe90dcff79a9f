"""What each rank last said of itself, where the others can read it without waiting."""

from __future__ import annotations

import json
from typing import Any

from shardwise.runtime.group import TensorParallelGroup


class Board:
    """Notes of the ranks of a group, by topic, in the group's store: no collective, and no rank waits for another."""

    def __init__(self, group: TensorParallelGroup) -> None:
        self._store = group.process_group.get_group_store()
        self._rank, self._ranks = group.rank, group.degree

    def post(self, topic: str, value: Any) -> None:
        """Replace this rank's note on a topic; it must be plain data that JSON can write."""
        self._store.set(self._key(topic, self._rank), json.dumps(value))

    def read(self, topic: str) -> list[Any]:
        """Return the last note of each rank on a topic, in rank order, None where there is none yet."""
        keys = [self._key(topic, rank) for rank in range(self._ranks)]
        return [json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys]

    def _key(self, topic: str, rank: int) -> str:
        return f"shardwise/board/{topic}/{rank}"
