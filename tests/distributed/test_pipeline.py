"""Whole pipelines with sharded components, against diffusers' own in one process."""

from __future__ import annotations

import gc
import json
import unittest
import weakref
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import ParallelConfig, TensorParallelConfig, demo_model_path
from shardwise.demo import CALL
from shardwise.errors import (
    PlanError,
    UnsupportedState,
)
from tests import tolerances
from tests.pool import Pool
from tests.whole_pipelines import SMALL, draw, draw_embedded, embedded_copy, flux2_like, save_small


def load(folder: Any, **options: Any) -> Any:
    config = TensorParallelConfig(dist.get_world_size())
    return shardwise.DiffusionPipeline.from_pretrained(folder, parallel_config=config, **options)


def steps_of_255(a: np.ndarray, b: np.ndarray) -> int:
    return int(np.abs((a * 255).round() - (b * 255).round()).max())


# --- the same pictures -----------------------------------------------------------------------------------------------


def _draw_embedded(**options: Any) -> tuple[np.ndarray, dict[str, Any], list[str]]:
    pipeline = load(demo_model_path(), dtype=torch.float32, **options)
    names = sorted(name for name, part in pipeline.components.items() if shardwise_holds(part))
    return draw_embedded(pipeline), pipeline.parallel_report.as_dict(), names


def shardwise_holds(part: Any) -> bool:
    return isinstance(part, nn.Module) and shardwise.placement(part).tp_degree > 1


@pytest.fixture(scope="module")
def picture() -> np.ndarray:
    return draw_embedded(diffusers.DiffusionPipeline.from_pretrained(demo_model_path(), dtype=torch.float32))


def test_pipeline_draws_the_picture_of_one_process(ranks: Pool, picture: np.ndarray) -> None:
    for pixels, _, names in ranks.run(_draw_embedded):
        assert names == ["text_encoder", "transformer"]
        assert steps_of_255(pixels, picture) <= tolerances.PIXEL


def test_components_chooses_what_is_sharded(two_ranks: Pool, picture: np.ndarray) -> None:
    for pixels, report, names in two_ranks.run(_draw_embedded, components=["text_encoder"]):
        assert names == ["text_encoder"]
        assert steps_of_255(pixels, picture) <= tolerances.PIXEL
        styles = {part["name"]: part["styles"] for part in report["components"]}
        assert styles["transformer"] == {}
        assert styles["text_encoder"]


def _tiled(pipeline: Any) -> Any:
    pipeline.vae.enable_tiling()
    pipeline.vae.tile_sample_min_size, pipeline.vae.tile_latent_min_size = 32, 8
    return pipeline


def _draw_spread(config: ParallelConfig, decode: bool) -> tuple[np.ndarray, int, tuple[int, ...]]:
    pipeline = shardwise.DiffusionPipeline.from_pretrained(
        demo_model_path(), parallel_config=config, dtype=torch.float32
    )
    if decode:
        shardwise.spread_decode(_tiled(pipeline).vae, config=TensorParallelConfig(dist.get_world_size()))
    pixels = draw_embedded(pipeline)
    overlapped = pipeline.guidance_spread.report.overlapped if config.cfg > 1 else 0
    return pixels, overlapped, pipeline.vae.decode_report.tiles if decode else ()


@pytest.mark.parametrize("decode", [False, True], ids=["", "decode"])
@pytest.mark.parametrize(
    "config",
    [
        ParallelConfig(cfg=2),
        ParallelConfig(tp=2),
        ParallelConfig(tp=2, cfg=2),
        ParallelConfig(tp=4),
        ParallelConfig(tp=2, ulysses=2),
        ParallelConfig(cfg=2, ulysses=2),
    ],
    ids=str,
)
def test_picture_is_the_same_however_the_work_is_shared(
    request: pytest.FixtureRequest, config: ParallelConfig, decode: bool
) -> None:
    whole = diffusers.DiffusionPipeline.from_pretrained(demo_model_path(), dtype=torch.float32)
    expected = draw_embedded(_tiled(whole) if decode else whole)
    pool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[config.size])
    for pixels, overlapped, tiles in pool.run(_draw_spread, config, decode):
        assert steps_of_255(pixels, expected) <= tolerances.PIXEL
        assert config.cfg == 1 or overlapped > 0
        assert sum(tiles) >= 4 * decode
        assert all(tiles)


def _draw_prompts(prompts: list[str]) -> np.ndarray:
    config = ParallelConfig(tp=2, dp=2)
    pipeline = shardwise.DiffusionPipeline.from_pretrained(
        demo_model_path(), parallel_config=config, dtype=torch.float32
    )
    generators = [torch.Generator().manual_seed(i) for i in range(len(prompts))]
    call = {**CALL, "output_type": "np", "generator": generators}
    return shardwise.spread_prompts(pipeline, prompts, mesh=pipeline.parallel_mesh, **call)


