"""The library on a device that is no CPU, two ranks: the simulated one in every run, a real one where it is chosen."""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import UUID

import accelerate
import diffusers
import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers.hooks import apply_group_offloading

import shardwise
from shardwise import TensorParallelConfig, demo_model_path
from shardwise.checkpoint import read, staging
from shardwise.checkpoint.staging import PinnedSlots, TorchAccelerator
from shardwise.errors import GroupError
from shardwise.generate import degree, worker
from shardwise.generate.progress import peak_memory
from shardwise.generate.request import Request
from shardwise.launch.group import uses_cuda
from shardwise.runtime.devices import accelerator, identity
from shardwise.runtime.group import TensorParallelGroup
from shardwise.runtime.shard import sharding_of
from tests import devices, tolerances
from tests.devices import no_faults
from tests.helpers import outputs, relative_error, save_tiny, tiny_inputs, tiny_model
from tests.lora import adapter
from tests.offload import Encoder, Holder
from tests.pool import Pool, RankError
from tests.quantized import INT8, errors
from tests.whole_pipelines import PROMPT, draw_embedded

pytestmark = pytest.mark.any_device
only_simulated = pytest.mark.skipif(
    devices.CHOSEN not in ("cpu", "sim"), reason="a real device cannot be broken"
)

NAME, VIDEO = "Flux2Transformer2DModel", "WanTransformer3DModel"
SLOT = 256
"""Bytes of a pinned slot, so that a tiny model needs many."""


def world() -> TensorParallelConfig:
    return TensorParallelConfig(dist.get_world_size(), check=False)


def own() -> torch.device:
    return TensorParallelGroup.of(world()).device


def load(name: str, folder: Path, **options: Any) -> Any:
    return getattr(shardwise.models, name).from_pretrained(folder, parallel_config=world(), **options)


def small_slots(stage: type[PinnedSlots] = PinnedSlots) -> Any:
    return mock.patch.object(read, "stage_for", lambda device: stage(TorchAccelerator(device), limit=SLOT))


# --- loading and saving ----------------------------------------------------------------------------------------------


def _loaded(name: str, folder: Path, target: Path) -> dict[str, Any]:
    whole = tiny_model(name, stock=True)
    with no_faults(), small_slots():
        model = load(name, folder)
        half = load(name, folder, dtype=torch.bfloat16)
    model.save_pretrained(target)
    tensors = [*model.parameters(), *model.buffers()]
    return {
        "devices": {str(tensor.device) for tensor in tensors} - {str(own())},
        "cast": all(
            torch.equal(a, b.to(a.dtype)) for a, b in zip(half.parameters(), model.parameters(), strict=True)
        ),
        "error": relative_error(outputs(model, tiny_inputs(name)), outputs(whole, tiny_inputs(name))),
        "staging": model.load_report.staging_bytes,
        "own": str(own()),
    }


