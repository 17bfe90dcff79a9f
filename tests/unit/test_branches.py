"""The static check on every optional branch of the shipped families."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from shardwise import DivideAttributes
from shardwise.models.lookup import tiny_case
from shardwise.plan.check import CheckReport, check_plan
from shardwise.plan.resolve import resolve
from shardwise.runtime.shard import localized_twin, meta_twin
from tests import tolerances
from tests.branches import BRANCHES, FLUX, FLUX2, SD3, UNFOLLOWED, ZIMAGE, Branch
from tests.helpers import FAMILIES, family, outputs, plainly, relative_error, tiny_model, variants


def checked(branch: Branch, wrong: dict[str, Any] | None = None, **inputs: Any) -> CheckReport:
    """Check the family's plan, with `wrong` entries in it, on a branch."""
    model = branch.model()
    twin = meta_twin(model)
    resolved = resolve(twin, branch.plan(model) | (wrong or {}), 2)
    return check_plan(twin, resolved, branch.arguments(model) | inputs, localized_twin)


@cache
def usual_calls(name: str) -> tuple[int, int]:
    """Return how many calls a family makes on its example inputs, and how many of them on shards."""
    report = checked(Branch(name))
    return report.calls, report.sharded_calls


def makes_other_numbers(branch: Branch) -> bool:
    model = branch.model()
    branch_outputs, usual = outputs(model, branch.arguments(model)), outputs(model, branch.known(model))
    return relative_error(branch_outputs, usual) > tolerances.MISTAKE


@pytest.mark.parametrize("name", BRANCHES)
def test_optional_branch_is_right_and_is_not_the_usual_one(name: str) -> None:
    branch = BRANCHES[name]
    report = checked(branch)
    assert report.ok, str(report)
    same_calls = (report.calls, report.sharded_calls) == usual_calls(branch.name)
    assert not same_calls or makes_other_numbers(branch)


@pytest.mark.parametrize("name", UNFOLLOWED)
def test_branch_that_is_not_followed_is_taken_for_wrong(name: str) -> None:
    assert checked(UNFOLLOWED[name]).findings  # otherwise it belongs to the others


@pytest.mark.parametrize("name", FAMILIES)
def test_output_that_is_a_tuple_is_right(name: str) -> None:
    branch = Branch(name)
    report = checked(branch, **plainly(branch.model()))
    assert report.ok, str(report)


@pytest.mark.parametrize(("name", "variant"), variants())
def test_other_configurations_of_a_class_are_right(name: str, variant: str) -> None:
    config, inputs = tiny_case(family(name), variant)
    report = checked(Branch(name, lambda known: inputs, config))
    assert report.ok, str(report)


# --- negative controls: what is wrong in a branch only is found on the branch, and only there ---------------------

EDIT = {"siglip_feat_dim": 28}

WRONG: dict[str, tuple[Branch, Branch, dict[str, Any], str]] = {
    # Only the adapter's code reads the head count; what else there is splits by the width of a head.
    "heads that an adapter reads": (
        BRANCHES["flux with two IP adapters"],
        Branch(FLUX),
        {"transformer_blocks.*.attn": DivideAttributes()},
        "transformer_blocks.0.attn",
    ),
    "projection of an adapter's image": (
        BRANCHES["sd3 with an IP adapter"],
        BRANCHES["sd3 with an IP adapter and no image"],
        {"image_proj.proj_in": "colwise"},
        "image_proj",
    ),
    "keys of an adapter": (
        BRANCHES["sd3 with an IP adapter"],
        BRANCHES["sd3 with an IP adapter and no image"],
        {"transformer_blocks.1.attn.processor.to_k_ip": "rowwise_split_input"},
        "transformer_blocks.1.attn",
    ),
    "embedder of guidance": (
        Branch(FLUX2),
        BRANCHES["flux2 with guidance left out"],
        {"time_guidance_embed.guidance_embedder.linear_1": "colwise"},
        "time_guidance_embed.guidance_embedder",
    ),
    "refiner of image features": (
        Branch(ZIMAGE, config=EDIT),
        BRANCHES["z-image edit without features"],
        {"siglip_refiner.*.feed_forward.w3": "rowwise_split_input"},
        "siglip_refiner.0.feed_forward",
    ),
}
"""A fault: the branch that shows it, one that does not, the wrong entries, and where it is found."""


@pytest.mark.parametrize("fault", WRONG)
def test_plan_that_is_wrong_in_one_branch_is_found_on_that_branch(fault: str) -> None:
    shows, hides, entries, place = WRONG[fault]
    report = checked(shows, entries)
    assert report.wrong
    assert place in str(report)
    assert checked(hides, entries).ok


def test_adapter_whose_output_is_not_put_together_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.plan import adapters

    plain = {name: adapters._Adapter(kind.per_head) for name, kind in adapters._KNOWN.items()}
    monkeypatch.setattr(adapters, "_KNOWN", plain)
    report = checked(BRANCHES["flux with an IP adapter"])
    assert {finding.kind for finding in report.wrong} == {"LayoutMismatch"}
    assert "transformer_flux.py" in str(report)
    assert checked(
        BRANCHES["sd3 with an IP adapter"]
    ).ok  # whose output goes through the attention's projection


def test_example_inputs_of_a_model_with_adapters_hold_an_image_for_each() -> None:
    for name, branch in ((FLUX, "flux with two IP adapters"), (SD3, "sd3 with an IP adapter")):
        known = BRANCHES[branch].known(BRANCHES[branch].model())
        images = known["joint_attention_kwargs"]["ip_adapter_image_embeds"]
        assert len(images) == (2 if name == FLUX else 3)  # a list of two, a batch of three
        assert "joint_attention_kwargs" not in Branch(name).known(tiny_model(name))
