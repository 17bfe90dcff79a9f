"""Training a sharded model beside one process: checkpointed blocks, LoRA fine-tuning, and the sums of backward."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from shardwise import TensorParallelConfig, enable_parallelism
from shardwise.compose import lora_layers
from shardwise.plan.layout import Shard
from shardwise.runtime import modules
from shardwise.runtime.collectives import enter_shard, reduce_partial
from shardwise.runtime.group import TensorParallelGroup
from shardwise.runtime.shard import local_slice, sharding_of
from tests import tolerances
from tests.distributed.test_gradients import TRAINED
from tests.distributed.test_lora import pair
from tests.distributed.test_lora_paths import give, parts
from tests.gradients import DIFFERENTIABLE, backward
from tests.helpers import call, randomize, relative_error, tiny_inputs
from tests.lora import config
from tests.pool import Pool, at_two_ranks_and_once_at_four
from tests.small_models import Transformer, small_input

FLUX2 = "Flux2Transformer2DModel"

# --- gradient checkpointing --------------------------------------------------------------------------------------


@contextmanager
def recorded() -> Iterator[list[tuple[int, ...]]]:
    """Record the shape of each sum over the ranks, in order."""
    shapes: list[tuple[int, ...]] = []
    plain = TensorParallelGroup.all_reduce

    def all_reduce(group: TensorParallelGroup, tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return plain(group, tensor)

    with mock.patch.object(TensorParallelGroup, "all_reduce", all_reduce):
        yield shapes


def _reentrant(block: nn.Module, *args: Any) -> Any:
    return checkpoint(block.__call__, *args, use_reentrant=True)


def checkpointed(name: str, reentrant: bool) -> dict[str, Any]:
    """Return the errors of a sharded model's gradients with checkpointed blocks, and its sums with and without."""
    whole, sharded = pair(name)
    inputs, found = tiny_inputs(name), sharding_of(sharded)
    with recorded() as plain:
        backward(sharded, inputs)
    sharded.zero_grad()
    for model in (whole, sharded):
        model.enable_gradient_checkpointing(*([_reentrant] if reentrant else []))
    wanted_inputs, wanted = backward(whole, inputs)
    with recorded() as again:
        got_inputs, got = backward(sharded, inputs)
    scale = max(grad.abs().max() for grad in wanted.values())
    rank, degree = found.group.rank, found.group.degree
    errors = [
        (got[n] - local_slice(grad, found.plan.layout(n), rank, degree)).abs().max() / scale
        for n, grad in wanted.items()
    ]
    return {
        "error": max(relative_error(got_inputs, wanted_inputs), max(errors).item()),
        "same": got.keys() == wanted.keys(),
        "plain": plain,
        "again": again,
        "held": found.group.entered is not None,
    }


@pytest.mark.parametrize("reentrant", [False, True], ids=["as_diffusers_does", "reentrant"])
@at_two_ranks_and_once_at_four(TRAINED, FLUX2)
def test_gradients_with_checkpointing_equal_one_process_and_sums_come_in_one_order(
    ranks: Pool, name: str, reentrant: bool
) -> None:
    results = ranks.run(checkpointed, name, reentrant)
    for result in results:
        assert result["same"]
        assert result["error"] < tolerances.FP32
        assert not result["held"]
        assert len(result["again"]) > len(result["plain"])  # blocks were computed again, sums included
        assert result["again"] == results[0]["again"]


# --- LoRA fine-tuning --------------------------------------------------------------------------------------------

STEPS = 20


