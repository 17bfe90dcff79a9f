"""Adapter files under the names that people give their tensors, loaded by diffusers' pipelines into a sharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline
from diffusers.utils import logging
from torch import Tensor

from shardwise import TensorParallelConfig, demo_model_path
from shardwise.demo.run import CALL
from shardwise.models import Flux2Transformer2DModel
from tests import tolerances
from tests.distributed.test_lora import FLUX, FLUX2, QWEN, error_of, pair
from tests.helpers import outputs, relative_error, tiny_inputs, tiny_model
from tests.lora import Flux2Pipeline, FluxPipeline, QwenPipeline, adapter
from tests.pool import Pool


def _factors(state: dict[str, Tensor], path: str) -> tuple[Tensor, Tensor]:
    return state[f"{path}.lora_A.weight"], state[f"{path}.lora_B.weight"]


def kohya_flux(whole: Any) -> dict[str, Tensor]:
    """The fused names of kohya's scripts: q, k and v are one."""
    own, state = adapter(whole, prefix=""), {}
    single = {"proj_out": "linear2", "norm.linear": "modulation_lin"}
    double = {
        "attn.to_out.0": "img_attn_proj",
        "attn.to_add_out": "txt_attn_proj",
        "ff.net.0.proj": "img_mlp_0",
        "ff.net.2": "img_mlp_2",
        "norm1.linear": "img_mod_lin",
    }
    names = {
        **{f"transformer_blocks.0.{ours}": f"double_blocks_0_{theirs}" for ours, theirs in double.items()},
        **{f"single_transformer_blocks.1.{o}": f"single_blocks_1_{t}" for o, t in single.items()},
    }
    for ours, theirs in names.items():
        down, up = _factors(own, ours)
        state |= {f"lora_unet_{theirs}.lora_down.weight": down, f"lora_unet_{theirs}.lora_up.weight": up}
        state[f"lora_unet_{theirs}.alpha"] = torch.tensor(2.0)
    ups = [_factors(own, f"transformer_blocks.1.attn.{x}")[1] for x in ("to_q", "to_k", "to_v")]
    fused = "lora_unet_double_blocks_1_img_attn_qkv"
    state[f"{fused}.lora_down.weight"] = _factors(own, "transformer_blocks.1.attn.to_q")[0]
    state[f"{fused}.lora_up.weight"] = torch.cat(ups)
    return state


def bfl_flux2(whole: Any) -> dict[str, Tensor]:
    """The names of the original FLUX.2: single blocks have one fused projection in front."""
    own, state = adapter(whole, prefix=""), {}
    names = {
        "single_transformer_blocks.0.attn.to_qkv_mlp_proj": "single_blocks.0.linear1",
        "single_transformer_blocks.0.attn.to_out": "single_blocks.0.linear2",
        "transformer_blocks.0.ff.linear_in": "double_blocks.0.img_mlp.0",
        "transformer_blocks.0.ff.linear_out": "double_blocks.0.img_mlp.2",
        "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
    }
    for ours, theirs in names.items():
        for factor, tensor in zip(("lora_A", "lora_B"), _factors(own, ours), strict=True):
            state[f"diffusion_model.{theirs}.{factor}.weight"] = tensor
    return state


def kohya_qwen(whole: Any) -> dict[str, Tensor]:
    """Underscores throughout, and an alpha."""
    own, state = adapter(whole, prefix=""), {}
    for path in ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_add_out", "img_in"):
        name = f"lora_unet_{path.replace('.', '_')}"
        down, up = _factors(own, path)
        state |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
        state[f"{name}.alpha"] = torch.tensor(1.5)
    return state


def plain(whole: Any) -> dict[str, Tensor]:
    """The names that diffusers writes."""
    return adapter(whole)


def grown(whole: Any) -> dict[str, Tensor]:
    """A control adapter, which reads twice the channels: diffusers makes the embedder wider."""
    state = adapter(whole)
    key = "transformer.x_embedder.lora_A.weight"
    state[key] = torch.cat([state[key], 0.5 * state[key]], 1)
    return state


NAMED: list[tuple[str, type[Any], Callable[[Any], dict[str, Tensor]]]] = [
    (FLUX, FluxPipeline, kohya_flux),
    (FLUX, FluxPipeline, plain),
    (FLUX2, Flux2Pipeline, bfl_flux2),
    (FLUX2, Flux2Pipeline, plain),
    (QWEN, QwenPipeline, kohya_qwen),
]