def test_prompts_are_shared_out_over_replicas_of_a_sharded_pipeline(four_ranks: Pool) -> None:
    prompts = [f"a {color} circle on a white background" for color in ("red", "blue", "green")]
    whole = diffusers.DiffusionPipeline.from_pretrained(demo_model_path(), dtype=torch.float32)
    expected = [draw_embedded(whole, prompt, seed=i)[0] for i, prompt in enumerate(prompts)]
    for pictures in four_ranks.run(_draw_prompts, prompts):
        assert steps_of_255(pictures, np.stack(expected)) <= tolerances.PIXEL


def _draw_small(folder: Path) -> tuple[Any, list[str]]:
    pipeline = load(folder, dtype=torch.float32)
    names = sorted(name for name, part in pipeline.components.items() if shardwise_holds(part))
    return draw(pipeline), names


@pytest.mark.parametrize("name", SMALL)
def test_small_pipeline_draws_what_one_process_draws(two_ranks: Pool, tmp_path: Path, name: str) -> None:
    expected = draw(save_small(name, tmp_path))
    assert np.ptp(expected) > 0.1
    for pixels, names in two_ranks.run(_draw_small, tmp_path):
        assert names == SMALL[name][2]
        assert np.abs(pixels - expected).max() < 10 * tolerances.FP32


def test_second_transformer_counts(tmp_path: Path) -> None:
    whole = save_small("WanPipeline", tmp_path)
    expected = draw(whole)
    whole.transformer_2 = whole.transformer
    assert np.abs(draw(whole) - expected).max() > tolerances.MISTAKE


# --- what each rank holds --------------------------------------------------------------------------------------------


def _held(folder: Path, names: list[str] | None) -> tuple[list[int], int, int]:
    pipeline = load(folder, dtype=torch.float32, components=names, tokenizer=None)
    own = sum(
        parameter.nbytes
        for part in pipeline.components.values()
        if isinstance(part, nn.Module)
        for parameter in part.parameters()
    )
    report = pipeline.parallel_report
    return report.weight_bytes, report.weight_bytes_one_process, own


def test_rank_of_four_holds_little_more_than_a_quarter_of_the_weights(
    four_ranks: Pool, tmp_path: Path
) -> None:
    flux2_like(tmp_path)
    whole = diffusers.DiffusionPipeline.from_pretrained(tmp_path, tokenizer=None)
    sizes = {
        name: sum(p.nbytes for p in part.parameters())
        for name, part in whole.components.items()
        if isinstance(part, nn.Module)
    }
    assert 0.9 < sizes["text_encoder"] / sizes["transformer"] < 1.2
    for names, least, most in ((None, 0.25, 0.30), (["transformer"], 0.6, 0.7)):
        for rank, (by_rank, one_process, own) in enumerate(four_ranks.run(_held, tmp_path, names)):
            assert one_process == sum(sizes.values())
            assert by_rank[rank] == own
            assert least <= own / one_process <= most


def test_report_says_what_is_held_and_prints_it() -> None:
    pipeline = shardwise.DiffusionPipeline.from_pretrained(demo_model_path())
    report = pipeline.parallel_report
    assert report.weight_bytes == [report.weight_bytes_one_process]
    assert json.loads(json.dumps(report.as_dict()))["pipeline"] == "Flux2KleinPipeline"
    assert "Qwen3ForCausalLM" in str(report)
    assert "whole" in str(report)


def _staged(folder: Path) -> list[int]:
    pipeline = load(folder, dtype=torch.float32, tokenizer=None)
    parts = [part for part in pipeline.components.values() if shardwise_holds(part)]
    return [part.load_report.bytes_read for part in parts]


def test_slices_only_are_read(two_ranks: Pool, tmp_path: Path) -> None:
    flux2_like(tmp_path)
    size = {
        name: sum(file.stat().st_size for file in (tmp_path / name).glob("*.safetensors"))
        for name in ("text_encoder", "transformer")
    }
    for read in two_ranks.run(_staged, tmp_path):
        assert sum(read) < 0.62 * sum(size.values())


# --- text encoders go when they are done -----------------------------------------------------------------------------


def _unloaded() -> tuple[np.ndarray, bool, bool, str, np.ndarray]:
    pipeline = load(demo_model_path(), dtype=torch.float32, unload_text_encoders_after_encoding=True)
    encoder = weakref.ref(pipeline.text_encoder)
    embeds, _ = pipeline.encode_prompt(
        "a red circle on a white background", max_sequence_length=16, text_encoder_out_layers=(1, 2, 3)
    )
    negative, _ = pipeline.encode_prompt("", max_sequence_length=16, text_encoder_out_layers=(1, 2, 3))
    before = encoder() is not None
    pixels = draw_embedded(pipeline)
    gc.collect()
    with pytest.raises(UnsupportedState) as refused:
        draw_embedded(pipeline)
    again = draw_embedded(pipeline, prompt=None, prompt_embeds=embeds, negative_prompt_embeds=negative)
    return pixels, before, encoder() is None, str(refused.value), again


