"""Context parallelism beside tensor parallelism: the sequence cut over ranks, the weights over others."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from shardwise import (
    ParallelConfig,
    ShardwiseError,
    TensorParallelConfig,
    enable_context_parallel,
    enable_parallelism,
    init_mesh,
    spread_guidance,
)
from shardwise.config import PARALLEL_AXES
from shardwise.models import context
from shardwise.models.context import REFUSED
from shardwise.runtime.branches import denoisers
from tests import tolerances
from tests.helpers import outputs, relative_error, tiny_inputs, tiny_model
from tests.pipelines import draw, pipeline
from tests.pool import Pool

CLASSES = (
    "FluxTransformer2DModel",
    "Flux2Transformer2DModel",
    "WanTransformer3DModel",
    "QwenImageTransformer2DModel",
    "ChronoEditTransformer3DModel",
    "MiniMaxH3Transformer3DModel",
    "HeliosTransformer3DModel",
)
BOTH = ParallelConfig(tp=2, ulysses=2)


def _model(name: str) -> Any:
    # Helios says how 40 blocks are cut, whatever it has.
    return tiny_model(name, **({"num_layers": 40} if name.startswith("Helios") else {}))


def _inputs(name: str) -> dict[str, Any]:
    """Return example inputs with sequences of even lengths."""
    x = tiny_inputs(name)
    if name.startswith("Flux"):
        x |= {key: x[key][:, :14] for key in ("hidden_states",)} | {"img_ids": x["img_ids"][:14]}
        x |= {"encoder_hidden_states": x["encoder_hidden_states"][:, :6], "txt_ids": x["txt_ids"][:6]}
    if name.startswith("Flux2"):  # as its pipelines do: ids for each picture
        x |= {key: x[key].expand(3, -1, -1) for key in ("img_ids", "txt_ids")}
    if name.startswith("Qwen"):
        x |= {key: x[key][:, :6] for key in ("encoder_hidden_states", "encoder_hidden_states_mask")}
        x |= {"hidden_states": x["hidden_states"][:, :12], "img_shapes": [(1, 4, 3)] * 3}
    if name.startswith(("Wan", "Chrono", "Helios")):
        x["hidden_states"] = x["hidden_states"][:, :, :2]
    if name.startswith("Helios"):
        x["indices_hidden_states"] = x["indices_hidden_states"][:, :2]
    return x


def _error(name: str) -> float:
    """Return the error of a model that is sharded and whose sequence is cut."""
    mesh, whole = init_mesh(BOTH), _model(name)
    plain = ParallelConfig(tp=2, ulysses=2, tensor=TensorParallelConfig(check=False))
    both = enable_parallelism(copy.deepcopy(whole), config=plain.tensor_parallel(mesh))
    enable_context_parallel(both, mesh=mesh)
    inputs = _inputs(name)
    return relative_error(outputs(both, inputs), outputs(whole, inputs))


@pytest.mark.parametrize("name", CLASSES)
def test_sharded_model_whose_sequence_is_cut_agrees_with_one_process(four_ranks: Pool, name: str) -> None:
    assert max(four_ranks.run(_error, name)) < tolerances.FP32


def _guided(name: str) -> float:
    """Return the error of pictures that are drawn with guidance and sequences on two axes."""
    made, mesh = pipeline(name), init_mesh(ParallelConfig(cfg=2, ulysses=2))
    alone = draw(made, name)
    for model in denoisers(made):
        enable_context_parallel(model, mesh=mesh)
    with spread_guidance(made, mesh=mesh) as spread:
        together = draw(made, name)
    assert spread.report.overlapped
    return relative_error(together, alone)


def test_branches_of_guidance_and_sequences_are_shared_out_at_once(four_ranks: Pool) -> None:
    assert max(four_ranks.run(_guided, "Wan")) < tolerances.FP32


def _on_the_ranks_of_its_slices(checked: bool) -> str | float:
    """Cut the sequence over the ranks that share the weights, which gives each other's heads away."""
    name = "FluxTransformer2DModel"
    whole, inputs = _model(name), _inputs(name)
    sharded = enable_parallelism(copy.deepcopy(whole), config=BOTH.tensor_parallel(init_mesh(BOTH)))
    other = init_mesh(ParallelConfig(dp=2, ulysses=2))
    with mock.patch.object(context, "_check_ranks", context._check_ranks if checked else mock.Mock()):
        try:
            enable_context_parallel(sharded, mesh=other)
        except ShardwiseError as error:
            return str(error)
    return relative_error(outputs(sharded, inputs), outputs(whole, inputs))


