"""Slices that are read are, to the last bit, slices of the full load: each style, each degree, cast or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwise import PackedColwiseParallel, PackedRowwiseParallel, SliceParameter
from shardwise.checkpoint.index import read_header
from shardwise.checkpoint.load import load_tensors, match_keys
from shardwise.checkpoint.read import SliceReader
from shardwise.plan.layout import Replicated, Shard
from shardwise.plan.resolve import ResolvedPlan, resolve
from shardwise.runtime.shard import local_slice
from tests.helpers import randomize
from tests.unit.test_read import CPU, cut, same

STYLES: dict[str, object] = {
    "up": "colwise",
    "norm": "across_head_norm",
    "down": "rowwise",
    "lone": "rowwise_split_input",
    "fused": PackedColwiseParallel((24, 48, 24)),
    "join": PackedRowwiseParallel((1, 3)),
    "table": SliceParameter("gain", dim=1),
}
DEGREES = [1, 2, 3, 4, 8]


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2, 24, 3))


class EveryStyle(nn.Module):
    """A module for each style, and some that no plan names; all sizes are multiples of 24."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 48)
        self.norm = nn.RMSNorm(48)
        self.down = nn.Linear(48, 24)
        self.lone = nn.Linear(24, 10)
        self.fused = nn.Linear(24, 96)
        self.join = nn.Linear(96, 24)
        self.table = Table()
        self.whole = nn.Linear(5, 7)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    file = tmp_path_factory.mktemp("styles") / "model.safetensors"
    tensors = {name: tensor.detach() for name, tensor in randomize(EveryStyle()).state_dict().items()}
    save_file(tensors, file)
    return file, tensors


def load(file: Path, plan: ResolvedPlan, rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    model, index = EveryStyle(), read_header(file)
    reader = SliceReader(rank, plan.degree, CPU)
    keys = match_keys(model, index)
    return load_tensors(model, index, keys, plan, reader, lambda *_: dtype)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["kept", "cast"])
@pytest.mark.parametrize("degree", DEGREES)
def test_every_style_is_read_as_it_is_cut_from_the_full_load(
    checkpoint: tuple[Path, dict[str, Tensor]], degree: int, dtype: torch.dtype
) -> None:
    file, tensors = checkpoint
    plan = resolve(EveryStyle(), STYLES, degree, guards=False)
    for rank in range(degree):
        loaded = load(file, plan, rank, dtype)
        assert loaded.keys() == tensors.keys()
        for name, tensor in loaded.items():
            full = tensors[name].to(dtype)
            assert same(tensor.detach(), local_slice(full, plan.layout(name), rank, degree)), name
            assert same(tensor.detach(), cut(full, plan.layout(name), rank, degree)), name


def test_every_style_cuts_something_and_the_rest_is_whole() -> None:
    layouts = resolve(EveryStyle(), STYLES, 2, guards=False)
    cuts = {name.split(".")[0] for name, layout in layouts.layouts.items() if isinstance(layout, Shard)}
    assert cuts == set(STYLES)
    assert layouts.layout("whole.weight") == Replicated()


def test_slices_of_another_rank_are_not_the_same(checkpoint: tuple[Path, dict[str, Tensor]]) -> None:
    file, _ = checkpoint
    plan = resolve(EveryStyle(), STYLES, 2, guards=False)
    first, second = (load(file, plan, rank, torch.float32) for rank in (0, 1))
    equal = {name for name in first if same(first[name].detach(), second[name].detach())}
    assert equal == {name for name in first if not isinstance(plan.layout(name), Shard)}
