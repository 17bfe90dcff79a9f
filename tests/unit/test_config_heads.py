"""A head count that a model reads from its configuration in the forward: divided on a rank, and not saved."""

from __future__ import annotations

import pytest

from shardwise import DivideAttributes
from shardwise.errors import PlanError, UnsupportedOperation
from shardwise.models.families.prior import PLAN
from shardwise.plan.check import check_plan
from shardwise.plan.resolve import resolve
from shardwise.plan.styles import StyleFault
from shardwise.runtime.shard import localized_twin, meta_twin
from tests.helpers import tiny_inputs, tiny_model

PRIOR = "PriorTransformer"
ENTRY = "config.num_attention_heads"


@pytest.mark.parametrize("degree", [2, 4])
def test_entry_of_the_configuration_is_divided_on_a_rank_and_whole_on_the_model(degree: int) -> None:
    model = tiny_model(PRIOR)
    local, _ = localized_twin(model, resolve(model, PLAN, degree))
    assert (local.config.num_attention_heads, model.config.num_attention_heads) == (4 // degree, 4)
    assert local.config.num_layers == model.config.num_layers


def test_configuration_of_a_rank_is_not_saved() -> None:
    model = tiny_model(PRIOR)
    local, _ = localized_twin(model, resolve(model, PLAN, 2))
    with pytest.raises(UnsupportedOperation, match="num_attention_heads"):
        local.save_config("nowhere")


def test_entry_that_is_missing_or_no_number_is_refused() -> None:
    for name in ("config.heads", "config.added_emb_type"):
        with pytest.raises(StyleFault, match=name):
            DivideAttributes(name).layouts(tiny_model(PRIOR))


def test_E4_entry_that_the_degree_does_not_divide_is_refused() -> None:
    with pytest.raises(PlanError, match=ENTRY):
        resolve(tiny_model(PRIOR, num_attention_heads=6), PLAN, 4)


def test_mask_repeated_for_all_heads_is_found_where_the_entry_is_not_divided() -> None:
    model = meta_twin(tiny_model(PRIOR))
    plan = {key: style for key, style in PLAN.items() if key}
    report = check_plan(model, resolve(model, plan, 2), tiny_inputs(PRIOR), localized_twin)
    assert [finding.module for finding in report.wrong] == ["transformer_blocks.0.attn1"]
    unmasked = tiny_inputs(PRIOR) | {"attention_mask": None}
    assert check_plan(model, resolve(model, plan, 2), unmasked, localized_twin).ok
