"""Uneven cuts, statically: every model class on a number of ranks that does not divide its heads."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from shardwise import check
from shardwise.models.lookup import tiny_case
from shardwise.plan.layout import Shard
from shardwise.plan.resolve import resolve
from tests.helpers import FAMILIES, family, tiny_skeleton

REFUSED = {
    # Its second attention reads what the first one leaves, by a layer that belongs to no heads of its own.
    "MotifVideoTransformer3DModel": "BlocksDiffer",
    # The features of its experts are not cut unevenly, and three does not divide them.
    "NucleusMoEImageTransformer2DModel": "IndivisibleBlock",
    # No head of it is shared, so there is nothing to share unevenly; its configuration has 8.
    "SanaWMTransformer3DModel": "IndivisibleHeads",
}
"""Classes that three ranks cannot share, and the finding that says why."""


@pytest.mark.parametrize("name", FAMILIES)
def test_E4_every_class_is_shared_by_three_ranks_or_refused_with_a_reason(name: str) -> None:
    _, inputs = tiny_case(family(name))
    report = check(tiny_skeleton(name), degree=3, example_inputs=inputs, uneven=True)
    kinds = [finding.kind for finding in report.findings]
    assert kinds[:1] == ([REFUSED[name]] if name in REFUSED else [])


class Block(nn.Module):
    """Four heads of six features, and a feed-forward."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attn = nn.Module()
        self.attn.heads = 4
        self.attn.to_q, self.attn.to_k, self.attn.to_v, self.attn.to_out = (
            nn.Linear(24, 24) for _ in range(4)
        )
        self.up, self.down = nn.Sequential(nn.Linear(24, hidden)), nn.Sequential(nn.Linear(hidden, 24))


PLAN: dict[str, Any] = {
    **{f"attn.to_{name}": "colwise" for name in "qkv"},
    "attn.to_out": "rowwise",
    "up.0": "colwise",
    "down.0": "rowwise",
}


def cuts(hidden: int, degree: int, uneven: bool = True) -> dict[str, Shard]:
    layouts = resolve(Block(hidden), PLAN, degree, uneven=uneven).layouts
    return {name: lay for name, lay in layouts.items() if isinstance(lay, Shard) and name.endswith("weight")}


def test_attention_is_cut_by_heads_and_a_feed_forward_evenly_if_it_can_be() -> None:
    found = cuts(hidden=96, degree=3)
    assert found["attn.to_q.weight"] == Shard(0, (24,), units=4)
    assert found["attn.to_out.weight"] == Shard(1, (24,), units=4)
    assert found["up.0.weight"] == Shard(0, (96,))
    assert found["down.0.weight"] == Shard(1, (96,))


@pytest.mark.parametrize(("hidden", "units"), [(10240, 160), (320, 40), (100, 25), (70, 35), (7, 7)])
def test_feed_forward_that_cannot_be_cut_evenly_is_cut_in_wide_pieces_of_which_each_rank_has_several(
    hidden: int, units: int
) -> None:
    found = cuts(hidden, degree=3)
    assert found["up.0.weight"] == Shard(0, (hidden,), units=units)
    assert found["down.0.weight"] == Shard(1, (hidden,), units=units)
    assert sum(found["up.0.weight"].local_size(rank, 3) for rank in range(3)) == hidden


def test_degree_that_divides_needs_no_units() -> None:
    assert cuts(hidden=96, degree=2) == cuts(hidden=96, degree=2, uneven=False)
