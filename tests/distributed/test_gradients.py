"""Backward through a sharded model: gradients of inputs and of slices are those of one process."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import SumOnce, TensorParallelConfig, enable_parallelism
from shardwise.models.lookup import tiny_case
from shardwise.runtime import modules
from shardwise.runtime.shard import local_slice, sharding_of
from tests import lora, tolerances
from tests.helpers import (
    FAMILIES,
    call,
    differentiable_flex_attention,
    family,
    map_tensors,
    randomize,
    relative_error,
    tensors_of,
    tiny_inputs,
    tiny_model,
    variants,
)
from tests.pool import Pool
from tests.small_models import SMALL, Glu, Mixture, Mlp, Modulation, small_input

TRAINED = sorted(lora.FAMILIES)
"""Classes whose training is held against one process in every respect."""

DIFFERENTIABLE = {
    "x",
    "action_tokens",
    "decoder_input_tokens",
    "hidden_states",
    "latents_clean",
    "local_latents",
    "sound_tokens",
    "vision_tokens",
    "encoder_hidden_states",
    "encoder_hidden_states_2",
    "encoder_hidden_states_t5",
    "encoder_hidden_states_image",
    "image_cond_hidden_states",
    "id_cond",
    "id_vit_hidden",
    "inpaint_latents",
    "pooled_projections",
    "proj_embedding",
    "audio_hidden_states",
    "audio_encoder_hidden_states",
    "latent_cond",
    "cap_feats",
    "control_hidden_states",
    "siglip_feats",
    "condition_latents",
    "pose_hidden_states",
    "face_pixel_values",
    "context_latents",
    "global_hidden_states",
    "input_img_latents",
    "inputs_embeds",
    "local_add_cond",
    "text_bth",
    "text_encoder_layers",
}
"""Inputs that are data, if they are no codes. Positions are left out: no layer is between them and the heads."""


def backward(model: nn.Module, inputs: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the gradients of the inputs and of the parameters, for a loss that uses every output."""
    data = {
        k: map_tensors(lambda t: t.clone().requires_grad_(), inputs[k])
        for k in inputs.keys() & DIFFERENTIABLE
        if all(tensor.is_floating_point() for tensor in tensors_of(inputs[k]))
    }
    with differentiable_flex_attention():
        results = call(model, {**inputs, **data})
    weights = [torch.randn(r.shape, generator=torch.Generator().manual_seed(5)).to(r.dtype) for r in results]
    sum((r * w).sum() for r, w in zip(results, weights, strict=True)).backward()
    grads = [tensor.grad for name in sorted(data) for tensor in tensors_of(data[name])]
    return grads, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def compare_gradients(whole: nn.Module, inputs: dict[str, Any], uneven: bool = False) -> tuple[float, float]:
    """Return the largest errors of the gradients of inputs and of parameters."""
    config = TensorParallelConfig(tp_degree=dist.get_world_size(), check=False, uneven=uneven)
    sharded = enable_parallelism(copy.deepcopy(whole), config=config)
    sharding = sharding_of(sharded)
    wanted_inputs, wanted = backward(whole, inputs)
    got_inputs, got = backward(sharded, inputs)
    assert got.keys() == wanted.keys()
    # One scale for all: some gradients are zero but for rounding (a key's bias shifts all scores alike).
    scale = max(grad.abs().max() for grad in wanted.values())
    rank, degree = sharding.group.rank, sharding.group.degree
    errors = [
        (got[name] - local_slice(grad, sharding.plan.layout(name), rank, degree)).abs().max() / scale
        for name, grad in wanted.items()
    ]
    return relative_error(got_inputs, wanted_inputs), max(errors).item()


def _family(name: str) -> tuple[float, float]:
    return compare_gradients(tiny_model(name), tiny_inputs(name))


def _small(cls: type[Any]) -> tuple[float, float]:
    return compare_gradients(randomize(cls()), small_input(cls))


@pytest.mark.parametrize("cls", SMALL, ids=lambda cls: cls.__name__)
def test_gradients_of_small_models_equal_one_process(ranks: Pool, cls: type[Any]) -> None:
    assert max(max(errors) for errors in ranks.run(_small, cls)) < tolerances.FP32


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_families_equal_one_process_per_head_norms_included(two_ranks: Pool, name: str) -> None:
    assert max(max(errors) for errors in two_ranks.run(_family, name)) < tolerances.FP32


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_of_families_equal_one_process_on_four_ranks(four_ranks: Pool, name: str) -> None:
    assert max(max(errors) for errors in four_ranks.run(_family, name)) < tolerances.FP32


def _variant(name: str, variant: str) -> tuple[float, float]:
    config, inputs = tiny_case(family(name), variant)
    return compare_gradients(tiny_model(name, **config), inputs)


@pytest.mark.parametrize(("name", "variant"), variants())
def test_gradients_of_other_configurations_equal_one_process(
    two_ranks: Pool, name: str, variant: str
) -> None:
    assert max(max(errors) for errors in two_ranks.run(_variant, name, variant)) < tolerances.FP32


def _per_head_norms_unsummed(name: str) -> float:
    with mock.patch.object(modules, "sum_gradients"):
        return compare_gradients(tiny_model(name), tiny_inputs(name))[1]


def test_the_comparison_sees_gradients_that_are_partial_sums(two_ranks: Pool) -> None:
    assert min(two_ranks.run(_per_head_norms_unsummed, "FluxTransformer2DModel")) > tolerances.MISTAKE


def _experts() -> float:
    return max(compare_gradients(randomize(Mixture()), small_input(Mixture)))


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
