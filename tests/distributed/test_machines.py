"""Loading on machines with other numbers of cores than this one, in whatever mode of torch the caller is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
import torch.distributed as dist
from diffusers import TorchAoConfig
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig

import shardwise
from shardwise import TensorParallelConfig, demo_model_path, enable_parallelism
from shardwise.checkpoint import read
from shardwise.encoders import Qwen3ForCausalLM
from shardwise.models import Flux2Transformer2DModel
from shardwise.models.families import flux2
from tests import tolerances
from tests.helpers import outputs, relative_error, save_tiny, tiny_inputs, tiny_model
from tests.lora import adapter, config
from tests.machine import CORES, MODES, cores
from tests.pool import Pool, RankError
from tests.quantized import INT8, is_quantized, load, parts


def _config() -> TensorParallelConfig:
    return TensorParallelConfig(dist.get_world_size())


def _model(**options: Any) -> Any:
    return Flux2Transformer2DModel.from_pretrained(
        demo_model_path(), subfolder="transformer", parallel_config=_config(), **options
    )


def _encoder() -> Any:
    return Qwen3ForCausalLM.from_pretrained(
        demo_model_path(), subfolder="text_encoder", parallel_config=_config()
    )


def _pipeline() -> Any:
    return shardwise.DiffusionPipeline.from_pretrained(
        demo_model_path(), parallel_config=_config(), dtype=torch.float32
    )


def _in_memory() -> Any:
    """Shard a model that was made in no mode, whichever the caller is in."""
    with torch.inference_mode(False):
        model = diffusers.Flux2Transformer2DModel.from_pretrained(demo_model_path(), subfolder="transformer")
    return enable_parallelism(model, config=_config())


def _quantized() -> Any:
    kind = TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))
    return _model(quantization_config=kind, dtype=torch.float32)


def _with_lora() -> Any:
    model = _model()
    skeleton = diffusers.Flux2Transformer2DModel.from_config(dict(model.config))
    model.load_lora_adapter(adapter(skeleton), adapter_name="a")
    return model


WAYS: dict[str, Callable[[], Any]] = {
    "model": _model,
    "cast": partial(_model, dtype=torch.bfloat16),
    "encoder": _encoder,
    "pipeline": _pipeline,
    "in memory": _in_memory,
    "int8": _quantized,
    "LoRA": _with_lora,
}


def _loaded(way: str, count: int, mode: str) -> tuple[dict[str, Tensor], list[str], int, bool]:
    """Return what a rank holds after loading, what of it are inference tensors, the threads, and if modes are kept."""
    with cores(count), MODES[mode]():
        before = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        made = WAYS[way]()
        kept = before == (torch.is_inference_mode_enabled(), torch.is_grad_enabled())
    found = made.components if way == "pipeline" else {"": made}
    modules = {name: part for name, part in found.items() if isinstance(part, nn.Module)}
    tensors = {
        f"{name}.{path}": tensor.detach().clone()
        for name, module in modules.items()
        for path, tensor in _plain(module).items()
    }
    inference = [path for module in modules.values() for path in _of_inference(module)]
    threads = [module.load_report.threads for module in modules.values() if hasattr(module, "load_report")]
    return tensors, inference, max(threads, default=1), kept


def _plain(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module, and those of which its quantized ones consist."""
    found = {}
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_quantized(tensor):
            found |= {f"{path}.{part}": plain for part, plain in parts(tensor).items()}
        else:
            found[path] = tensor
    return found


def _of_inference(module: nn.Module) -> list[str]:
    return [path for path, tensor in _plain(module).items() if tensor.is_inference()]


def _all(way: str) -> dict[tuple[int, str], dict[str, Any]]:
    """Load on each number of cores in each mode, and return what came of it."""
    expected, _, _, _ = _loaded(way, 1, "neither")
    found = {}
    for count, mode in product(CORES, MODES):
        tensors, inference, threads, kept = _loaded(way, count, mode)
        same = tensors.keys() == expected.keys() and all(
            torch.equal(tensor, expected[path]) for path, tensor in tensors.items()
        )
        found[count, mode] = {"same": same, "inference": inference, "threads": threads, "kept": kept}
    return found


THREADS = {1: 1, 2: 1, 8: 4, 64: 4}
"""Number of cores -> of the threads by which each of two ranks reads."""


@pytest.mark.parametrize("way", WAYS)
def test_L4_weights_are_the_same_on_any_number_of_cores_in_any_mode(two_ranks: Pool, way: str) -> None:
    for found in two_ranks.run(_all, way):
        for (count, mode), result in found.items():
            threads = 1 if way == "in memory" else THREADS[count]
            wanted = {"same": True, "inference": [], "threads": threads, "kept": True}
            assert result == wanted, (count, mode)


