"""What the names in a block say: which of its Linears are an attention's, a feed-forward's or a modulation's.

Reads names, classes and sizes, and runs nothing. Each rule looks at one module and makes a claim: these modules
belong together, and are shared like this, or cannot be told how to share and stay whole. A rule would rather
say that it does not know: one Linear of an attention that it cannot place keeps the whole attention whole.

Claims are of one block; `plan.candidate` makes patterns of them, and has them judged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from shardwise.plan.heads import HEAD_COUNTS
from shardwise.plan.names.attentions import attention
from shardwise.plan.names.feed_forwards import feed_forward
from shardwise.plan.names.reading import Claim, Unclear, class_name, has_parameters, linear_at, words
from shardwise.plan.style import is_count
from shardwise.plan.subject import Outline

__all__ = ["RULES", "Claim", "Unclear", "attention", "claims", "feed_forward", "modulation", "rotary_tables"]


def claims(outline: Outline) -> Iterator[Claim]:
    """Yield what is claimed in the blocks of a model: no Linear twice, attentions first."""
    taken: set[str] = set()
    for rule in RULES:
        for path in filter(outline.in_a_block, outline.modules):
            claim = rule(outline, path)
            if claim is not None and taken.isdisjoint(claim.linears):
                taken |= set(claim.linears)
                yield claim


_MODULATIONS = {"mod", "modulation", "adaln", "film"}


def modulation(outline: Outline, path: str) -> Claim | None:
    """Claim a Linear of an adaptive norm or a modulation: it reads an embedding of the timestep, which is whole."""
    if linear_at(outline, path) is None:
        return None
    (inside,) = (path.removeprefix(f"{start}.") for start in outline.lists if path.startswith(f"{start}."))
    _, *parts = inside.split(".")
    owner = class_name(outline.modules[path.rpartition(".")[0]]) if len(parts) > 1 else ""
    if _MODULATIONS.isdisjoint(words(".".join(parts))) and not re.search("norm|modulat|film", owner):
        return None
    reason = "a modulation: it reads an embedding, which is whole"
    return Claim("modulation", path, (path,), {path: "rowwise_split_input"}, reason)


RULES: tuple[Callable[[Outline, str], Claim | None], ...] = (attention, feed_forward, modulation)
"""Each looks at one module by its path; the first that claims a Linear has it."""


def rotary_tables(outline: Outline) -> Iterator[tuple[str, int, bool]]:
    """Yield each module outside of the blocks that lays out a rotary table.

    As its path, over how many features the table is, and whether it may lay them out by heads: it counts them.
    """
    for path, module in outline.modules.items():
        own, by_name = vars(module), re.search("rotary|rope", class_name(module))
        if (
            by_name
            and is_count(own.get("dim"))
            and not outline.in_a_block(path)
            and not has_parameters(module)
        ):
            yield path, own["dim"], any(is_count(own.get(count)) for count in HEAD_COUNTS)