def test_text_encoders_are_freed_before_denoising(two_ranks: Pool, picture: np.ndarray) -> None:
    for pixels, before, after, message, again in two_ranks.run(_unloaded):
        assert before
        assert after
        assert steps_of_255(pixels, picture) <= tolerances.PIXEL
        assert "text_encoder was unloaded" in message
        assert "prompt_embeds" in message
        assert steps_of_255(again, picture) <= tolerances.PIXEL


# --- offloading ------------------------------------------------------------------------------------------------------


def _offloaded(way: str, options: dict[str, Any]) -> np.ndarray:
    pipeline = load(demo_model_path(), dtype=torch.float32)
    getattr(pipeline, way)(**options)
    return draw_embedded(pipeline)


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("enable_model_cpu_offload", {"device": "cpu"}),
        ("enable_group_offload", {"onload_device": torch.device("cpu"), "offload_type": "leaf_level"}),
    ],
)
def test_pipeline_with_a_sharded_text_encoder_is_offloaded(
    two_ranks: Pool, picture: np.ndarray, way: str, options: dict[str, Any]
) -> None:
    for pixels in two_ranks.run(_offloaded, way, options):
        assert steps_of_255(pixels, picture) <= tolerances.PIXEL


# --- saving ----------------------------------------------------------------------------------------------------------


def _save(folder: Path, **options: Any) -> None:
    load(demo_model_path(), dtype=torch.float32).save_pretrained(folder, **options)


def test_saved_pipeline_is_one_that_diffusers_loads(
    two_ranks: Pool, tmp_path: Path, picture: np.ndarray
) -> None:
    two_ranks.run(_save, tmp_path / "saved")
    index = json.loads((tmp_path / "saved" / "model_index.json").read_text())
    assert index["transformer"] == ["diffusers", "Flux2Transformer2DModel"]
    assert index["text_encoder"] == ["transformers", "Qwen3ForCausalLM"]
    again = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    whole = diffusers.DiffusionPipeline.from_pretrained(demo_model_path(), dtype=torch.float32)
    for name in ("transformer", "text_encoder", "vae"):
        ours, theirs = (getattr(pipeline, name).state_dict() for pipeline in (again, whole))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert steps_of_255(draw_embedded(again), picture) == 0


# --- what cannot be done is said on every rank before a weight is read ----------------------------------------------


def _refused(folder: Any, **options: Any) -> tuple[str, str]:
    try:
        load(folder, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("options", "kind", "part"),
    [
        (
            {"components": ["tokenizer"]},
            "ConfigError",
            "those that can be sharded: text_encoder, transformer",
        ),
        ({"components": ["unet"]}, "ConfigError", "unet is no component of this pipeline"),
        ({"device_map": "balanced"}, "UnsupportedOption", "each rank has its own device"),
        ({"low_cpu_mem_usage": False}, "UnsupportedOption", "leave it out"),
        ({"variant": "fp16"}, "CheckpointError", "fp16"),
    ],
)
def test_call_that_cannot_be_honoured_is_refused(
    two_ranks: Pool, options: dict[str, Any], kind: str, part: str
) -> None:
    for name, message in two_ranks.run(_refused, demo_model_path(), **options):
        assert name == kind
        assert part in message


def test_missing_component_is_said_before_others_are_read(two_ranks: Pool, tmp_path: Path) -> None:
    folder = embedded_copy(tmp_path / "copy")
    for file in (folder / "vae").iterdir():
        file.unlink()
    (folder / "vae").rmdir()
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"never read")
    for name, message in two_ranks.run(_refused, folder):
        assert name == "CheckpointError"
        assert "has no vae" in message


def test_broken_file_of_one_component_ends_the_load_on_every_rank(two_ranks: Pool, tmp_path: Path) -> None:
    folder = embedded_copy(tmp_path / "copy")
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    found = two_ranks.run(_refused, folder)
    assert all(name for name, _ in found), found


def test_plan_that_does_not_fit_is_refused_before_a_weight_is_read(two_ranks: Pool, tmp_path: Path) -> None:
    folder = embedded_copy(tmp_path / "copy")
    config = folder / "text_encoder" / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "num_attention_heads": 3, "num_key_value_heads": 3}))
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"never read")
    for name, message in two_ranks.run(_refused, folder):
        assert name == "PlanError" or issubclass(getattr(shardwise.errors, name), PlanError)
        assert "3" in message