def _in_the_callers_mode() -> None:
    """Load in inference mode, as if nothing left it and new threads were in no mode."""
    load = Flux2Transformer2DModel.from_pretrained.__func__.__wrapped__
    here = {"subfolder": "transformer", "parallel_config": _config()}
    with (
        mock.patch.object(read, "in_modes_of_this_thread", lambda function: function),
        cores(8),
        torch.inference_mode(),
    ):
        load(Flux2Transformer2DModel, demo_model_path(), dtype=torch.bfloat16, **here)


def test_threads_in_other_modes_than_the_caller_are_seen(two_ranks: Pool) -> None:
    with pytest.raises(RankError, match="Inplace update to inference tensor"):
        two_ranks.run(_in_the_callers_mode)


def _inputs(model: Any) -> dict[str, Any]:
    """Return inputs for the embedded model's transformer."""
    return flux2.example_inputs(dict(model.config), torch.Generator().manual_seed(0))


def _made_in_inference_mode(sharded_there: bool) -> bool:
    """Shard a model that was made in inference mode, and call it there; compare it with one that was not."""
    cls = diffusers.Flux2Transformer2DModel
    with torch.inference_mode():
        model = cls.from_pretrained(demo_model_path(), subfolder="transformer")
        assert all(parameter.is_inference() for parameter in model.parameters())
    with torch.inference_mode(sharded_there):
        enable_parallelism(model, config=_config())
    with torch.inference_mode():
        found = outputs(model, _inputs(model))
    model = _in_memory()
    return all(torch.equal(a, b) for a, b in zip(found, outputs(model, _inputs(model)), strict=True))


@pytest.mark.parametrize("sharded_there", [True, False])
def test_model_that_was_made_in_inference_mode_is_sharded(two_ranks: Pool, sharded_there: bool) -> None:
    assert two_ranks.run(_made_in_inference_mode, sharded_there) == [True, True]


def _trained() -> list[bool]:
    """Train an adapter on weights that were loaded in inference mode."""
    with torch.inference_mode():
        model = _with_lora()
    model.requires_grad_(False)
    factors = [p.requires_grad_() for name, p in model.named_parameters() if ".lora_" in name]
    sum(output.square().sum() for output in model(**_inputs(model), return_dict=False)).backward()
    return [p.grad is not None and bool(p.grad.abs().max() > 0) for p in factors]


def test_weights_that_were_loaded_in_inference_mode_can_be_trained(two_ranks: Pool) -> None:
    for trained in two_ranks.run(_trained):
        assert trained
        assert all(trained)


NAME = "Flux2Transformer2DModel"


def _fused(folder: Path, kind: str | None) -> tuple[dict[str, list[str]], float]:
    """Fuse an adapter in inference mode and take it out; return what is of it then, and the change of the output."""
    inputs, inference = tiny_inputs(NAME), {}
    with torch.inference_mode():
        model = load(NAME, folder, kind, sharded=True)
        model.load_lora_adapter(adapter(tiny_model(NAME, stock=True)), adapter_name="a")
        before = outputs(model, inputs)
        for call in (model.fuse_lora, model.unfuse_lora):
            call()
            inference[call.__name__] = _of_inference(model)
        return inference, relative_error(outputs(model, inputs), before)


@pytest.mark.parametrize("kind", [None, INT8])
def test_weights_that_an_adapter_is_fused_into_stay_ordinary(
    two_ranks: Pool, tmp_path: Path, kind: str | None
) -> None:
    save_tiny(NAME, tmp_path)
    for inference, error in two_ranks.run(_fused, tmp_path, kind):
        assert inference == {"fuse_lora": [], "unfuse_lora": []}
        assert kind == INT8 or error < tolerances.FP32  # int8 weights are rounded anew


def _made(folder: Path) -> dict[str, list[str]]:
    """Make weights in inference mode by other calls than those of a sharded load; return what is of it then."""
    file = folder / "diffusion_pytorch_model.safetensors"
    with torch.inference_mode():
        model = load(NAME, folder, sharded=True)
        model.add_adapter(config(tiny_model(NAME, stock=True)))
        single = Flux2Transformer2DModel.from_single_file(str(file), config=str(folder))
    return {"add_adapter": _of_inference(model), "from_single_file": _of_inference(single)}


def test_weights_that_other_calls_make_are_ordinary(two_ranks: Pool, tmp_path: Path) -> None:
    save_tiny(NAME, tmp_path)
    assert two_ranks.run(_made, tmp_path) == [{"add_adapter": [], "from_single_file": []}] * 2
