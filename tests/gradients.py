"""Gradients of a sharded model against those of one process, and how far rounding takes them there."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import TensorParallelConfig, enable_parallelism
from shardwise.runtime.shard import local_slice, sharding_of
from tests import tolerances
from tests.helpers import call, differentiable_flex_attention, map_tensors, relative_error, tensors_of

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

Gradients = tuple[list[Tensor], dict[str, Tensor]]
"""Those of the inputs, and those of the parameters by name."""


def backward(model: nn.Module, inputs: dict[str, Any]) -> Gradients:
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


@dataclass(frozen=True)
class Errors:
    """The largest errors of gradients, relative to the largest gradient of the kind.

    Attributes:
        inputs: Of the gradients of inputs, each relative to its own largest value.
        parameters: Of those of the parameters.
        rounding: The larger of the two between one process and itself, with every parameter moved by one unit in its
            last place.
    """

    inputs: float
    parameters: float
    rounding: float

    @property
    def worst(self) -> float:
        """The larger of the two."""
        return max(self.inputs, self.parameters)


def compare_gradients(whole: nn.Module, inputs: dict[str, Any], uneven: bool = False) -> Errors:
    """Shard a copy of a model, and return how far its gradients are from those of one process."""
    config = TensorParallelConfig(tp_degree=dist.get_world_size(), check=False, uneven=uneven)
    sharded, other = enable_parallelism(copy.deepcopy(whole), config=config), moved(whole)
    wanted = backward(whole, inputs)
    found, rounded = backward(sharded, inputs), backward(other, inputs)
    sharding = sharding_of(sharded)
    rank, degree = sharding.group.rank, sharding.group.degree
    own = {
        name: local_slice(grad, sharding.plan.layout(name), rank, degree) for name, grad in wanted[1].items()
    }
    scale = max(grad.abs().max() for grad in wanted[1].values())
    return Errors(
        relative_error(found[0], wanted[0]),
        _largest(found[1], own, scale),
        max(relative_error(rounded[0], wanted[0]), _largest(rounded[1], wanted[1], scale)),
    )


def _largest(found: dict[str, Tensor], wanted: dict[str, Tensor], scale: Tensor) -> float:
    """Return the largest difference by one scale for all: some are zero but for rounding, such as a key's bias."""
    assert found.keys() == wanted.keys()
    return max(((found[name] - grad).abs().max() / scale).item() for name, grad in wanted.items())


def moved(model: nn.Module, seed: int = 3) -> nn.Module:
    """Return a copy of a model, of which every parameter is moved by one unit in its last place, up or down.

    What that changes is what rounding does to this model: sharding changes the order in which products are added, and
    so moves each sum by about as much. A model that makes much of it (sharp scores, norms of small differences) does so
    on any processor.
    """
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator, dtype=parameter.dtype) * 2 - 1
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * signs)
    return other


def assert_equal_gradients(found: Iterable[Errors]) -> None:
    """Assert that gradients differ from those of one process by what rounding does, and that mistakes would show."""
    for errors in found:
        assert errors.worst < tolerances.ROUNDINGS * errors.rounding, errors
        assert tolerances.ROUNDINGS * errors.rounding < tolerances.MISTAKE / 5, errors
