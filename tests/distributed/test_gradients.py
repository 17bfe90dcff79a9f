"""Backward through a sharded model: gradients of inputs and of slices are those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import TensorParallelConfig, enable_parallelism
from shardwise.runtime.shard import local_slice, sharding_of
from tests import tolerances
from tests.helpers import FAMILIES, randomize, relative_error, tiny_inputs, tiny_model
from tests.pool import Pool
from tests.small_models import SMALL, small_input


DIFFERENTIABLE = {"x", "hidden_states", "encoder_hidden_states", "pooled_projections", "audio_hidden_states"}
"""Inputs that are data. Positions are left out: no layer stands between them and each rank's own heads."""


def _backward(model: nn.Module, inputs: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradients of the inputs and of the parameters, for a loss that uses every output."""
    inputs = {k: v.clone().requires_grad_() if k in DIFFERENTIABLE else v for k, v in inputs.items()}
    results = model(**inputs, return_dict=False)
    weights = [torch.randn(r.shape, generator=torch.Generator().manual_seed(5)).to(r.dtype) for r in results]
    sum((r * w).sum() for r, w in zip(results, weights, strict=True)).backward()
    grads = {k: v.grad for k, v in inputs.items() if k in DIFFERENTIABLE}
    return grads, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _compare(whole: nn.Module, inputs: dict[str, Any]) -> tuple[float, float, float, set[str]]:
    """Return the errors of input, sharded and whole-parameter gradients; the last may be partial sums."""
    config = TensorParallelConfig(tp_degree=dist.get_world_size())
    sharded = enable_parallelism(copy.deepcopy(whole), config=config)
    sharding = sharding_of(sharded)
    wanted_inputs, wanted = _backward(whole, inputs)
    got_inputs, got = _backward(sharded, inputs)
    assert got.keys() == wanted.keys()
    planned, replicated, partial = [], [], set()
    # One scale for all: some gradients are zero but for rounding (a key's bias shifts all scores alike).
    scale = max(grad.abs().max() for grad in wanted.values())
    for name, grad in wanted.items():
        layout = sharding.plan.layout(name)
        difference = ((got[name] - local_slice(grad, layout, sharding.group)).abs().max() / scale).item()
        if name in sharding.plan.layouts:
            planned.append(difference)
        elif difference < tolerances.FP32:
            replicated.append(difference)
        else:  # a weight that each rank applies to its own heads: the ranks' gradients add up
            partial.add(name.rpartition(".")[0].rpartition(".")[2])
            total = sharding.group.all_reduce(got[name].clone())
            replicated.append(((total - grad).abs().max() / scale).item())
    inputs_error = relative_error([got_inputs[k] for k in wanted_inputs], list(wanted_inputs.values()))
    return inputs_error, max(planned), max(replicated, default=0.0), partial


def _family(name: str) -> tuple[float, float, float, set[str]]:
    return _compare(tiny_model(name), tiny_inputs(name))


def _small(cls: type[Any]) -> tuple[float, float, float, set[str]]:
    return _compare(randomize(cls()), small_input(cls))


@pytest.mark.parametrize("cls", SMALL, ids=lambda cls: cls.__name__)
def test_gradients_of_small_models_equal_one_process(ranks: Pool, cls: type[Any]) -> None:
    for inputs, planned, replicated, partial in ranks.run(_small, cls):
        assert max(inputs, planned, replicated) < tolerances.FP32
        assert not partial


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_families_equal_one_process_and_per_head_norms_sum_up(ranks: Pool, name: str) -> None:
    for inputs, planned, replicated, partial in ranks.run(_family, name):
        assert max(inputs, planned, replicated) < tolerances.FP32
        assert partial <= {"norm_q", "norm_k", "norm_added_q", "norm_added_k"}
