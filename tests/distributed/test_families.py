"""The shipped model families, from real safetensors folders: N ranks against the diffusers class in one process."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise import TensorParallelConfig, enable_parallelism, models, placement
from shardwise.runtime.shard import sharding_of
from tests import tolerances
from tests.helpers import (
    FAMILIES,
    cast,
    family,
    outputs,
    relative_error,
    save_tiny,
    tiny_inputs,
    tiny_model,
    variants,
)
from tests.pool import Pool


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder per family, written by the diffusers class: the first half as one file, the others indexed."""
    folders = {}
    for i, name in enumerate(FAMILIES):
        folders[name] = tmp_path_factory.mktemp(name) / "transformer"
        save_tiny(name, folders[name], max_shard_size="10GB" if i % 2 else "100KB")
    return folders


def load(name: str, folder: Path, **kwargs: Any) -> Any:
    # The numbers are the question here, and every rank would run the check again; `test_check.py` runs it.
    config = TensorParallelConfig(tp_degree=dist.get_world_size(), check=False)
    return getattr(models, name).from_pretrained(folder, parallel_config=config, **kwargs)


def stock(name: str, folder: Path, **kwargs: Any) -> Any:
    return getattr(import_module("diffusers"), name).from_pretrained(folder, **kwargs)


def _loaded(name: str, folder: Path) -> float:
    inputs = tiny_inputs(name)
    return relative_error(outputs(load(name, folder), inputs), outputs(stock(name, folder), inputs))


@pytest.mark.parametrize("name", FAMILIES)
def test_L4_P11_loaded_slice_by_slice_equals_one_process(
    ranks: Pool, checkpoints: dict[str, Path], name: str
) -> None:
    assert max(ranks.run(_loaded, name, checkpoints[name])) < tolerances.FP32


def _in_memory(name: str, stock_class: bool) -> float:
    whole, sharded = tiny_model(name, stock=True), tiny_model(name, stock=stock_class)
    config = TensorParallelConfig(tp_degree=dist.get_world_size(), check=stock_class)
    if stock_class:
        assert enable_parallelism(sharded, config=config) is sharded
    else:
        sharded.enable_parallelism(config=config)
    inputs = tiny_inputs(name)
    return relative_error(outputs(sharded, inputs), outputs(whole, inputs))


@pytest.mark.parametrize("stock_class", [False, True], ids=["shardwise_class", "diffusers_class"])
@pytest.mark.parametrize("name", FAMILIES)
def test_L8_P11_sharded_in_memory_equals_one_process(ranks: Pool, name: str, stock_class: bool) -> None:
    assert max(ranks.run(_in_memory, name, stock_class)) < tolerances.FP32


