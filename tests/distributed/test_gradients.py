"""Backward through a sharded model: gradients of inputs and of slices are those of one process."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import SumOnce, TensorParallelConfig, enable_parallelism
from shardwise.models.lookup import tiny_case
from shardwise.runtime import modules
from tests import lora, tolerances
from tests.gradients import Errors, assert_equal_gradients, compare_gradients
from tests.helpers import (
    FAMILIES,
    family,
    randomize,
    relative_error,
    tiny_inputs,
    tiny_model,
    variants,
)
from tests.pool import Pool
from tests.small_models import SMALL, Glu, Mixture, Mlp, Modulation, small_input

TRAINED = sorted(lora.FAMILIES)
"""Classes whose training is held against one process in every respect."""


def _family(name: str) -> Errors:
    return compare_gradients(tiny_model(name), tiny_inputs(name))


def _small(cls: type[Any]) -> Errors:
    return compare_gradients(randomize(cls()), small_input(cls))


@pytest.mark.parametrize("cls", SMALL, ids=lambda cls: cls.__name__)
def test_gradients_of_small_models_equal_one_process(ranks: Pool, cls: type[Any]) -> None:
    assert_equal_gradients(ranks.run(_small, cls))


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_families_equal_one_process_per_head_norms_included(two_ranks: Pool, name: str) -> None:
    assert_equal_gradients(two_ranks.run(_family, name))


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_of_families_equal_one_process_on_four_ranks(four_ranks: Pool, name: str) -> None:
    assert_equal_gradients(four_ranks.run(_family, name))


def _variant(name: str, variant: str) -> Errors:
    config, inputs = tiny_case(family(name), variant)
    return compare_gradients(tiny_model(name, **config), inputs)


@pytest.mark.parametrize(("name", "variant"), variants())
def test_gradients_of_other_configurations_equal_one_process(
    two_ranks: Pool, name: str, variant: str
) -> None:
    assert_equal_gradients(two_ranks.run(_variant, name, variant))


def _per_head_norms_unsummed(name: str) -> float:
    with mock.patch.object(modules, "sum_gradients"):
        return compare_gradients(tiny_model(name), tiny_inputs(name)).parameters


def test_the_comparison_sees_gradients_that_are_partial_sums(two_ranks: Pool) -> None:
    assert min(two_ranks.run(_per_head_norms_unsummed, "FluxTransformer2DModel")) > tolerances.MISTAKE


def _experts() -> float:
    return compare_gradients(randomize(Mixture()), small_input(Mixture)).worst


class _OnlyForward(modules.OutputSum):
    """Sums what a module returns, and not the gradients of what it is given."""

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, kwargs


def _inputs_unsummed() -> float:
    with mock.patch.dict(modules.LOCAL_CLASSES, {SumOnce: _OnlyForward}):
        return _experts()


def _router_unsummed() -> float:
    with mock.patch.object(modules, "sum_gradients"):
        return _experts()


@pytest.mark.parametrize("broken", [_inputs_unsummed, _router_unsummed])
def test_the_comparison_sees_what_experts_leave_unsummed(two_ranks: Pool, broken: Any) -> None:
    assert min(two_ranks.run(broken)) > tolerances.MISTAKE


def _second_order(cls: type[Any]) -> float:
    """The gradient of a gradient's norm, as a gradient penalty takes it."""
    whole = randomize(cls()).double()
    sharded = enable_parallelism(copy.deepcopy(whole), config=TensorParallelConfig(dist.get_world_size()))
    results = []
    for model in (sharded, whole):
        x = small_input(cls, dtype=torch.float64)["x"].requires_grad_()
        loss = sum(out.pow(2).sum() for out in model(x))
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(grad.pow(2).sum(), x)
        results.append(second)
    return relative_error(*results)


@pytest.mark.parametrize("cls", [Mlp, Glu, Modulation], ids=lambda cls: cls.__name__)
def test_second_order_gradients_equal_one_process(two_ranks: Pool, cls: type[Any]) -> None:
    assert max(two_ranks.run(_second_order, cls)) < tolerances.FP64
