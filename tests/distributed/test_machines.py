"""Loading on machines with other numbers of cores than this one, in whatever mode of torch the caller is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import TorchAoConfig
from PIL import Image
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig

import shardwise
from shardwise import TensorParallelConfig, demo_model_path, enable_parallelism
from shardwise.checkpoint import read
from shardwise.demo import CALL
from shardwise.encoders import Qwen3ForCausalLM
from shardwise.models import Flux2Transformer2DModel
from shardwise.models.families import flux2
from tests import tolerances
from tests.helpers import outputs
from tests.lora import adapter
from tests.machine import CORES, MODES, cores, environment
from tests.pool import Pool, RankError
from tests.quantized import is_quantized, parts

BIN = Path(sys.executable).parent
PROMPT = "a red circle on a white background"
SEED = 7


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
    inference = [
        path
        for module in modules.values()
        for path, tensor in _plain(module).items()
        if tensor.is_inference()
    ]
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


@pytest.mark.parametrize("way", WAYS)
def test_L4_weights_are_the_same_on_any_number_of_cores_in_any_mode(two_ranks: Pool, way: str) -> None:
    for found in two_ranks.run(_all, way):
        for (count, mode), result in found.items():
            threads = 1 if way == "in memory" else max(1, min(read.MAX_THREADS, count // 2))
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


@pytest.fixture(scope="module")
def one_process() -> np.ndarray:
    """The picture as stock diffusers draws it in this process."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(demo_model_path())
    pipeline.set_progress_bar_config(disable=True)
    picture = pipeline(prompt=PROMPT, generator=torch.Generator().manual_seed(SEED), **CALL).images[0]
    return np.asarray(picture).astype(int)


def test_generate_draws_the_same_picture_where_a_rank_has_four_cores(
    one_process: np.ndarray, tmp_path: Path
) -> None:
    command = [BIN / "shardwise", "generate", "embedded", "--prompt", PROMPT, "--tp", "2"]
    ended = subprocess.run(
        [*map(str, command), "--out", str(tmp_path), "--seed", str(SEED)],
        env=environment(tmp_path, 8),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    with Image.open(tmp_path / f"seed-{SEED}.png") as picture:
        assert np.abs(np.asarray(picture).astype(int) - one_process).max() <= tolerances.PIXEL