def _differ() -> tuple[str, str]:
    names = ["transformer"] if dist.get_rank() else None
    return _refused(demo_model_path(), components=names)


def test_ranks_that_ask_for_different_components_are_told(two_ranks: Pool) -> None:
    for name, message in two_ranks.run(_differ):
        assert name == "RankFailure"
        assert "the ranks differ in components" in message


# --- options of diffusers --------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _dtypes(location: Any, **options: Any) -> dict[str, tuple[str, bool]]:
    pipeline = load(location, **options)
    parts = {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}
    return {name: (str(part.dtype), shardwise_holds(part)) for name, part in parts.items()}


def test_pipeline_of_the_hub_is_read_from_the_local_cache(two_ranks: Pool, tmp_path: Path) -> None:
    repository = tmp_path / "models--someone--small"
    embedded_copy(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for options in ({}, {"revision": COMMIT}):
        hub = {"cache_dir": tmp_path, "local_files_only": True, **options}
        for found in two_ranks.run(_dtypes, "someone/small", **hub):
            assert [held for _, held in found.values()] == [name != "vae" for name in found]
    for name, message in two_ranks.run(_refused, "someone/other", cache_dir=tmp_path, local_files_only=True):
        assert name == "CheckpointError"
        assert "someone/other cannot be fetched from the hub" in message


def test_dtype_may_differ_by_component(two_ranks: Pool) -> None:
    dtype = {"transformer": torch.bfloat16, "default": torch.float64}
    for found in two_ranks.run(_dtypes, demo_model_path(), dtype=dtype):
        kinds = {name: kind for name, (kind, _) in found.items()}
        assert kinds == {
            "transformer": "torch.bfloat16",
            "text_encoder": "torch.float64",
            "vae": "torch.float64",
        }


def test_variant_is_taken_where_a_component_has_it(
    two_ranks: Pool, tmp_path: Path, picture: np.ndarray
) -> None:
    folder = embedded_copy(tmp_path / "copy")
    for file in (folder / "transformer").glob("*.safetensors"):
        file.rename(file.with_name("diffusion_pytorch_model.fp16.safetensors"))
    for pixels in two_ranks.run(_draw_folder, folder, variant="fp16"):
        assert steps_of_255(pixels, picture) <= tolerances.PIXEL


def _draw_folder(folder: Path, **options: Any) -> np.ndarray:
    return draw_embedded(load(folder, dtype=torch.float32, **options))


def _passed() -> tuple[bool, list[str], str]:
    transformer = diffusers.Flux2Transformer2DModel.from_pretrained(
        demo_model_path(), subfolder="transformer"
    )
    with unittest.TestCase().assertLogs("shardwise.pipeline.load") as logged:
        pipeline = load(demo_model_path(), dtype=torch.bfloat16, transformer=transformer)
    names = [part.name for part in pipeline.parallel_report.components if part.sharded]
    return pipeline.transformer is transformer, names, logged.output[0]


def test_component_that_is_passed_stays_as_it_is_and_its_dtype_is_said(two_ranks: Pool) -> None:
    for same, names, line in two_ranks.run(_passed):
        assert same
        assert names == ["text_encoder"]
        assert "transformer was passed in torch.float32 and stays so" in line


def _quantized() -> tuple[set[str], list[int], list[int]]:
    from torchao.quantization import Int8WeightOnlyConfig

    wanted = diffusers.PipelineQuantizationConfig(
        quant_mapping={"transformer": diffusers.TorchAoConfig(Int8WeightOnlyConfig())}
    )
    parts = load(demo_model_path(), dtype=torch.float32, quantization_config=wanted)
    plain = load(demo_model_path(), dtype=torch.float32)
    kinds = {type(p).__name__ for p in parts.transformer.parameters()}
    return kinds, parts.parallel_report.weight_bytes, plain.parallel_report.weight_bytes


def test_transformer_is_quantized_while_it_is_loaded(two_ranks: Pool) -> None:
    for kinds, quantized, plain in two_ranks.run(_quantized):
        assert any("Int8" in kind for kind in kinds), kinds
        assert all(q < 0.6 * p for q, p in zip(quantized, plain, strict=True))


def test_options_of_one_process_are_those_of_diffusers(picture: np.ndarray) -> None:
    pipeline = shardwise.DiffusionPipeline.from_pretrained(
        demo_model_path(), dtype=torch.float32, unload_text_encoders_after_encoding=True
    )
    assert type(pipeline) is diffusers.Flux2KleinPipeline
    assert steps_of_255(draw_embedded(pipeline), picture) == 0
    with pytest.raises(UnsupportedState, match="text_encoder was unloaded"):
        draw_embedded(pipeline)
