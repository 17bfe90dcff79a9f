"""JSON as it is written, where it may be wrong: objects whose names repeat, and text in place of any value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Raw:
    """Text that is written as it is."""

    text: str


@dataclass
class Object:
    """Names and values in order; a name may come twice, and be `Raw`."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    def get(self, name: str) -> Any:
        """Return the first value of a name, or None."""
        return next((value for key, value in self.pairs if key == name), None)


def written(value: Any, comma: str = ",", colon: str = ":") -> str:
    """Return a value as JSON."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, Object):
        inner = (written(name) + colon + written(item, comma, colon) for name, item in value.pairs)
        return "{" + comma.join(inner) + "}"
    if isinstance(value, list):
        return "[" + comma.join(written(item, comma, colon) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def containers(value: Any) -> Iterator[Object | list[Any]]:
    """Yield every object and list in a value, itself included."""
    if isinstance(value, Object):
        yield value
        for _, item in value.pairs:
            yield from containers(item)
    elif isinstance(value, list):
        yield value
        for item in value:
            yield from containers(item)