def _named(name: str, pipeline: type[Any], names: Callable[[Any], dict[str, Tensor]]) -> tuple[float, float]:
    whole, sharded = pair(name)
    inputs, state = tiny_inputs(name), names(whole)
    base = outputs(whole, inputs)
    for model in (whole, sharded):
        pipeline(model).load_lora_weights(dict(state), adapter_name="one")
    return error_of(sharded, whole, name), relative_error(outputs(whole, inputs), base)


@pytest.mark.parametrize(("name", "pipeline", "names"), NAMED, ids=lambda x: getattr(x, "__name__", x))
def test_pipeline_loads_files_of_any_names_that_diffusers_converts(
    two_ranks: Pool, name: str, pipeline: type[Any], names: Any
) -> None:
    for error, share in two_ranks.run(_named, name, pipeline, names):
        assert error < tolerances.FP32
        assert share > tolerances.MISTAKE


def _second() -> float:
    whole, sharded = pair(FLUX)
    for model in (whole, sharded):
        FluxPipeline(model).load_lora_weights(adapter(tiny_model(FLUX)), adapter_name="one")
        FluxPipeline(model).load_lora_weights(adapter(tiny_model(FLUX), seed=8, rank=5), adapter_name="two")
        model.set_adapters(["one", "two"], [0.5, 1.0])
    return error_of(sharded, whole, FLUX)


def test_pipeline_loads_a_second_file(two_ranks: Pool) -> None:
    assert max(two_ranks.run(_second)) < tolerances.FP32


def _grown() -> float:
    whole, sharded = pair(FLUX)
    state = grown(whole)
    for model in (whole, sharded):
        FluxPipeline(model).load_lora_weights(dict(state))
    inputs = tiny_inputs(FLUX)
    inputs["hidden_states"] = torch.cat([inputs["hidden_states"], -inputs["hidden_states"]], -1)
    return relative_error(outputs(sharded, inputs), outputs(whole, inputs))


def test_control_adapter_that_widens_the_embedder_equals_one_process(two_ranks: Pool) -> None:
    assert max(two_ranks.run(_grown)) < tolerances.FP32


@torch.inference_mode()
def _draw(pipeline: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return pipeline(
        prompt=["a red circle"],
        generator=generator,
        output_type="latent",
        **{**CALL, "num_inference_steps": 2},
    ).images


def _pipeline() -> dict[str, float]:
    """Handle an adapter through the embedded pipeline, and draw after each call."""
    logging.disable_progress_bar()
    whole = DiffusionPipeline.from_pretrained(demo_model_path())
    config = TensorParallelConfig(dist.get_world_size(), check=False)
    transformer = Flux2Transformer2DModel.from_pretrained(
        demo_model_path(), subfolder="transformer", parallel_config=config
    )
    sharded = DiffusionPipeline.from_pretrained(demo_model_path(), transformer=transformer)
    state = adapter(whole.transformer)
    steps: dict[str, Callable[[Any], Any]] = {
        "load": lambda p: p.load_lora_weights(state, adapter_name="one"),
        "weaken": lambda p: p.set_adapters(["one"], [0.2]),
        "fuse": lambda p: p.fuse_lora(components=["transformer"]),
        "unfuse": lambda p: p.unfuse_lora(components=["transformer"]),
        "unload": lambda p: p.unload_lora_weights(),
    }
    for pipeline in (whole, sharded):
        pipeline.set_progress_bar_config(disable=True)
    drawn, errors = {"nothing": _draw(whole)}, {}
    for step, call in steps.items():
        for pipeline in (whole, sharded):
            call(pipeline)
        drawn[step] = _draw(whole)
        errors[step] = relative_error(_draw(sharded), drawn[step])
    moved = [relative_error(drawn[step], drawn["nothing"]) for step in ("load", "weaken", "fuse")]
    return {**errors, "smallest change": min(moved)}


def test_adapters_are_handled_through_a_pipeline(two_ranks: Pool) -> None:
    for results in two_ranks.run(_pipeline):
        assert results.pop("smallest change") > tolerances.MISTAKE
        assert max(results.values()) < tolerances.FP32, results
