"""Offloading a sharded model: against the same model without, to the last bit, and against one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline
from diffusers.hooks import group_offloading
from diffusers.utils import logging
from torch import Tensor, nn

from shardwise import TensorParallelConfig, demo_model_path
from shardwise.compose import lora_layers, offload
from shardwise.demo.run import CALL
from shardwise.errors import ShardwiseError
from shardwise.models import Flux2Transformer2DModel
from shardwise.models import offload as calls
from shardwise.runtime.shard import sharding_of
from tests import tolerances
from tests.distributed.test_lora import FAMILIES, FLUX, FLUX2, WAN, pair, sharded_copy
from tests.helpers import (
    call,
    outputs,
    plainly,
    relative_error,
    save_tiny,
    tensors_of,
    tiny_inputs,
    tiny_model,
)
from tests.lora import adapter
from tests.offload import CPU, WAYS, Encoder, Holder, Host, away_on, share_away
from tests.pool import Pool, at_two_ranks_and_once_at_four

DIRECT = "accelerate.cpu_offload"
LAYERS, LEAVES = "enable_sequential_cpu_offload", "model.enable_group_offload"
PAIRED = (LAYERS, LEAVES, "stream of blocks")
"""The ways that are tried with an adapter for each class; for one class all are."""


@torch.no_grad()
def _called(target: Any, model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    return list(tensors_of(target(**{**inputs, **plainly(model)})))


def _same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


class Expected:
    """What a sharded model is to give, offloaded or not: compared with itself, and with one process."""

    def __init__(self, whole: Any, sharded: Any, inputs: dict[str, Any]) -> None:
        self.inputs, self.traffic = inputs, sharding_of(sharded).group.traffic
        self.whole = outputs(whole, inputs)
        before = self.traffic.all_reduces
        self.own = outputs(sharded, inputs)
        self.sums = self.traffic.all_reduces - before

    def compare(self, target: Any, model: Any) -> dict[str, Any]:
        """Call what is offloaded twice: of a stream, the first forward is another than the next."""
        away, before = share_away(model), self.traffic.all_reduces
        results = [_called(target, model, self.inputs) for _ in range(2)]
        return {
            "error": max(relative_error(result, self.whole) for result in results),
            "same": all(_same(result, self.own) for result in results),
            "more sums": self.traffic.all_reduces - before - 2 * self.sums,
            "away": min(away, share_away(model)),
        }


def check(results: dict[str, dict[str, Any]], ways: Any = WAYS) -> None:
    assert results.keys() == set(ways)
    for way, result in results.items():
        assert result["same"], way
        assert result["error"] < tolerances.FP32, way
        assert result["more sums"] == 0, way
        assert result["away"] == 1, way


# --- numbers ---------------------------------------------------------------------------------------------------------


def measure(name: str) -> dict[str, dict[str, Any]]:
    """Return, for each way of offloading, the error to one process, and how it compares to not offloading."""
    whole, sharded = pair(name)
    expected, results = Expected(whole, sharded, tiny_inputs(name)), {}
    for way, offloaded in WAYS.items():
        model, host = copy.deepcopy(sharded), Host()
        with away_on(host, model):
            results[way] = expected.compare(offloaded(model), model)
    return results


@at_two_ranks_and_once_at_four(FAMILIES, FLUX2)
def test_offloaded_model_equals_itself_to_the_last_bit_with_the_same_sums(ranks: Pool, name: str) -> None:
    for results in ranks.run(measure, name):
        check(results)


def measure_adapted_first(name: str, ways: Any = PAIRED) -> dict[str, dict[str, Any]]:
    """Return what `measure` does, of a model that has an adapter before it is offloaded."""
    whole, sharded = pair(name)
    state, results = adapter(whole), {}
    for model in (whole, sharded):
        model.load_lora_adapter(state)
    expected = Expected(whole, sharded, tiny_inputs(name))
    for way in ways:
        model, host = copy.deepcopy(sharded), Host()
        with away_on(host, model):
            results[way] = expected.compare(WAYS[way](model), model)
    return results


@at_two_ranks_and_once_at_four(FAMILIES, FLUX2)
def test_model_with_an_adapter_is_offloaded_with_it(ranks: Pool, name: str) -> None:
    for results in ranks.run(measure_adapted_first, name):
        check(results, PAIRED)


def test_model_with_an_adapter_is_offloaded_every_way(two_ranks: Pool) -> None:
    for results in two_ranks.run(measure_adapted_first, FLUX2, list(WAYS)):
        check(results)


def measure_adapted_later(name: str, ways: Any = PAIRED) -> dict[str, dict[str, Any]]:
    """Return what `measure` does, of a model that gets an adapter while it is offloaded, and then without it again."""
    whole, sharded = pair(name)
    inputs, state, results = tiny_inputs(name), adapter(whole), {}
    base, adapted = outputs(sharded, inputs), copy.deepcopy(sharded)
    for model in (whole, adapted):
        model.load_lora_adapter(state)
    expected = Expected(whole, adapted, inputs)
    for way in ways:
        model, host = copy.deepcopy(sharded), Host()
        with away_on(host, model):
            target = WAYS[way](model)
            _called(target, model, inputs)
            model.load_lora_adapter(state, _pipeline=None if target is model else target)
            result = expected.compare(target, model)
            model.unload_lora()
            results[way] = {**result, "unloaded": _same(_called(target, model, inputs), base)}
    return results


@at_two_ranks_and_once_at_four(FAMILIES, FLUX2)
def test_offloaded_model_gets_an_adapter_and_loses_it(ranks: Pool, name: str) -> None:
    for results in ranks.run(measure_adapted_later, name):
        check(results, PAIRED)
        assert all(result["unloaded"] for result in results.values())


def test_model_that_was_offloaded_any_way_gets_an_adapter_and_loses_it(two_ranks: Pool) -> None:
    ways = [way for way in WAYS if way != DIRECT]  # of which only a pipeline knows how to make it undone
    for results in two_ranks.run(measure_adapted_later, FLUX2, ways):
        check(results, ways)
        assert all(result["unloaded"] for result in results.values())


def _fused(way: str) -> float:
    whole, sharded = pair(FLUX2)
    state, host = adapter(whole), Host()
    for model in (whole, sharded):
        model.load_lora_adapter(state)
    with away_on(host, sharded):
        target = WAYS[way](sharded)
        for group in {h.group for m in sharded.modules() if (h := _group_hook(m))}:
            group.onload_()  # fused where the weights are: on a GPU's machine the host has them
        whole.fuse_lora(lora_scale=0.5, safe_fusing=True)
        sharded.fuse_lora(lora_scale=0.5, safe_fusing=True)
        return relative_error(
            _called(target, sharded, tiny_inputs(FLUX2)), outputs(whole, tiny_inputs(FLUX2))
        )


def _group_hook(module: nn.Module) -> Any:
    registry = getattr(module, "_diffusers_hook", None)
    return registry and registry.get_hook("group_offloading")


@pytest.mark.parametrize("way", [LEAVES, "stream of leaves", "stream of blocks"])
def test_adapter_is_fused_into_offloaded_groups(two_ranks: Pool, way: str) -> None:
    assert max(two_ranks.run(_fused, way)) < tolerances.FP32


# --- a real pipeline -------------------------------------------------------------------------------------------------


def _draw(way: str) -> tuple[float, int]:
    logging.disable_progress_bar()
    transformer = Flux2Transformer2DModel.from_pretrained(
        demo_model_path(),
        subfolder="transformer",
        parallel_config=TensorParallelConfig(dist.get_world_size()),
    )
    pipeline = DiffusionPipeline.from_pretrained(demo_model_path(), transformer=transformer)
    pipeline.set_progress_bar_config(disable=True)

    def draw() -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.as_tensor(
            pipeline(prompt="a red circle", generator=generator, **{**CALL, "output_type": "np"}).images
        )

    before = draw()
    if way == "model":
        pipeline.enable_model_cpu_offload(device="cpu")
    else:
        pipeline.enable_group_offload(CPU, offload_type="leaf_level")
    components = [one for one in pipeline.components.values() if isinstance(one, nn.Module)]
    hooks = sum("forward" in vars(module) for one in components for module in one.modules())
    pictures = [draw(), draw()]
    return max(float((picture - before).abs().max()) for picture in pictures), hooks


@pytest.mark.parametrize(("way", "hooks"), [("model", 3), ("groups", 50)])
def test_pipeline_with_a_sharded_transformer_draws_the_same_picture(
    two_ranks: Pool, way: str, hooks: int
) -> None:
    for difference, found in two_ranks.run(_draw, way):
        assert difference == 0
        assert found >= hooks


def _others_only() -> tuple[float, bool]:
    model, inputs, host = sharded_copy(tiny_model(FLUX2)), tiny_inputs(FLUX2), Host()
    pipeline, before = Holder(Encoder(), model), outputs(model, inputs)
    with away_on(host, pipeline.encoder):
        pipeline.enable_group_offload(CPU, offload_type="leaf_level", exclude_modules=["transformer"])
        away = share_away(pipeline.encoder) - share_away(model)
        return away, host.brought == 0 and _same(
            _called(pipeline, model, inputs), before
        ) and host.brought > 0


def test_other_components_are_offloaded_beside_a_sharded_one(two_ranks: Pool) -> None:
    for away, same in two_ranks.run(_others_only):
        assert away == 1
        assert same


# --- saving, and training, afterwards --------------------------------------------------------------------------------


def _save(source: Path, target: Path, way: str, sharded: bool) -> bool:
    config = TensorParallelConfig(dist.get_world_size(), check=False)
    model = Flux2Transformer2DModel.from_pretrained(source, parallel_config=config)
    offloaded = WAYS[way](model)
    _called(offloaded, model, tiny_inputs(FLUX2))
    model.save_pretrained(target, sharded=sharded)
    return any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("way", [LAYERS, DIRECT, LEAVES, "pipeline.enable_group_offload"])
def test_offloaded_model_is_saved_as_it_was_read(
    two_ranks: Pool, tmp_path: Path, way: str, sharded: bool
) -> None:
    whole = save_tiny(FLUX2, tmp_path / "source")
    for on_meta in two_ranks.run(_save, tmp_path / "source", tmp_path / "target", way, sharded):
        assert on_meta == (way in (LAYERS, DIRECT))
    saved = Flux2Transformer2DModel.from_pretrained(tmp_path / "target").state_dict()
    assert saved.keys() == whole.state_dict().keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in whole.state_dict().items())


def _gradients(name: str, adapted: bool) -> tuple[float, int]:
    """Return the error of the gradients of whole parameters, and of how many, once a model is offloaded no more."""
    whole, sharded = pair(name)
    state = adapter(whole)
    for model in (whole, sharded) if adapted else ():
        model.load_lora_adapter(state)
    pipeline = Holder(Encoder(), sharded)
    pipeline._exclude_from_cpu_offload = ["encoder"]
    pipeline.enable_sequential_cpu_offload(device="cpu")
    _called(pipeline, sharded, tiny_inputs(name))
    pipeline.remove_all_hooks()
    errors = []
    for model in (whole, sharded):
        sum(output.square().mean() for output in call(model, tiny_inputs(name))).backward()
    mine = dict(sharded.named_parameters())
    for path, parameter in whole.named_parameters():
        if mine[path].shape == parameter.shape and parameter.grad is not None:
            errors.append(relative_error(mine[path].grad, parameter.grad))
    return max(errors), len(errors)


@pytest.mark.parametrize("adapted", [False, True])
def test_model_that_was_offloaded_trains_as_one_process(two_ranks: Pool, adapted: bool) -> None:
    for error, count in two_ranks.run(_gradients, FLUX, adapted):
        assert error < tolerances.FP32
        assert count > 20


# --- what is refused -------------------------------------------------------------------------------------------------


def _raised(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Asked:
    """What diffusers and accelerate would be asked for, on a machine where each rank has a GPU of its own."""

    def __init__(self) -> None:
        self.model = sharded_copy(tiny_model(FLUX2))
        self.pipeline = Holder(Encoder(), self.model)
        sharding_of(self.model).group.device = torch.device("cuda", dist.get_rank())
        self.seen: list[str] = []

    def model_offload(self, **where: Any) -> None:
        def enable_model_cpu_offload(pipeline: Any, gpu_id: Any = None, device: Any = None) -> None:
            self.seen.append(str(device))

        calls._enabling(enable_model_cpu_offload)(self.pipeline, **where)

    def group_offload(self, device: Any, path: Any = None) -> None:
        def _apply(module: Any, config: Any) -> None:
            self.seen.append(str(config.onload_device))

        leaf = group_offloading.GroupOffloadingType.LEAF_LEVEL
        config = group_offloading.GroupOffloadingConfig(
            torch.device(device), CPU, leaf, False, False, False, offload_to_disk_path=path
        )
        calls._applying(_apply)(self.model, config)

    def pipeline_groups(self, device: Any, path: Any = None) -> None:
        def enable(pipeline: Any, onload_device: Any, offload_to_disk_path: Any = None) -> None:
            self.seen.append(str(onload_device))

        calls._enabling_groups(enable)(self.pipeline, torch.device(device), offload_to_disk_path=path)

    def part(self, device: Any, path: Any = None) -> None:
        def attach_align_device_hook(module: Any, execution_device: Any, weights_map: Any = None) -> None:
            self.seen.append(str(execution_device))

        weights = {} if path is None else object()
        block = self.model.transformer_blocks[0]
        offload._attaching(attach_align_device_hook)(block, execution_device=device, weights_map=weights)

    def hook(self, device: Any) -> None:
        def add_hook_to_module(module: Any, hook: Any, append: bool) -> None:
            self.seen.append(str(hook.execution_device))

        offload._adding(add_hook_to_module)(self.model, accelerate.hooks.CpuOffload(device), append=True)


def _where(method: str, by_rank: list[dict[str, Any]]) -> tuple[str, list[str]]:
    asked = Asked()
    message = _raised(getattr(asked, method), **by_rank[dist.get_rank()])
    return message, asked.seen


_EACH = ["model_offload", "group_offload", "pipeline_groups", "part", "hook"]
_OWN = [{"device": f"cuda:{rank}"} for rank in range(2)]


@pytest.mark.parametrize(
    ("method", "by_rank"),
    [
        ("model_offload", [{}, {}]),
        ("model_offload", [{"gpu_id": 0}, {"gpu_id": 1}]),
        ("model_offload", [{"gpu_id": 0, "device": "cuda"}, {"gpu_id": 1, "device": "cuda"}]),
        *((method, [{"device": "cuda"}] * 2) for method in _EACH),
        *((method, _OWN) for method in _EACH),
    ],
)
def test_each_rank_brings_its_slices_to_its_own_device(
    two_ranks: Pool, method: str, by_rank: list[dict[str, Any]]
) -> None:
    for rank, (message, seen) in enumerate(two_ranks.run(_where, method, by_rank)):
        assert message == "no error"
        assert seen == [f"cuda:{rank}"]


@pytest.mark.parametrize(
    ("method", "by_rank", "said"),
    [
        ("model_offload", [{"gpu_id": 0}] * 2, "device cuda:0 is not that of rank 1 of 2, which is cuda:1"),
        ("model_offload", [{"gpu_id": r, "device": "cuda:0"} for r in range(2)], "exclude each other"),
        *((method, [{"device": "cuda:0"}] * 2, "is not that of rank 1 of 2") for method in _EACH),
        *((method, [{"device": "cuda:0"}, {"device": "cpu"}], "on rank 1 of 2") for method in _EACH),
        *(
            (method, [{"device": "cuda"}, {"device": "cuda", "path": "/no/such"}], "each other's slices")
            for method in ("group_offload", "pipeline_groups", "part")
        ),
    ],
)
def test_device_of_another_rank_and_shared_files_are_refused_on_every_rank(
    two_ranks: Pool, method: str, by_rank: list[dict[str, Any]], said: str
) -> None:
    for message, seen in two_ranks.run(_where, method, by_rank):
        assert message.startswith("UnsupportedOption")
        assert said in message
        assert seen == []


def _refused() -> dict[str, str]:
    model, inputs = sharded_copy(tiny_model(FLUX2)), tiny_inputs(FLUX2)
    pipeline, before = Holder(Encoder(), model), outputs(model, inputs)
    found = {
        "accelerate": _raised(accelerate.cpu_offload, model, "cuda:0"),
        "hook": _raised(accelerate.cpu_offload_with_hook, model, "cuda:0"),
        "groups": _raised(model.enable_group_offload, "cuda:0", offload_type="leaf_level"),
        "pipeline's groups": _raised(
            pipeline.enable_group_offload, torch.device("cuda"), offload_type="leaf_level"
        ),
        "by model": _raised(pipeline.enable_model_cpu_offload),
        "by layer": _raised(pipeline.enable_sequential_cpu_offload),
        "by layer, there": _raised(pipeline.enable_sequential_cpu_offload, device="cuda"),
    }
    assert _same(outputs(model, inputs), before)
    modules = [*model.modules(), *pipeline.encoder.modules()]
    assert not [module for module in modules if hasattr(module, "_hf_hook") or _group_hook(module)]
    accelerate.cpu_offload(model, "cpu")
    state = adapter(tiny_model(FLUX2))
    found["adapter"] = _raised(model.load_lora_adapter, state)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    model.load_lora_adapter(state)
    accelerate.cpu_offload(model, "cpu")
    found |= {name: _raised(getattr(model, name)) for name in ("fuse_lora", "unfuse_lora")}
    return found


def test_refused_call_leaves_the_model_as_it_was(two_ranks: Pool) -> None:
    for found in two_ranks.run(_refused):
        for name in ("by model", "by layer"):
            assert "needs an accelerator" in found.pop(name)
        for name in ("adapter", "fuse_lora", "unfuse_lora"):
            assert found.pop(name).startswith("UnsupportedOperation")
        assert all("which is cpu" in message for message in found.values()), found


def _gradient_of_an_offloaded_adapter() -> str:
    model = sharded_copy(tiny_model(FLUX2))
    model.load_lora_adapter(adapter(tiny_model(FLUX2)))
    model.enable_group_offload(CPU, offload_type="leaf_level")
    return _raised(call, model, tiny_inputs(FLUX2))


def test_gradient_of_an_offloaded_adapter_is_refused(two_ranks: Pool) -> None:
    for message in two_ranks.run(_gradient_of_an_offloaded_adapter):
        assert "use torch.no_grad()" in message


# --- broken on purpose -----------------------------------------------------------------------------------------------


def _past_the_hooks(self: Any, x: Tensor, *args: Any) -> Tensor:
    """Return what a LoRA layer does, of weights that are taken without calling the layers that have them."""
    own = self.base_layer.enter(x)
    return self.base_layer.leave(self._add(self.active_adapters, own, self.base_layer.product(own)))


def _not_called() -> bool:
    model, host = sharded_copy(tiny_model(FLUX2)), Host()
    model.load_lora_adapter(adapter(tiny_model(FLUX2)))
    with away_on(host, model), mock.patch.object(lora_layers.LocalLoraLinear, "forward", _past_the_hooks):
        expected = outputs(model, tiny_inputs(FLUX2))
        return _same(_called(WAYS[LEAVES](model), model, tiny_inputs(FLUX2)), expected)


def _not_brought() -> bool:
    model, host = sharded_copy(tiny_model(WAN)), Host()
    expected = outputs(model, tiny_inputs(WAN))
    with away_on(host, model):
        target = WAYS[LEAVES](model)
        _group_hook(model.blocks[0].attn1.norm_q).group.onload_leader = model
        return _same(_called(target, model, tiny_inputs(WAN)), expected)


@pytest.mark.parametrize("broken", [_not_called, _not_brought])
def test_the_comparison_sees_weights_that_are_used_while_they_are_away(two_ranks: Pool, broken: Any) -> None:
    assert not any(two_ranks.run(broken))


def _gradients_lost() -> float:
    with mock.patch.object(offload, "_keep_gradient_hooks"):
        return _gradients(FLUX, False)[0]


def test_gradients_show_hooks_that_accelerate_has_dropped(two_ranks: Pool) -> None:
    assert min(two_ranks.run(_gradients_lost)) > tolerances.MISTAKE