@pytest.mark.parametrize("name", [NAME, VIDEO])
def test_slices_reach_the_device_and_come_back(device_ranks: Pool, tmp_path: Path, name: str) -> None:
    save_tiny(name, tmp_path / "whole")
    found = device_ranks.run(_loaded, name, tmp_path / "whole", tmp_path / "saved")
    for result in found:
        assert not result["devices"]
        assert result["cast"]
        assert result["error"] < tolerances.FP32
        assert result["staging"] % (staging.SLOTS * SLOT) == 0
        assert result["staging"] > 0
    assert devices.SHARED or len({result["own"] for result in found}) == 2
    file = "diffusion_pytorch_model.safetensors"
    assert (tmp_path / "saved" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


class Impatient(PinnedSlots):
    """Takes slots back without waiting for what is copied out of them."""

    def room(self, nbytes: int) -> torch.Tensor:
        self._arrivals = [None] * len(self._slots)
        return super().room(nbytes)


class Careless(PinnedSlots):
    """Ends without waiting."""

    def finish(self) -> None:
        pass


def _broken(folder: Path, kind: str) -> str:
    """Return what is seen of a load that lacks a wait, or loads into pageable memory."""
    from tests import accelerator

    broken: Any = {
        "slots taken back": lambda: small_slots(Impatient),
        "no wait at the end": lambda: small_slots(Careless),
        "memory not pinned": lambda: mock.patch.object(
            TorchAccelerator, "pinned", lambda self, nbytes: torch.empty(nbytes, dtype=torch.uint8)
        ),
    }
    right = load(NAME, folder)
    accelerator.faults.clear()
    with broken[kind]():
        model = load(NAME, folder)
    pairs = zip(model.parameters(), right.parameters(), strict=True)
    if not all(torch.equal(ours, theirs) for ours, theirs in pairs):
        return "wrong"
    return "blocks" if any("blocks" in fault for fault in accelerator.faults) else "right"


@only_simulated
@pytest.mark.parametrize(
    ("kind", "seen"),
    [("slots taken back", "wrong"), ("no wait at the end", "wrong"), ("memory not pinned", "blocks")],
)
def test_load_without_a_wait_or_pinned_memory_is_seen(
    device_ranks: Pool, tmp_path: Path, kind: str, seen: str
) -> None:
    save_tiny(NAME, tmp_path)
    assert device_ranks.run(_broken, tmp_path, kind) == [seen] * 2


def _failing(folder: Path, careful: bool) -> tuple[str, list[str]]:
    """Return the error and the faults of a load whose fifth read fails, with copies on their way."""
    from tests import accelerator

    fill, calls = read.OpenFiles.fill, iter(range(100))

    def failing(files: Any, part: Any, target: Any) -> None:
        if next(calls) == 4:
            raise OSError("the disk is gone")
        fill(files, part, target)

    accelerator.faults.clear()
    arrived = (
        nullcontext() if careful else mock.patch.object(read._Lane, "_arrived", return_value=nullcontext())
    )
    with mock.patch.object(read.OpenFiles, "fill", failing), small_slots(), arrived:
        try:
            load(NAME, folder)
        except OSError as error:
            message = str(error)
    gc.collect()  # the error holds the tensors by its frames
    return message, list(accelerator.faults)


@only_simulated
def test_load_that_fails_leaves_no_copy_on_its_way_into_memory_that_it_frees(
    device_ranks: Pool, tmp_path: Path
) -> None:
    save_tiny(NAME, tmp_path)
    for message, faults in device_ranks.run(_failing, tmp_path, True):
        assert (message, faults) == ("the disk is gone", [])
    for _, faults in device_ranks.run(_failing, tmp_path, False):
        assert faults  # the negative control


def _out_of_memory(folder: Path) -> str:
    from tests import accelerator

    group = TensorParallelGroup.of(world())
    room = accelerator.devices[group.rank].room_for(2**30 if group.rank == 0 else 2**12)
    with room:
        try:
            load(NAME, folder)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


@only_simulated
def test_device_of_one_rank_that_is_full_is_an_error_on_both(device_ranks: Pool, tmp_path: Path) -> None:
    save_tiny(NAME, tmp_path)
    first, second = device_ranks.run(_out_of_memory, tmp_path)
    assert first.startswith("RankFailure")
    assert "out of memory" in first
    assert second.startswith("OutOfMemoryError")


# --- forward passes --------------------------------------------------------------------------------------------------


def _waits(folder: Path) -> dict[str, int]:
    """Return how often the host waits in a forward, whole and sharded, and what a wrong device says."""
    from tests import accelerator

    inputs = {k: devices.to(own(), v) for k, v in tiny_inputs(NAME).items()}
    found = {}
    for kind, model in {
        "whole": tiny_model(NAME, stock=True).to(own()),
        "sharded": load(NAME, folder),
    }.items():
        with torch.inference_mode():
            model(**inputs)
            before = copy.copy(accelerator.waits)
            model(**inputs)
        found[kind] = accelerator.waits.copies + accelerator.waits.values - before.copies - before.values
    return found


@only_simulated
def test_sharding_adds_no_wait_for_the_device_to_a_forward(device_ranks: Pool, tmp_path: Path) -> None:
    save_tiny(NAME, tmp_path)
    for found in device_ranks.run(_waits, tmp_path):
        assert found["sharded"] <= found["whole"]


def _on_the_host(folder: Path) -> None:
    with torch.inference_mode():
        load(NAME, folder)(**tiny_inputs(NAME))


def test_inputs_on_another_device_are_an_error(device_ranks: Pool, tmp_path: Path) -> None:
    save_tiny(NAME, tmp_path)
    with pytest.raises(RankError, match="same device"):
        device_ranks.run(_on_the_host, tmp_path)


# --- quantization and adapters ---------------------------------------------------------------------------------------


def _quantized(folder: Path) -> tuple[float, float]:
    return errors(NAME, folder, INT8).means


def test_quantized_model_is_as_exact_as_one_process(device_ranks: Pool, tmp_path: Path) -> None:
    save_tiny(NAME, tmp_path)
    for sharded, whole in device_ranks.run(_quantized, tmp_path):
        assert 0 < sharded < 1.2 * whole


def _adapted(folder: Path) -> dict[str, Any]:
    whole, model = tiny_model(NAME, stock=True), load(NAME, folder)
    plain = outputs(whole, tiny_inputs(NAME))
    state = adapter(whole)
    for one in (whole, model):
        one.load_lora_adapter(state, prefix="transformer")
    expected = outputs(whole, tiny_inputs(NAME))
    found = {"error": relative_error(outputs(model, tiny_inputs(NAME)), expected)}
    found["devices"] = {str(p.device) for p in model.parameters()} == {str(own())}
    model.fuse_lora()
    found["fused"] = relative_error(outputs(model, tiny_inputs(NAME)), expected)
    found["changes"] = relative_error(plain, expected)
    return found


def test_adapter_is_cut_on_the_device(device_ranks: Pool, tmp_path: Path) -> None:
    save_tiny(NAME, tmp_path)
    for found in device_ranks.run(_adapted, tmp_path):
        assert found["devices"]
        assert max(found["error"], found["fused"]) < tolerances.FP32
        assert found["changes"] > tolerances.MISTAKE


# --- offloading ------------------------------------------------------------------------------------------------------


def _groups(kind: str, **options: Any) -> Callable[[Any], Any]:
    def offload(model: Any) -> Any:
        model.enable_group_offload(own().type, offload_type=kind, **options)
        return model

    return offload


def _function(model: Any) -> Any:
    apply_group_offloading(model, own(), offload_type="block_level", num_blocks_per_group=1)
    return model


def _hooked(model: Any) -> Any:
    accelerate.cpu_offload_with_hook(model, own())
    return model


def _by_pipeline(call: str, **options: Any) -> Callable[[Any], Any]:
    def offload(model: Any) -> Any:
        encoder = Encoder()
        encoder.device = own()
        pipeline = Holder(encoder, model)
        pipeline._exclude_from_cpu_offload = ["encoder"]
        getattr(pipeline, call)(**options)
        return pipeline.transformer

    return offload


BLOCKS = {"num_blocks_per_group": 1}
WAYS: dict[str, Callable[[Any], Any]] = {
    "blocks": _groups("block_level", num_blocks_per_group=2),
    "leaves": _groups("leaf_level"),
    "a stream of blocks": _groups("block_level", use_stream=True, **BLOCKS),
    "a stream of leaves": _groups("leaf_level", use_stream=True),
    "a recorded stream": _groups("leaf_level", use_stream=True, record_stream=True),
    "a stream, pinned late": _groups("block_level", use_stream=True, low_cpu_mem_usage=True, **BLOCKS),
    "apply_group_offloading": _function,
    "cpu_offload": lambda model: accelerate.cpu_offload(model, own(), offload_buffers=True),
    "cpu_offload_with_hook": _hooked,
    "enable_model_cpu_offload": _by_pipeline("enable_model_cpu_offload"),
    "enable_sequential_cpu_offload": _by_pipeline("enable_sequential_cpu_offload"),
}


@torch.no_grad()
def _twice(model: Any) -> list[list[torch.Tensor]]:
    """Return the outputs of two forwards: of a stream, the first is another than the next."""
    inputs = {k: devices.to(own(), v) for k, v in tiny_inputs(NAME).items()}
    return [[t.cpu() for t in model(**inputs, return_dict=False)] for _ in range(2)]


def _offloaded(folder: Path) -> dict[str, dict[str, Any]]:
    found, expected = {}, _twice(load(NAME, folder))[0]
    for way, offload in WAYS.items():
        model = load(NAME, folder)
        held = sum(p.nbytes for p in model.parameters() if p.device == own())
        with no_faults():
            model = offload(model)
            away = held - sum(p.nbytes for p in model.parameters() if p.device == own())
            results = _twice(model)
        found[way] = {
            "same": all(
                torch.equal(a, e) for result in results for a, e in zip(result, expected, strict=True)
            ),
            "away": away / held,
        }
    return found


def test_model_is_offloaded_every_way(device_ranks: Pool, tmp_path: Path) -> None:
    save_tiny(NAME, tmp_path)
    for found in device_ranks.run(_offloaded, tmp_path):
        assert found == {way: {"same": True, "away": 1} for way in WAYS}


def _not_waited_for(folder: Path) -> bool:
    """Return whether outputs are right where nothing waits for the stream that brings the weights."""
    from tests.accelerator.streams import Stream

    expected = _twice(load(NAME, folder))[0]
    model = WAYS["a stream of blocks"](load(NAME, folder))
    with mock.patch.object(Stream, "synchronize", return_value=None):
        results = _twice(model)
    torch.accelerator.synchronize()
    return all(torch.equal(a, e) for result in results for a, e in zip(result, expected, strict=True))


@only_simulated
def test_weights_that_are_used_before_their_stream_has_brought_them_are_seen(
    device_ranks: Pool, tmp_path: Path
) -> None:
    save_tiny(NAME, tmp_path)
    assert device_ranks.run(_not_waited_for, tmp_path) == [False, False]


# --- whole pipelines -------------------------------------------------------------------------------------------------


STEPS = {"num_inference_steps": 3}


def _pipelines() -> dict[str, Any]:
    """Return what a pipeline draws on the ranks, before and after it is offloaded, and where its parts are."""
    pipeline = shardwise.DiffusionPipeline.from_pretrained(
        demo_model_path(), parallel_config=world(), dtype=torch.float32
    )
    parts = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
    places = {str(p.device) for part in parts for p in part.parameters()}
    found = {"places": places == {str(own())}, "report": pipeline.parallel_report.as_dict()}
    found["drawn"] = draw_embedded(pipeline, **STEPS)
    pipeline.enable_model_cpu_offload()
    found["offloaded"] = draw_embedded(pipeline, **STEPS)
    return found


@pytest.fixture(scope="module")
def picture() -> np.ndarray:
    whole = diffusers.DiffusionPipeline.from_pretrained(demo_model_path(), dtype=torch.float32)
    return draw_embedded(whole, **STEPS)


def test_pipeline_draws_the_picture_of_one_process(device_ranks: Pool, picture: np.ndarray) -> None:
    for found in device_ranks.run(_pipelines):
        assert found["places"]
        assert int(np.abs((found["drawn"] * 255).round() - (picture * 255).round()).max()) <= tolerances.PIXEL
        assert np.array_equal(found["offloaded"], found["drawn"])


@pytest.mark.parametrize("options", [{"tp": 2, "spread_decode": True}, {"cfg": 2}, {"dp": 2}])
def test_command_draws_and_tells_the_memory_of_its_devices(
    device_ranks: Pool, tmp_path: Path, options: dict[str, Any]
) -> None:
    count = 2 if "dp" in options else 1
    request = Request(
        "embedded",
        (PROMPT,) * count,
        steps=2,
        dtype="float32",
        out=str(tmp_path),
        events=str(tmp_path / "events"),
        **options,
    )
    files = device_ranks.run(worker.generate, request)
    assert len(files[0]) == count
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [e["device"].partition(":")[0] for e in events if e["event"] == "start"] == [device_ranks.device]
    assert device_ranks.run(_peaks) == [True, True]


def _peaks() -> bool:
    device = own()
    return peak_memory(device) == torch.accelerator.max_memory_allocated(device) > 0


# --- which device ----------------------------------------------------------------------------------------------------


def _meeting(index: int | None, uuids: bool) -> Any:
    """Return which ranks meet where all say they are `sim:index`, of devices that are another for each rank or not."""
    from tests.accelerator import devices as simulated

    rank = dist.get_rank()
    torch.accelerator.set_device_index(rank if index is None else index)
    changed = mock.patch.object(simulated[0], "uuid", UUID(int=rank)) if uuids else nullcontext()
    try:
        with changed:
            return TensorParallelGroup.of(world()).meet()
    except GroupError as error:
        return str(error)
    finally:
        torch.accelerator.set_device_index(rank)


@only_simulated
def test_ranks_meet_by_what_their_devices_are_and_not_by_their_numbers(device_ranks: Pool) -> None:
    assert device_ranks.run(_meeting, None, False) == [(0, 1), (0, 1)]
    assert device_ranks.run(_meeting, 0, True) == [(0, 1), (0, 1)]
    for message in device_ranks.run(_meeting, 0, False):
        assert "ranks 0 and 1 both use sim:0" in message
        assert "set_device_index" in message


def _tp_auto(nbytes: int) -> str:
    from contextlib import ExitStack

    from tests import accelerator

    with ExitStack() as stack:
        for device in accelerator.devices:
            stack.enter_context(device.room_for(nbytes))
        return f"{degree.choose_degree(Request('embedded', ('x',)), None)}"


@only_simulated
def test_tp_auto_counts_the_memory_of_the_devices(device_ranks: Pool) -> None:
    assert device_ranks.run(_tp_auto, 2**30)[0].startswith("(1,")
    assert device_ranks.run(_tp_auto, 8 * 2**20)[0].startswith("(2,")


def _chosen() -> list[Any]:
    found: list[Any] = [uses_cuda(2, None), uses_cuda(2, "cpu"), uses_cuda(3, None), uses_cuda(2, "sim")]
    for ranks, device in ((3, "sim"), (1, "cuda")):
        try:
            found.append(uses_cuda(ranks, device))
        except shardwise.errors.ConfigError as error:
            found.append(str(error))
    return found


def _as_on_a_mac() -> list[Any]:
    """Return what is taken where the accelerator has no backend but gloo, or none at all, beside what there is."""
    found: list[Any] = [accelerator() is not None]
    for answer in ({"return_value": "gloo"}, {"side_effect": ValueError}):
        with mock.patch.object(dist, "get_default_backend_for_device", **answer):
            found += [accelerator(), uses_cuda(1, None), TensorParallelGroup.of(world()).device.type]
    return found


@only_simulated
def test_accelerator_that_connects_no_ranks_is_not_taken(device_ranks: Pool) -> None:
    assert device_ranks.run(_as_on_a_mac)[0] == [True, *[None, False, "cpu"] * 2]


@only_simulated
def test_launcher_takes_the_accelerator_that_torch_has(device_ranks: Pool) -> None:
    (*found, few, other) = device_ranks.run(_chosen)[0]
    assert found == [True, False, False, True]
    assert "3 ranks need a SIM device each, this machine has 2" in few
    assert "1 ranks need a CUDA device each, this machine has 0" in other


def test_devices_are_told_apart(device_ranks: Pool) -> None:
    assert devices.SHARED or len(set(device_ranks.run(_identity))) == 2


def _identity() -> str:
    assert sharding_of(torch.nn.Linear(1, 1)) is None
    return identity(own())
