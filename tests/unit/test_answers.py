"""What a forward without weights is told where its code asks for values: a router's counts, a listed constant."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise import check
from shardwise.plan.answers import Answers


def chosen(tokens: int, experts: int, top: int) -> tuple[Answers, Tensor]:
    """Return answers, and the experts that were chosen for each token, viewed as one row."""
    answers, scores = Answers(), torch.empty(tokens, experts, device="meta")
    output = torch.topk(scores, top, dim=-1)
    answers.note("topk", (scores, top), {"dim": -1}, output)
    flat = output.indices.view(-1)
    answers.note("view", (output.indices, -1), {}, flat)
    return answers, flat


def test_tokens_are_spread_evenly_over_the_experts_that_topk_chose_from() -> None:
    answers, flat = chosen(7, 4, 2)
    assert answers.answer("bincount", (flat,)).tolist() == [4, 4, 3, 3]


def test_constant_is_listed_as_it_was_filled() -> None:
    answers, counts = Answers(), torch.full((2, 3), 5, device="meta")
    answers.note("full", ((2, 3), 5), {}, counts)
    assert answers.answer("tolist", (counts,)) == [[5, 5, 5], [5, 5, 5]]


def test_nothing_is_answered_for_values_that_are_there_or_that_nothing_is_known_of() -> None:
    answers, flat = chosen(7, 4, 2)
    assert answers.answer("bincount", (flat.clone(),)) is None
    assert answers.answer("bincount", (torch.tensor([0, 2]),)) is None
    assert answers.answer("tolist", (flat,)) is None
    assert answers.answer("view", (flat, -1)) is None


class Routed(nn.Module):
    """Each token is sent through one of three experts, in the order of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, 8)
        chosen = self.gate(rows).topk(1, dim=-1).indices.view(-1)
        order, counts = chosen.argsort(), chosen.bincount()
        parts = rows[order].split(counts.cpu().tolist())
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)]).view(
            x.shape
        )


INPUTS = {"x": torch.ones(3, 7, 8)}


def test_every_expert_is_checked() -> None:
    plan = {f"experts.{i}.{j}": style for i in range(3) for j, style in enumerate(("colwise", "rowwise"))}
    report = check(Routed(), plan, example_inputs=INPUTS)
    assert report.ok, str(report)
    assert report.all_reduces == 3
    for i in range(3):
        wrong = {key: style for key, style in plan.items() if key != f"experts.{i}.1"}
        (finding,) = check(Routed(), wrong, example_inputs=INPUTS).findings
        assert finding.module == f"experts.{i}.1"