def test_sequence_is_not_cut_over_the_ranks_that_share_the_weights(four_ranks: Pool) -> None:
    for text in four_ranks.run(_on_the_ranks_of_its_slices, True):
        assert 'shard it over the axis "tp" of the same mesh' in text
    for error in four_ranks.run(_on_the_ranks_of_its_slices, False):
        assert error > tolerances.MISTAKE


# ---------------------------------------------------------------- refusals


def _refused(name: str, heads: int = 4, ring: bool = False) -> tuple[str, float]:
    """Return the error, and how far the model is from what it was."""
    degrees = (1, 1, 2, 1, 1) if ring else (1, 1, 1, 2, 1)
    mesh = init_device_mesh("cpu", degrees, mesh_dim_names=PARALLEL_AXES)
    model = tiny_model(name, num_attention_heads=heads)
    inputs = tiny_inputs(name)
    before = outputs(model, inputs)
    try:
        enable_context_parallel(model, mesh=mesh)
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}", relative_error(outputs(model, inputs), before)
    return "", 0


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        (
            "SD3Transformer2DModel",
            {},
            "UnsupportedState: SD3Transformer2DModel does not say how its sequence is cut",
        ),
        ("LTXVideoTransformer3DModel", {}, "its attention masks are made for all heads"),
        ("WanTransformer3DModel", {"heads": 3}, "has 3 heads, which ulysses=2 does not divide"),
        ("WanTransformer3DModel", {"ring": True}, "ConfigError: a ring does not work on CPUs"),
    ],
)
def test_model_whose_sequence_cannot_be_cut_is_refused_and_stays_as_it_was(
    two_ranks: Pool, name: str, options: dict[str, Any], text: str
) -> None:
    for answer, moved in two_ranks.run(_refused, name, **options):
        assert text in answer
        assert moved == 0


def test_classes_that_are_refused_say_how_their_sequence_is_cut() -> None:
    assert all(getattr(diffusers, name)._cp_plan for name in REFUSED)


def _further_refusals() -> list[str]:
    mesh, texts = init_mesh(ParallelConfig(ulysses=2)), []
    name = "FluxTransformer2DModel"
    cut = enable_context_parallel(_model(name), mesh=mesh)
    sharded = enable_parallelism(_model(name), config=TensorParallelConfig(2))
    actions = (
        lambda: enable_context_parallel(cut, mesh=mesh),
        lambda: outputs(cut, tiny_inputs(name)),
        lambda: enable_context_parallel(_model(name), mesh=mesh["dp", "cfg"]),
        lambda: sharded.enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=2)),
    )
    for action in actions:
        try:
            action()
        except ShardwiseError as error:
            texts.append(str(error))
    return texts


def test_calls_that_cannot_be_meant_raise_on_every_rank(two_ranks: Pool) -> None:
    for texts in two_ranks.run(_further_refusals):
        twice, odd, axes, by_diffusers = texts
        assert twice.endswith("is cut already")
        assert odd.startswith("FluxTransformer2DModel: a sequence of 15 tokens is not divided by 2 ranks")
        assert axes.startswith('expected a mesh with axes "ring" and "ulysses"')
        assert "shardwise.enable_context_parallel(" in by_diffusers


def _one_rank_along_the_axes() -> bool:
    model = _model("SD3Transformer2DModel")
    return enable_context_parallel(model, mesh=init_mesh(ParallelConfig(tp=2))) is model


def test_axes_of_size_one_leave_any_model_as_it_is(two_ranks: Pool) -> None:
    assert two_ranks.run(_one_rank_along_the_axes) == [True, True]
    assert torch.accelerator.device_count() == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
