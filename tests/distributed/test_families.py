"""The shipped model classes, from real safetensors folders: N ranks against the diffusers class in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise import TensorParallelConfig, enable_parallelism, models, placement
from shardwise.models.lookup import tiny_case
from shardwise.plan.layout import Shard
from shardwise.runtime.shard import sharding_of
from tests import tolerances
from tests.helpers import (
    FAMILIES,
    Routes,
    cast,
    distance,
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
    """One folder per class, written by the diffusers class: every other one as a single file, the rest indexed."""
    folders = {}
    for i, name in enumerate(FAMILIES):
        folders[name] = tmp_path_factory.mktemp(name) / "transformer"
        save_tiny(name, folders[name], max_shard_size="10GB" if i % 2 else "100KB")
    return folders


def load(name: str, folder: Path, check: bool = False, **kwargs: Any) -> Any:
    config = TensorParallelConfig(tp_degree=dist.get_world_size(), check=check)
    return getattr(models, name).from_pretrained(folder, parallel_config=config, **kwargs)


def stock(name: str, folder: Path, **kwargs: Any) -> Any:
    return getattr(import_module("diffusers"), name).from_pretrained(folder, **kwargs)


# ---------------------------------------------------------------- loaded slice by slice


@dataclass(frozen=True)
class Proof:
    """What one rank saw of a model that was loaded, checked and run once."""

    error: float
    bit_equal: bool
    all_reduces: int
    foreseen: int | None
    planned: int
    unplanned: int
    expected: int
    read: int
    placed: int
    placed_one_process: int
    storage: int


def _proof(name: str, folder: Path) -> Proof:
    """Load, check and run a class. On four ranks `test_P12_declared_plans_are_right` (unit) has checked it."""
    model = load(name, folder, check=dist.get_world_size() == 2)
    whole, inputs = stock(name, folder), tiny_inputs(name)
    result = outputs(model, inputs)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, result)
    sharding, report = sharding_of(model), placement(model)
    layouts = {n: sharding.plan.layout(n) for n, _ in whole.named_parameters()}
    sizes = {n: p.nbytes for n, p in whole.named_parameters()}
    buffers = sum(t.nbytes for n, t in whole.state_dict().items() if n not in sizes)
    return Proof(
        error=relative_error(result, outputs(whole, inputs)),
        bit_equal=all(torch.equal(a, b) for other in gathered for a, b in zip(other, result, strict=True)),
        all_reduces=sharding.group.traffic.all_reduces,
        foreseen=model.check_report.all_reduces if model.check_report else None,
        planned=sum(size for n, size in sizes.items() if isinstance(layouts[n], Shard)),
        unplanned=sum(size for n, size in sizes.items() if not isinstance(layouts[n], Shard)),
        expected=sum(
            prod(layouts[n].local_shape(tuple(p.shape), sharding.group.rank, sharding.group.degree))
            * p.itemsize
            for n, p in whole.named_parameters()
        ),
        read=model.load_report.bytes_read - buffers,
        placed=report.weight_bytes,
        placed_one_process=report.weight_bytes_one_process,
        storage=sum(
            {
                p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
            }.values()
        ),
    )


@pytest.fixture(scope="module")
def proofs(checkpoints: dict[str, Path]) -> Callable[[Pool, str], list[Proof]]:
    """Runs each class once on each number of ranks, for all tests that ask."""
    found: dict[tuple[int, str], list[Proof]] = {}

    def proof(pool: Pool, name: str) -> list[Proof]:
        if (pool.size, name) not in found:
            found[pool.size, name] = pool.run(_proof, name, checkpoints[name])
        return found[pool.size, name]

    return proof


@pytest.mark.parametrize("name", FAMILIES)
def test_L4_P11_loaded_slice_by_slice_equals_one_process(ranks: Pool, proofs: Any, name: str) -> None:
    assert max(proof.error for proof in proofs(ranks, name)) < tolerances.FP32


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_are_bit_equal_on_all_ranks(ranks: Pool, proofs: Any, name: str) -> None:
    assert all(proof.bit_equal for proof in proofs(ranks, name))


@pytest.mark.parametrize("name", FAMILIES)
def test_L4_bytes_read_and_held_are_planned_over_degree_plus_unplanned(
    ranks: Pool, proofs: Any, name: str
) -> None:
    for proof in proofs(ranks, name):
        assert proof.planned > 0
        assert proof.read == proof.placed == proof.storage == proof.expected
        assert proof.expected == proof.planned // ranks.size + proof.unplanned
        assert proof.placed_one_process == proof.planned + proof.unplanned


@pytest.mark.parametrize("name", FAMILIES)
def test_static_check_foresees_the_all_reduces(two_ranks: Pool, proofs: Any, name: str) -> None:
    assert all(proof.all_reduces == proof.foreseen for proof in proofs(two_ranks, name))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Blocks of each kind, times their rowwise Linears and norms over all heads; lone projections outside.
        ("AceStepTransformer1DModel", 3 * 3 + 5),
        ("AuraFlowTransformer2DModel", 2 * (4 + 2) + 2 * (2 + 1) + 2),
        # Read the time twice: that of the noisy image, and zero.
        ("BriaFibo2Transformer2DModel", 2 * 2 + 2 * 3 + 3 * (2 + 2) + 1),
        (
            "BriaFiboTransformer2DModel",
            2 * (4 + 2) + 2 * (1 + 1) + 4 + 2,
        ),  # with four layers of the text encoder
        ("BriaTransformer2DModel", 2 * (4 + 2) + 2 * (1 + 1) + 2),
        ("ChromaTransformer2DModel", 2 * 4 + 2 * 1 + 2 * 1 + 2),  # two layers that make all modulations
        ("CogVideoXTransformer3DModel", 2 * (2 + 2) + 2),  # attention and ff; 2 modulations
        ("ErnieImageTransformer2DModel", 2 * 2 + 5),
        ("FluxTransformer2DModel", 2 * (4 + 2) + 2 * (1 + 1) + 2),  # double: 2 outputs of each stream; single
        ("Flux2Transformer2DModel", 2 * 4 + 2 * 1 + 7),
        # Blocks of three kinds of tokens and joint ones; three times are read, one of them embedded on its own.
        ("Flux3Transformer2DModel", (3 * 2 + 2) * 2 + 6 + 3 + 2),
        ("HunyuanImageTransformer2DModel", 2 * (4 + 2) + 2 * (1 + 1) + 2 * 3 + 1),
        ("HunyuanVideo15Transformer3DModel", 2 * (4 + 2) + 2 * 3 + 1),  # double, refiner
        ("HunyuanVideoFramepackTransformer3DModel", 2 * (4 + 2) + 2 * (1 + 1) + 1 * 3 + 2),
        ("HunyuanVideoTransformer3DModel", 2 * (4 + 2) + 2 * (1 + 1) + 1 * 3 + 1),  # double, single, refiner
        ("Ideogram4Transformer2DModel", 2 * (2 + 1) + 3),
        ("JoyImageEditPlusTransformer3DModel", 2 * 4 + 4),
        ("JoyImageEditTransformer3DModel", 2 * 4 + 4),
        ("Kandinsky6SRTransformer3DModel", 2 * 3 + 1),
        ("Krea2Transformer2DModel", 2 * 2 + (2 + 2) * 2 + 4),  # blocks, two kinds of blocks for the text
        ("LongCatImageTransformer2DModel", 2 * (4 + 2) + 2 * (1 + 1) + 1),
        ("LTXVideoTransformer3DModel", 2 * (3 + 2) + 4),  # 2 attentions and ff; 2 pairs of norms
        ("LTX2VideoTransformer3DModel", 2 * (6 + 2 + 6) + 3),  # 6 attentions, 2 ffs; 6 pairs of norms
        ("SanaTransformer2DModel", 2 * 3 + 4),
        ("SanaVideoTransformer3DModel", 2 * (4 + 2) + 4),  # 2 attentions and 2 of the convolutions; 2 pairs
        ("SanaWMTransformer3DModel", 3 * (2 + 11) + 4),  # convolutions; 11 projections that split their input
        ("SanaWMLTX2RefinerTransformer3DModel", 2 * (3 + 2) + 1),  # the video stream of it
        ("Lumina2Transformer2DModel", 2 * (2 + 1) + 1 * (2 + 1) + 1 * 2),  # blocks, noise and text refiner
        ("LuminaNextDiT2DModel", 2 * (2 + 1 + 2 * 2) + 1),  # LayerNorms over all heads sum twice
        ("MiniMaxH3Transformer3DModel", 2 * 2 + 2 * (2 + 1)),  # refiner; blocks with a modulation
        ("MiniMaxMusic3RVQDepthDecoder", 3 * 2),
        ("MiniMaxMusic3Transformer1DModel", 2 * 2 + 2),
        # Double and single blocks, all but the last of which read the text once more.
        ("MotifVideoTransformer3DModel", 2 * (4 + 1 + 2) + 3 * (1 + 1) + 2 * 3 + 2),
        ("OmniGenTransformer2DModel", 2 * 2 + 3),
        ("OvisImageTransformer2DModel", 2 * (4 + 2) + 2 * (1 + 1) + 2),
        ("PRXTransformer2DModel", 2 * (2 + 1) + 3),
        ("QwenImage21Transformer2DModel", 2 * 2 + 5),
        ("QwenImageTransformer2DModel", 2 * (4 + 2)),
        # With two attentions; usual; last, without text.
        ("SD3Transformer2DModel", (5 + 2) + (4 + 2) + (2 + 2) + 5),
        ("StableAudio3DiTModel", 2 * 4 + 5),  # the fourth: the part to fill in
        ("StableAudioDiTModel", 2 * 3 + 3),
        ("WanTransformer3DModel", 2 * (3 + 2) + 4),
        ("ZImageTransformer2DModel", 2 * (2 + 1) + 1 * (2 + 1) + 1 * 2 + 1),
        ("AnyFlowTransformer3DModel", 5 + 2 * (3 + 2)),
        ("AnyFlowFARTransformer3DModel", 2 * 3 + 2 + 2 * (3 + 2)),  # time embedded twice: full and compressed
        ("ChronoEditTransformer3DModel", 4 + 2 * (3 + 2)),  # embedders; blocks as Wan's
        (
            "HeliosTransformer3DModel",
            2 * 2 + 2 + 2 * (3 + 2),
        ),  # time embedded twice: of the video and of its history
        ("SkyReelsV2Transformer3DModel", 4 + 2 * (3 + 2)),
        ("WanAnimate2Transformer3DModel", 4 + 2 * (3 + 3)),  # with a norm of image keys
        ("WanAnimateTransformer3DModel", 4 + 2 * (3 + 2) + 2 * 1),  # and face adapters
        (
            "WanVACETransformer3DModel",
            4 + 2 * (3 + 2) + 2 * (3 + 2 + 1) + 1,
        ),  # with control blocks
    ],
)
def test_P6_one_all_reduce_for_each_rowwise_layer_and_norm_over_all_heads(
    two_ranks: Pool, proofs: Any, name: str, expected: int
) -> None:
    assert {proof.all_reduces for proof in proofs(two_ranks, name)} == {expected}


# ---------------------------------------------------------------- sharded in memory, half precision, variants


def _in_memory(name: str, stock_class: bool, variant: str = "", check: bool = True) -> float:
    config, inputs = tiny_case(family(name), variant)
    whole, sharded = tiny_model(name, stock=True, **config), tiny_model(name, stock=stock_class, **config)
    parallel = TensorParallelConfig(tp_degree=dist.get_world_size(), check=check)
    if stock_class:
        assert enable_parallelism(sharded, config=parallel) is sharded
    else:
        sharded.enable_parallelism(config=parallel)
    return relative_error(outputs(sharded, inputs), outputs(whole, inputs))


@pytest.mark.parametrize("name", FAMILIES)
def test_L8_P11_sharded_in_memory_equals_one_process(two_ranks: Pool, name: str) -> None:
    """Without the check, which finds here what it finds in the tests above."""
    assert max(two_ranks.run(_in_memory, name, stock_class=True, check=False)) < tolerances.FP32


@pytest.mark.parametrize("name", ["Flux2Transformer2DModel", "WanTransformer3DModel"])
def test_L8_method_of_the_class_equals_one_process(ranks: Pool, name: str) -> None:
    assert max(ranks.run(_in_memory, name, stock_class=False)) < tolerances.FP32


@pytest.mark.parametrize(("name", "variant"), variants())
def test_other_configurations_of_a_class_equal_one_process(two_ranks: Pool, name: str, variant: str) -> None:
    assert max(two_ranks.run(_in_memory, name, True, variant)) < tolerances.FP32


def _called_by_a_pipeline(folder: Path) -> float:
    name, layers = "MiniMaxMusic3RVQDepthDecoder", ("projection", "audio_heads.0", "audio_heads.1")
    model, whole = load(name, folder), stock(name, folder)
    x = tiny_inputs(name)["inputs_embeds"]
    with torch.no_grad():
        return max(relative_error(model.get_submodule(n)(x), whole.get_submodule(n)(x)) for n in layers)


def test_layers_that_a_pipeline_calls_around_the_forward_equal_one_process(
    ranks: Pool, checkpoints: dict[str, Path]
) -> None:
    folder = checkpoints["MiniMaxMusic3RVQDepthDecoder"]
    assert max(ranks.run(_called_by_a_pipeline, folder)) < tolerances.FP32


def _bf16(name: str, folder: Path) -> tuple[float, float, set[str]]:
    inputs = tiny_inputs(name)
    half = cast(inputs, torch.bfloat16)
    routes = Routes()
    with routes:
        exact = outputs(stock(name, folder), inputs)
    sharded = load(name, folder, dtype=torch.bfloat16)
    whole = stock(name, folder, dtype=torch.bfloat16)
    same = {n for n, p in whole.named_parameters() if sharded.get_parameter(n).dtype != p.dtype}
    errors = []
    for model in (sharded, whole):
        with routes.again():
            errors.append(distance(outputs(model, half), exact))
        assert routes.all_taken()
    return errors[0], errors[1], same


@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_is_as_far_from_fp32_as_one_process_is(
    two_ranks: Pool, checkpoints: dict[str, Path], name: str
) -> None:
    for sharded, whole, other_dtype in two_ranks.run(_bf16, name, checkpoints[name]):
        assert not other_dtype
        assert sharded <= tolerances.BF16_RATIO * whole


def test_L3_every_family_declares_its_plan_on_the_class() -> None:
    for name in FAMILIES:
        cls = getattr(models, name)
        assert cls._tp_plan
        assert issubclass(cls, getattr(import_module("diffusers"), name))
