"""Numbers in a model's code that an attribute gives: divided where it must not be, the second pass finds it.

None of these faults changes the shape of a result, so nothing but the numbers and the values can tell.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise import DivideAttributes, PackedColwiseParallel
from shardwise.plan.check import CheckReport, check_plan
from shardwise.plan.resolve import resolve
from shardwise.runtime.shard import localized_twin, meta_twin

Use = Callable[[int, Tensor], Tensor]

PAIR = {"a": "colwise", "b": "rowwise"}


def grown(n: int, x: Tensor) -> Tensor:
    """Add n terms."""
    for _ in range(n):
        x = x + x.sin()
    return x


def written(x: Tensor, place: Any, value: float) -> Tensor:
    y = x.clone()
    y[place] = value
    return y


USES: dict[str, tuple[str, Use]] = {
    "an index": ("LocalSlice", lambda n, x: x + x[:, n, None]),
    "a selected index": ("LocalSlice", lambda n, x: x + x.select(1, n).unsqueeze(1)),
    "a start of one length": ("LocalSlice", lambda n, x: x + x[:, n : n + 1]),
    "a narrowed start": ("LocalSlice", lambda n, x: x + x.narrow(1, start=n, length=1)),
    "a place that is written": ("LocalSlice", lambda n, x: written(x, (slice(None), n), 0.0)),
    "a number that is written": ("LocalScalar", lambda n, x: written(x, (slice(None), 0), n)),
    "a roll": ("LocalScalar", lambda n, x: torch.roll(x, n, 1)),
    "a bound": ("LocalScalar", lambda n, x: (9 * x).clamp(max=n)),
    "a filler": ("LocalScalar", lambda n, x: x.masked_fill(x > 0, n)),
    "an exponent": ("LocalScalar", lambda n, x: x**n),
    "a remainder": ("LocalScalar", lambda n, x: (9 * x) % n),
    "a constant": ("LocalScalar", lambda n, x: x * torch.tensor([n])),
    "a filled constant": ("LocalScalar", lambda n, x: x * torch.full((7, 1), n)),
    "a later position": ("LocalScalar", lambda n, x: x + torch.arange(n, n + 7).sin()[:, None]),
    "a step": ("LocalScalar", lambda n, x: x + torch.arange(0, 7 * n, n).sin()[:, None]),
    "a table taken to the device": (
        "LocalScalar",
        lambda n, x: x * (n ** torch.linspace(0, 1, 7)).sin()[:, None].to(x.device),
    ),
    "a mask": ("LocalScalar", lambda n, x: x * (torch.arange(7) < n)[:, None]),
    "a band": ("LocalScalar", lambda n, x: x + torch.ones(7, 7).tril(n - 3).sum(0)[:, None]),
    "a number taken from a tensor": ("LocalScalar", lambda n, x: x * torch.arange(n, n + 1).item()),
    "terms that are moved": (
        "LocalValue",
        lambda n, x: x + torch.as_tensor(grown(n, torch.ones(7, 1)), device=x.device),
    ),
    "terms without weights": ("LocalValue", lambda n, x: x + grown(n, torch.ones(7, 1))),
}
"""What code may do with a number n: the kind of finding, and the code, for a tensor of (3, 7, features)."""

WHOLE_USES: dict[str, tuple[str, Use]] = {
    "an index of the features": ("LocalSlice", lambda n, x: x + x[..., n, None]),
    "a dim": ("LocalScalar", lambda n, x: x * x[:, :, None, None].softmax(n)[:, :, 0, 0]),
    "groups": ("LocalScalar", lambda n, x: F.group_norm(x.transpose(1, 2), n).transpose(1, 2)),
    "a padding": ("LocalScalar", lambda n, x: F.pad(x, (n, 8 - n))[..., 4:20]),
    "a window": ("LocalScalar", lambda n, x: F.avg_pool1d(x, 2 * n + 1, 1, n)),
}
"""What code may do where the features are whole."""

WEIGHT_USES: dict[str, tuple[str, Use]] = {
    "terms": ("TraceDiffers", grown),
    "a branch": ("TraceDiffers", lambda n, x: x.sin() if n > 2 else x.cos()),
}
"""What code may do with what it computed from weights; from inputs alone the values differ."""

CASES = {
    **{(where, use): kind_and_use for where in ("before", "between", "behind") for use, kind_and_use in USES.items()},
    **{(where, use): kind_and_use for where in ("before", "behind") for use, kind_and_use in WHOLE_USES.items()},
    **{(where, use): kind_and_use for where in ("between", "behind") for use, kind_and_use in WEIGHT_USES.items()},
}  # fmt: skip


class Numbered(nn.Module):
    """Two layers with a use of the number `n` before, between or behind them."""

    def __init__(self, where: str, use: Use, n: int = 4) -> None:
        super().__init__()
        self.n, self.where, self.use = n, where, use
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def at(self, where: str, x: Tensor) -> Tensor:
        return self.use(self.n, x) if where == self.where else x

    def forward(self, x: Tensor) -> Tensor:
        x = self.at("between", self.a(self.at("before", x)))
        return self.at("behind", self.b(F.gelu(x))).tanh()


def check_module(module: nn.Module, plan: dict[str, Any], **inputs: Tensor) -> CheckReport:
    twin = meta_twin(module)
    return check_plan(twin, resolve(twin, plan, 2), inputs or {"x": torch.randn(3, 7, 16)}, localized_twin)


def kinds(report: CheckReport) -> set[str]:
    return {finding.kind for finding in report.findings}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize(("where", "use"), CASES, ids=lambda value: value)
def test_number_of_an_attribute_that_must_not_be_divided_is_found(where: str, use: str) -> None:
    kind, code = CASES[where, use]
    model = Numbered(where, code)
    assert check_module(model, PAIR).ok

    divided, x = copy.deepcopy(model), torch.randn(3, 7, 16)
    divided.n //= 2
    before, after = model(x), divided(x)
    assert before.shape == after.shape  # silent ...
    assert (before - after).abs().max() > 1e-3  # ... and wrong

    report = check_module(model, PAIR | {"": DivideAttributes("n")})
    assert kinds(report) == {kind}, str(report)


UNUSED: dict[str, Use] = {
    "nothing": lambda n, x: x,
    "a constant that is thrown away": lambda n, x: x if torch.full((3,), n) is not None else -x,
    "the same values": lambda n, x: x * torch.ones(7, 1).clamp(max=n),
}


@pytest.mark.parametrize("use", UNUSED)
def test_number_without_weights_that_changes_no_value_is_not_reported(use: str) -> None:
    report = check_module(Numbered("before", UNUSED[use]), PAIR | {"": DivideAttributes("n")})
    assert report.ok, str(report)


class Positions(Numbered):
    """Returns positions as well, which no weight has met."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), torch.arange(self.n, self.n + 7)


