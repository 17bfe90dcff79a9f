"""Which part of a batch a rank computes, and how it becomes the whole again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.errors import UnsupportedState
from shardwise.runtime.batches import Outputs, Share, distance, rounding
from shardwise.runtime.branches import signature_of

SECOND: Any = SimpleNamespace(rank=1, degree=2)
X = torch.arange(8.0).view(4, 2)


@pytest.mark.parametrize(
    ("args", "kwargs", "share"),
    [
        ([X], {}, Share(4, 2, 2)),
        ([], {"hidden_states": X[:2], "timestep": X}, Share(2, 1, 1)),
        ([[X[0], X[1]]], {}, Share(2, 1, 1)),
        ([X[:3]], {}, None),
        ([torch.tensor(1.0)], {}, None),
        ([3], {"x": X}, None),
        ([], {}, None),
    ],
)
def test_share_of_a_batch_follows_from_the_first_argument(
    args: Any, kwargs: Any, share: Share | None
) -> None:
    assert Share.of(args, kwargs, SECOND) == share


def test_share_is_cut_from_all_that_has_an_entry_for_each_sample() -> None:
    share = Share(4, 2, 2)
    table = torch.ones(5, 2)
    cut = share.cut(
        {"x": X, "pair": (X, table), "none": None, "shapes": [(1, 2)] * 4, "deep": [{"y": X[:, 0]}]}
    )
    assert torch.equal(cut["x"], X[2:])
    assert torch.equal(cut["pair"][0], X[2:])
    assert cut["pair"][1] is table
    assert cut["none"] is None
    assert torch.equal(cut["deep"][0]["y"], X[2:, 0])
    samples = [torch.ones(3)] * 4
    assert len(share.cut(samples)) == 2
    assert [len(x) for x in share.cut([X, X, X, X])] == [2] * 4


def test_parts_that_do_not_make_the_whole_are_refused() -> None:
    share = Share(4, 2, 2)
    assert [len(part) for part in share.parts((X[2:],), Outputs.of((X,)))] == [2]
    assert len(share.parts([X[0], X[1]], Outputs.of([X[0]] * 4))) == 2
    for parts, whole in (
        ((X,), (X,)),
        ((X[2:],), (torch.ones(3, 2),)),
        ((X[2:],), (X, X)),
        ([X[0]], [X[0]] * 4),
    ):
        with pytest.raises(UnsupportedState, match="for a part of the batch it returns"):
            share.parts(parts, Outputs.of(whole))


def test_outputs_are_built_with_what_is_no_tensor() -> None:
    outputs = Outputs.of({"sample": X, "other": (None, 3)})
    assert str(outputs) == "float32 [4, 2]"
    built = outputs.build([X + 1])
    assert torch.equal(built["sample"], X + 1)
    assert built["other"] == (None, 3)
    assert [tensor.shape for tensor in outputs.empty()] == [X.shape]
    with pytest.raises(
        UnsupportedState, match=r"returned float32 \[2, 2\] .* it returned float32 \[4, 2\] before"
    ):
        outputs.tensors({"sample": X[:2], "other": (None, 3)})


def test_distance_is_relative_to_what_is_expected() -> None:
    assert distance([X * 1.5, X], [X, X]) == pytest.approx(0.5)
    assert rounding([X]) == 1e-4
    assert rounding([X.bfloat16()]) == 8 * torch.finfo(torch.bfloat16).eps


def test_calls_are_of_one_kind_if_their_shapes_and_options_are() -> None:
    kind = signature_of([X], {"flag": True, "scale": 1.0, "data": object()})
    assert kind == signature_of([X + 1], {"flag": True, "scale": 2.0, "data": object()})
    for args, kwargs in (([X[:2]], {}), ([X.double()], {}), ([X], {"flag": False}), ([X], {"text": X})):
        assert kind != signature_of(args, {"flag": True, "scale": 1.0, "data": object()} | kwargs)