def train(model: nn.Module, inputs: dict[str, Any], targets: list[Tensor]) -> list[float]:
    """Return the losses of some steps of AdamW on what is to be trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
    for _ in range(STEPS):
        loss = sum(mse_loss(a, b) for a, b in zip(call(model, inputs), targets, strict=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _differ(sharded: nn.Module, names: list[str]) -> list[str]:
    """Return the names of whole parameters that are not the same on all ranks, bit for bit."""
    found = []
    for name in names:
        own = sharded.get_parameter(name).detach().contiguous()
        others = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(others, own)
        found += [name] if any(not torch.equal(own, other) for other in others) else []
    return found


def fine_tuned(name: str, checkpointing: bool = False) -> dict[str, Any]:
    """Return how far the losses of a sharded model are from those of one process, and what its ranks hold apart."""
    whole, sharded = pair(name)
    options, inputs = config(whole), tiny_inputs(name)
    with torch.no_grad():
        targets = [0.5 * out + 0.1 for out in call(whole, inputs)]
    torch.manual_seed(3)
    for model in (whole, sharded):
        model.add_adapter(options)
    give(whole, sharded)
    if checkpointing:
        sharded.enable_gradient_checkpointing()
    losses = train(sharded, inputs, targets)
    told = [train(whole, inputs, targets) if dist.get_rank() == 0 else []]
    dist.broadcast_object_list(told)
    wanted: list[float] = told[0]
    cut = {
        f"{path}.{factor}"
        for path, module in sharded.named_modules()
        for factor, (layout, _) in getattr(module, "tp_adapters", {}).items()
        if isinstance(layout, Shard)
    }
    replicated = [n for n, p in sharded.named_parameters() if p.requires_grad and n not in cut]
    return {
        "error": max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True)),
        "fell": wanted[-1] / wanted[0],
        "trained": {n for n, p in sharded.named_parameters() if p.requires_grad}
        == parts(whole, sharded).keys(),
        "replicated": len(replicated),
        "differ": _differ(sharded, replicated),
    }


@pytest.mark.parametrize("name", TRAINED)
def test_losses_of_lora_fine_tuning_are_those_of_one_process(ranks: Pool, name: str) -> None:
    for result in ranks.run(fine_tuned, name):
        assert result["trained"]
        assert result["fell"] < 0.9
        assert result["error"] < tolerances.LOSSES
        assert result["replicated"] > 0
        assert result["differ"] == []


def test_losses_with_checkpointing_are_those_of_one_process(two_ranks: Pool) -> None:
    for result in two_ranks.run(fine_tuned, FLUX2, checkpointing=True):
        assert result["error"] < tolerances.LOSSES
        assert result["differ"] == []


def _whole_factors_unsummed() -> dict[str, Any]:
    with mock.patch.object(lora_layers, "enter_shard", lambda tensor, group: tensor):
        return fine_tuned(FLUX2)


def test_the_comparison_sees_factors_that_the_ranks_train_apart(two_ranks: Pool) -> None:
    for result in two_ranks.run(_whole_factors_unsummed):
        assert result["error"] > 10 * tolerances.LOSSES
        assert result["differ"]


# --- one copy for each input -------------------------------------------------------------------------------------


def sums_of_a_step(name: str) -> tuple[int, int]:
    """Return the sums of forward and of backward, where the model is frozen and only data is differentiable."""
    _, sharded = pair(name)
    sharded.requires_grad_(False)
    inputs = tiny_inputs(name)
    data = {n: t.requires_grad_() for n, t in inputs.items() if n in DIFFERENTIABLE and isinstance(t, Tensor)}
    traffic = sharding_of(sharded).group.traffic
    loss = sum(out.sum() for out in call(sharded, {**inputs, **data}))
    forward = traffic.all_reduces
    loss.backward()
    return forward, traffic.all_reduces - forward


SUMS = {
    FLUX2: (17, 11, 19),
    "FluxTransformer2DModel": (18, 18, 32),
    "MiniMaxH3Transformer3DModel": (10, 8, 16),
    "QwenImageTransformer2DModel": (12, 7, 15),
    "SD3Transformer2DModel": (22, 22, 36),
    "WanTransformer3DModel": (14, 14, 20),
}
"""Sums of forward, of backward, which does not go into modulations, and of backward if each layer sums for itself."""


@pytest.mark.parametrize("name", SUMS)
def test_backward_sums_once_for_all_layers_that_read_one_tensor(two_ranks: Pool, name: str) -> None:
    assert two_ranks.run(sums_of_a_step, name) == [SUMS[name][:2]] * 2


def _each_for_itself(name: str) -> tuple[int, int]:
    with mock.patch.object(modules, "enter_layer", enter_shard):
        return sums_of_a_step(name)


@pytest.mark.parametrize("name", SUMS)
def test_without_the_shared_copy_backward_sums_more_often(two_ranks: Pool, name: str) -> None:
    forward, _, alone = SUMS[name]
    assert two_ranks.run(_each_for_itself, name) == [(forward, alone)] * 2


def _changed_in_place() -> tuple[bool, bool]:
    """Return whether a tensor that was written into, and another one, are entered anew."""
    _, sharded = pair(FLUX2)
    layer = sharded.transformer_blocks[0].attn.to_q
    x = torch.ones(1, 2, layer.in_features, requires_grad=True) * 1
    first, same = layer.enter(x), layer.enter(x)
    assert first is same
    with torch.no_grad():
        x.mul_(2)
    return layer.enter(x) is not first, layer.enter(x * 1) is not layer.enter(x)


def test_copy_is_not_shared_once_the_tensor_has_changed(two_ranks: Pool) -> None:
    assert two_ranks.run(_changed_in_place) == [(True, True)] * 2


def _held(after: Callable[[Tensor], Any]) -> tuple[bool, bool]:
    """Return whether a group holds a tensor after a step, and whether the graph of the step is alive."""
    config = TensorParallelConfig(dist.get_world_size(), check=False)
    model = enable_parallelism(randomize(Transformer()), config=config)
    x = small_input(Transformer)["x"].requires_grad_() * 1
    loss = sum(out.sum() for out in model(x))
    saved = weakref.ref(x)  # the first layer keeps it for its weight
    del x
    assert saved() is not None
    after(loss)
    del loss
    deadline = time.monotonic() + 5
    while saved() is not None and time.monotonic() < deadline:
        time.sleep(0.01)  # gloo's own thread lets go of what it has reduced a moment later
    return sharding_of(model).group.entered is not None, saved() is not None


def _nothing(loss: Tensor) -> None:
    return


def _backward(loss: Tensor) -> None:
    loss.backward()


@pytest.mark.parametrize("after", [_nothing, _backward])
def test_no_tensor_is_held_after_a_step(two_ranks: Pool, after: Callable[[Tensor], Any]) -> None:
    assert two_ranks.run(_held, after) == [(False, False)] * 2


def _held_for_ever() -> tuple[bool, bool]:
    with mock.patch.object(modules, "leave_layer", reduce_partial):
        return _held(_nothing)


def test_without_an_end_of_the_slices_the_graph_of_a_step_is_held(two_ranks: Pool) -> None:
    assert two_ranks.run(_held_for_ever) == [(True, True)] * 2


def _compiled() -> float:
    torch._dynamo.reset()
    whole, sharded = pair(FLUX2)
    inputs = tiny_inputs(FLUX2)
    wanted, _ = backward(whole, inputs)
    with warnings.catch_warnings():
        # Dynamo makes instances of autograd functions, of which torch says that nobody should.
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
        got, _ = backward(torch.compile(sharded, fullgraph=True, backend="aot_eager"), inputs)
    return relative_error(got, wanted)


def test_gradients_of_one_compiled_graph_equal_one_process(two_ranks: Pool) -> None:
    assert max(two_ranks.run(_compiled)) < tolerances.FP32
