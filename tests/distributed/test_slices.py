"""What a module is given is cut: each rank works on its slice of tensors that the caller has whole."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import SliceInput, TensorParallelConfig, enable_parallelism
from shardwise.errors import PlanError
from shardwise.plan.layout import Shard
from shardwise.runtime.shard import local_slice, sharding_of
from shardwise.runtime.slices import InputSlice
from tests import tolerances
from tests.helpers import randomize, relative_error
from tests.pool import Pool

WIDTH = 24


class Keeping(nn.Module):
    """Writes its features into a cache, and multiplies them with what it finds there and with a table."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Any = None, table: Tensor | None = None) -> Tensor:
        features = self.up(x)
        if cache is not None:
            features = features * cache["kept"][0].clone()
            cache["kept"][1] = features.detach()
        return self.down(features if table is None else features * table)


class Caller(nn.Module):
    """Hands a cache and a table to its block, one by position and one by name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Keeping()])

    def forward(self, x: Tensor, cache: Any = None, table: Tensor | None = None) -> Tensor:
        return self.blocks[0](x, cache, table=table)


PLAN = {
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "blocks.*": SliceInput("cache", "table", dim=-1),
}


def _sharded(model: nn.Module, plan: dict[str, Any] = PLAN) -> nn.Module:
    config = TensorParallelConfig(tp_degree=dist.get_world_size(), check=False)
    return enable_parallelism(copy.deepcopy(model), config=config, plan=plan)


def _noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _run(model: nn.Module, given: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, what is in the cache afterwards, and the gradient of the table."""
    cache = {"kept": _noise(2, 3, 7, WIDTH, seed=3)}
    table = _noise(WIDTH, seed=4).requires_grad_()
    out = model(_noise(3, 7, WIDTH, seed=2), cache, table) if given else model(_noise(3, 7, WIDTH, seed=2))
    out.pow(3).sum().backward()
    return out.detach(), cache["kept"], table.grad if given else table


def _errors() -> tuple[float, float, float]:
    whole = randomize(Caller()).double()
    sharded = _sharded(whole)
    group = sharding_of(sharded).group
    (out, kept, grad), (whole_out, whole_kept, whole_grad) = _run(sharded, True), _run(whole, True)
    own = [local_slice(t, Shard(3, (WIDTH,)), group.rank, group.degree) for t in (kept, whole_kept)]
    return relative_error(out, whole_out), relative_error(*own), relative_error(grad, whole_grad)


def test_slices_of_arguments_are_read_written_and_have_gradients_as_in_one_process(ranks: Pool) -> None:
    for output, cache, gradient in ranks.run(_errors):
        assert max(output, cache, gradient) < tolerances.FP64


def _rest_of_the_cache() -> bool:
    sharded = _sharded(randomize(Caller()).double())
    group = sharding_of(sharded).group
    _, kept, _ = _run(sharded, True)
    before, width = _noise(2, 3, 7, WIDTH, seed=3), WIDTH // group.degree
    own = slice(group.rank * width, (group.rank + 1) * width)
    kept[..., own] = before[..., own]
    return torch.equal(kept, before)


def test_slices_of_other_ranks_are_left_alone(two_ranks: Pool) -> None:
    assert all(two_ranks.run(_rest_of_the_cache))


def _without() -> float:
    whole = randomize(Caller()).double()
    return relative_error(_run(_sharded(whole), False)[0], _run(whole, False)[0])


def test_argument_that_is_left_out_is_left_alone(two_ranks: Pool) -> None:
    assert max(two_ranks.run(_without)) < tolerances.FP64


def _refused(name: str, value: Any, dim: int) -> str:
    sharded = _sharded(Caller(), {**PLAN, "blocks.*": SliceInput("cache", "table", dim=dim)})
    try:
        sharded(torch.ones(3, 7, WIDTH), **{name: value})
    except PlanError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("name", "value", "dim", "kind"),
    [
        ("table", torch.ones(25), -1, "IndivisibleSlice"),
        ("table", torch.ones(WIDTH), 1, "NoSuchDim"),
        ("cache", {"kept": 5}, -1, "NotATensor"),
        ("cache", object(), -1, "NotATensor"),
    ],
)
def test_argument_that_cannot_be_cut_is_refused_in_the_forward(
    two_ranks: Pool, name: str, value: Any, dim: int, kind: str
) -> None:
    for message in two_ranks.run(_refused, name, value, dim):
        assert f"{kind}: blocks.0" in message
        assert f"SliceInput('cache', 'table', dim={dim})" in message


def _pickled() -> tuple[bool, bool]:
    block = pickle.loads(pickle.dumps(_sharded(Caller()).blocks[0]))
    (hook,) = block._forward_pre_hooks.values()
    return isinstance(hook, InputSlice), list(block.state_dict()) == list(Keeping().state_dict())


def test_module_whose_arguments_are_cut_keeps_its_keys_and_can_be_pickled(two_ranks: Pool) -> None:
    assert all(all(answers) for answers in two_ranks.run(_pickled))
