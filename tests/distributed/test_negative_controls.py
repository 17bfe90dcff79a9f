"""Broken on purpose: the comparison that the other tests assert must fail on each of these."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise import DivideAttributes, PackedColwiseParallel, TensorParallelConfig, enable_parallelism
from shardwise.models.families.flux2 import PLAN as FLUX2_PLAN
from shardwise.plan.layout import Shard
from shardwise.runtime import modules, shard
from shardwise.runtime.group import TensorParallelGroup
from tests import tolerances
from tests.helpers import outputs, randomize, relative_error, tiny_inputs, tiny_model
from tests.pool import Pool
from tests.small_models import Convolutions, Glu, Mixture, Mlp, Parallel, Transformer, small_input


def _error(whole: nn.Module, inputs: dict[str, Any], plan: Any = None) -> float:
    config = TensorParallelConfig(tp_degree=dist.get_world_size(), check=False)
    sharded = enable_parallelism(copy.deepcopy(whole), config=config, plan=plan)
    return relative_error(outputs(sharded, inputs), outputs(whole, inputs))


def _plain_on_fused() -> float:
    return _error(randomize(Glu()), small_input(Glu), {"gate_value": "colwise", "down": "rowwise"})


def _plain_on_flux2() -> float:
    plan = FLUX2_PLAN | {"transformer_blocks.*.ff.linear_in": "colwise"}
    return _error(tiny_model("Flux2Transformer2DModel"), tiny_inputs("Flux2Transformer2DModel"), plan)


def _undeclared_blocks() -> float:
    """The blocks that `Parallel` declares are taken away, so nothing can notice the plain cut."""
    model = randomize(Parallel())
    for block in model.blocks:
        del block.proj_in._tp_packed_col_blocks, block.proj_out._tp_packed_row_blocks
    return _error(
        model, small_input(Parallel), {"blocks.*.proj_in": "colwise", "blocks.*.proj_out": "rowwise"}
    )


def _heads_not_divided() -> float:
    plan = Transformer._tp_plan | {"blocks.*": DivideAttributes()}
    return _error(randomize(Transformer()), small_input(Transformer), plan)


def _bias_on_each_rank() -> float:
    def forward(self: Any, input: Tensor) -> Tensor:
        return self.tp_group.all_reduce(F.linear(input, self.weight, self.bias))

    with mock.patch.object(modules.RowwiseLinear, "forward", forward):
        return _error(randomize(Mlp()), small_input(Mlp))


def _no_reduction() -> float:
    with mock.patch.object(TensorParallelGroup, "all_reduce", lambda self, tensor: tensor):
        return _error(randomize(Mlp()), small_input(Mlp))


def _slice_of_another_rank() -> float:
    """Give each rank the next rank's slice of the colwise layer, and its own of the rowwise one."""
    original = shard.local_slice

    def shifted(tensor: Tensor, layout: Any, rank: int, degree: int) -> Tensor:
        is_colwise = isinstance(layout, Shard) and layout.dim == 0
        return original(tensor, layout, (rank + 1) % degree if is_colwise else rank, degree)

    with mock.patch.object(shard, "local_slice", shifted):
        return _error(randomize(Mlp()), small_input(Mlp))


def _blocks_in_another_order() -> float:
    plan = Parallel._tp_plan | {"blocks.*.proj_in": PackedColwiseParallel([2, 1, 1, 1, 2])}
    model = randomize(Parallel())
    for block in model.blocks:
        del block.proj_in._tp_packed_col_blocks
    return _error(model, small_input(Parallel), plan)


def _experts_never_summed() -> float:
    with mock.patch.object(modules.OutputSum, "__call__", lambda self, module, args, output: output):
        return _error(randomize(Mixture()), small_input(Mixture))


def _experts_summed_one_by_one_and_again() -> float:
    forward = modules.RowwiseLinear.forward

    def outside(self: Any, input: Tensor) -> Tensor:
        self.tp_inside = False
        return forward(self, input)

    with mock.patch.object(modules.RowwiseLinear, "forward", outside):
        return _error(randomize(Mixture()), small_input(Mixture))


def _convolutions(**broken: Any) -> float:
    return _error(randomize(Convolutions()), small_input(Convolutions), Convolutions._tp_plan | broken)


def _halves_of_channels_not_apart() -> float:
    return _convolutions(up="colwise", depth="depthwise")


def _filters_of_other_channels() -> float:
    return _convolutions(depth="depthwise")


def _bias_of_a_convolution_on_each_rank() -> float:
    def forward(self: Any, input: Tensor) -> Tensor:
        return self.tp_group.all_reduce(self._multiply(self.enter(input), self.bias))

    with mock.patch.object(modules.Rowwise, "forward", forward):
        return _convolutions()


CONTROLS = {
    f.__name__.strip("_"): f
    for f in (
        _plain_on_fused,
        _plain_on_flux2,
        _undeclared_blocks,
        _heads_not_divided,
        _bias_on_each_rank,
        _no_reduction,
        _slice_of_another_rank,
        _blocks_in_another_order,
        _experts_never_summed,
        _experts_summed_one_by_one_and_again,
        _halves_of_channels_not_apart,
        _filters_of_other_channels,
        _bias_of_a_convolution_on_each_rank,
    )
}


def _run(name: str) -> float:
    return CONTROLS[name]()


@pytest.mark.parametrize("name", CONTROLS)
def test_P12_comparison_fails_when_this_is_broken(ranks: Pool, name: str) -> None:
    # Nothing raises: these are the silent faults. Only the numbers tell.
    assert min(ranks.run(_run, name)) > tolerances.MISTAKE