def test_number_of_a_value_that_is_returned_as_it_is_is_found() -> None:
    model = Positions("before", UNUSED["nothing"])
    assert check_module(model, PAIR).ok
    assert kinds(check_module(model, PAIR | {"": DivideAttributes("n")})) == {"LocalValue"}


class Quarter(nn.Module):
    """Takes the second quarter of a packed projection, with a start of the whole width: on a rank it is the third."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.a(x)
        return self.b(F.gelu(fused[..., 16 : 16 + fused.shape[-1] // 4]))


def test_start_of_the_whole_width_is_found_where_its_slice_fits_a_rank() -> None:
    plan = {"a": PackedColwiseParallel([1, 1, 1, 1]), "b": "rowwise"}
    report = check_module(Quarter(), plan)
    assert kinds(report) == {"LocalSlice"}, str(report)
    assert "is 16 on a rank, the layouts say 8" in report.findings[0].message


class Noisy(nn.Module):
    """Adds noise of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(x + torch.randn(7, 16))))


def test_random_numbers_are_the_same_in_both_passes_and_go_on_as_without_a_check() -> None:
    model, x = Noisy(), torch.randn(3, 7, 16)
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    report = check_module(model, PAIR, x=x)
    assert report.ok, str(report)
    assert torch.equal(torch.randn(4), expected)


class Blank(nn.Module):
    """Fills what is missing with NaN, in a table that each forward makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(x + torch.full((7, 16), float("nan")).nan_to_num())))


def test_not_a_number_is_the_same_in_both_passes() -> None:
    report = check_module(Blank(), PAIR)
    assert report.ok, str(report)