def _ranks_agree(name: str, folder: Path) -> bool:
    result = outputs(load(name, folder), tiny_inputs(name))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, result)
    return all(torch.equal(a, b) for other in gathered for a, b in zip(other, result, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_are_bit_equal_on_all_ranks(ranks: Pool, checkpoints: dict[str, Path], name: str) -> None:
    assert all(ranks.run(_ranks_agree, name, checkpoints[name]))


def _bf16(name: str, folder: Path) -> tuple[float, float, set[str]]:
    inputs = tiny_inputs(name)
    half = cast(inputs, torch.bfloat16)
    exact = outputs(stock(name, folder), inputs)
    sharded = load(name, folder, dtype=torch.bfloat16)
    whole = stock(name, folder, dtype=torch.bfloat16)
    same = {n for n, p in whole.named_parameters() if sharded.get_parameter(n).dtype != p.dtype}
    return relative_error(outputs(sharded, half), exact), relative_error(outputs(whole, half), exact), same


@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_is_as_far_from_fp32_as_one_process_is(
    ranks: Pool, checkpoints: dict[str, Path], name: str
) -> None:
    for sharded, whole, other_dtype in ranks.run(_bf16, name, checkpoints[name]):
        assert not other_dtype
        assert sharded <= tolerances.BF16_RATIO * whole


def _bytes(name: str, folder: Path) -> dict[str, Any]:
    model = load(name, folder)
    sharding = sharding_of(model)
    planned = {n for n, layout in sharding.plan.layouts.items() if hasattr(layout, "dim")}
    whole = stock(name, folder)
    sizes = {n: p.nbytes for n, p in whole.named_parameters()}
    report = placement(model)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return {
        "planned": sum(size for n, size in sizes.items() if n in planned),
        "unplanned": sum(size for n, size in sizes.items() if n not in planned),
        "buffers": sum(t.nbytes for n, t in whole.state_dict().items() if n not in sizes),
        "read": model.load_report.bytes_read,
        "placed": report.weight_bytes,
        "placed_one_process": report.weight_bytes_one_process,
        "storage": sum(storages.values()),
        "degree": sharding.group.degree,
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_L4_bytes_read_and_held_are_planned_over_degree_plus_unplanned(
    ranks: Pool, checkpoints: dict[str, Path], name: str
) -> None:
    for found in ranks.run(_bytes, name, checkpoints[name]):
        expected = found["planned"] // found["degree"] + found["unplanned"]
        assert found["planned"] > 0
        assert found["read"] - found["buffers"] == found["placed"] == found["storage"] == expected
        assert found["placed_one_process"] == found["planned"] + found["unplanned"]


def _all_reduces(name: str, folder: Path) -> int:
    model = load(name, folder)
    outputs(model, tiny_inputs(name))
    return sharding_of(model).group.traffic.all_reduces


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Blocks of each kind, times their rowwise Linears and norms over all heads.
        ("CogVideoXTransformer3DModel", 2 * (2 + 2)),  # attention and ff; 2 modulations
        ("FluxTransformer2DModel", 2 * 4 + 2 * 1),  # double: 2 attention and 2 ff outputs; single: 1
        ("Flux2Transformer2DModel", 2 * 4 + 2 * 1),
        ("HunyuanVideoTransformer3DModel", 2 * (4 + 2) + 2 * (1 + 1) + 1 * 2),  # double, single, refiner
        ("LTXVideoTransformer3DModel", 2 * (3 + 4)),  # 2 attentions and ff; 4 norms
        ("Lumina2Transformer2DModel", 2 * (2 + 1) + 1 * (2 + 1) + 1 * 2),  # blocks, noise and text refiner
        ("MiniMaxH3Transformer3DModel", 2 * 2 + 2 * (2 + 1)),  # refiner; blocks with a modulation
        ("QwenImageTransformer2DModel", 2 * 4),
        (
            "SD3Transformer2DModel",
            (5 + 2) + (4 + 2) + (2 + 2),
        ),  # with two attentions; usual; last, without text
        ("WanTransformer3DModel", 2 * (3 + 4)),
        ("ZImageTransformer2DModel", 2 * (2 + 1) + 1 * (2 + 1) + 1 * 2),
    ],
)
def test_P6_one_all_reduce_for_each_rowwise_layer_and_norm_over_all_heads(
    two_ranks: Pool, checkpoints: dict[str, Path], name: str, expected: int
) -> None:
    assert set(two_ranks.run(_all_reduces, name, checkpoints[name])) == {expected}


def _variant(name: str, variant: str) -> float:
    config, inputs_of = family(name).TINY_VARIANTS[variant]
    inputs = inputs_of(torch.Generator().manual_seed(0))
    sharded = enable_parallelism(
        tiny_model(name, stock=True, **config), config=TensorParallelConfig(tp_degree=dist.get_world_size())
    )
    return relative_error(outputs(sharded, inputs), outputs(tiny_model(name, stock=True, **config), inputs))


@pytest.mark.parametrize(("name", "variant"), variants())
def test_other_configurations_of_a_class_equal_one_process(two_ranks: Pool, name: str, variant: str) -> None:
    assert max(two_ranks.run(_variant, name, variant)) < tolerances.FP32


def test_L3_every_family_declares_its_plan_on_the_class() -> None:
    for name in FAMILIES:
        cls = getattr(models, name)
        assert cls._tp_plan
        assert issubclass(cls, getattr(import_module("diffusers"), name))
