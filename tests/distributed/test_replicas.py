"""Prompts shared out over replicas: the pictures of one process, in order, on every rank."""

from __future__ import annotations

from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from shardwise import (
    ParallelConfig,
    demo_model_path,
    enable_parallelism,
    init_mesh,
    split_prompts,
    spread_prompts,
)
from shardwise.demo import CALL
from shardwise.demo.run import PROMPTS
from shardwise.errors import ShardwiseError
from shardwise.runtime import mesh as runtime_mesh
from shardwise.runtime import replicas
from shardwise.runtime.group import TensorParallelGroup
from tests import tolerances
from tests.pool import Pool


@pytest.mark.parametrize(
    ("degree", "shares"),
    [(1, [[*range(7)]]), (2, [[0, 1, 2, 3], [4, 5, 6]]), (3, [[0, 1, 2], [3, 4], [5, 6]])],
)
def test_replicas_draw_neighbours_and_the_first_draw_one_more(degree: int, shares: list[list[int]]) -> None:
    assert [split_prompts([*range(7)], rank, degree) for rank in range(degree)] == shares
    assert torch.equal(
        torch.cat([split_prompts(torch.arange(7), r, degree) for r in range(degree)]), torch.arange(7)
    )


def test_replicas_beyond_the_prompts_have_none() -> None:
    assert [split_prompts(["a"], rank, 2) for rank in range(2)] == [["a"], []]


def _generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(i) for i in range(count)]


def _pipeline() -> Any:
    made = DiffusionPipeline.from_pretrained(demo_model_path())
    made.set_progress_bar_config(disable=True)
    return made


OPTIONS = CALL | {"num_inference_steps": 4, "output_type": "np"}


def _pixels(config: ParallelConfig, prompts: list[str], each: int) -> tuple[float, bool]:
    """Return the largest difference to the pictures of one process, and whether order matters to it."""
    mesh, made = init_mesh(config), _pipeline()
    options = OPTIONS | {"num_images_per_prompt": each}
    alone = made(prompt=prompts, generator=_generators(len(prompts) * each), **options).images
    enable_parallelism(made.transformer, config=config.tensor_parallel(mesh))
    generators = _generators(len(prompts) * each)
    together = spread_prompts(made, prompts, mesh=mesh, generator=generators, **options)
    return float(np.abs(together - alone).max()), float(
        np.abs(together[::-1] - alone).max()
    ) > tolerances.MISTAKE


@pytest.mark.parametrize(("count", "each"), [(3, 1), (2, 2)])
def test_prompts_on_two_replicas_are_drawn_as_by_one_process(two_ranks: Pool, count: int, each: int) -> None:
    for error, ordered in two_ranks.run(_pixels, ParallelConfig(dp=2), list(PROMPTS[:count]), each):
        assert error < tolerances.FP32
        assert ordered


def test_replicas_of_sharded_pipelines_draw_as_one_process_does(four_ranks: Pool) -> None:
    for error, ordered in four_ranks.run(_pixels, ParallelConfig(dp=2, tp=2), list(PROMPTS[:3]), 1):
        assert error < tolerances.FP32
        assert ordered


def _pixels_on_two_machines() -> tuple[float, bool]:
    """As `_pixels`, with ranks that are numbered round two machines."""
    node = property(lambda group: ["ab"[torch.distributed.get_rank() % 2], ""])
    with (
        mock.patch.object(TensorParallelGroup, "node", node),
        mock.patch.object(runtime_mesh, "_meshes", WeakKeyDictionary()),
    ):
        return _pixels(ParallelConfig(dp=2, tp=2), list(PROMPTS[:3]), 1)


def test_replicas_of_ranks_that_are_numbered_round_machines_draw_the_same(four_ranks: Pool) -> None:
    for error, ordered in four_ranks.run(_pixels_on_two_machines):
        assert error < tolerances.FP32
        assert ordered


def _fake(values: list[int], size: int = 4, video: bool = False) -> Any:
    """Return a pipeline that draws the numbers in its prompts."""

    def draw(prompt: list[str], negative_prompt: list[str], generator: list[torch.Generator]) -> tuple[Any]:
        assert [f"not {p}" for p in prompt] == negative_prompt
        assert [g.initial_seed() for g in generator] == [int(p) for p in prompt]
        values.extend(int(p) for p in prompt)
        pictures = [Image.new("RGB", (size, 2), (int(p), 0, 0)) for p in prompt]
        return ([[p] * 2 for p in pictures] if video else pictures,)

    return draw


def _pictures(count: int, video: bool) -> tuple[list[int], list[int]]:
    """Return what this rank drew, and what it has of all."""
    drawn: list[int] = []
    names = [str(i) for i in range(count)]
    found = spread_prompts(
        _fake(drawn, video=video),
        names,
        mesh=init_mesh(ParallelConfig(dp=2)),
        generator=_generators(count),
        negative_prompt=[f"not {name}" for name in names],
    )
    return drawn, [(p[1] if video else p).getpixel((3, 1))[0] for p in found]


@pytest.mark.parametrize("video", [False, True])
@pytest.mark.parametrize("count", [1, 5])
def test_every_rank_has_all_pictures_in_order_and_has_drawn_its_own(
    two_ranks: Pool, count: int, video: bool
) -> None:
    everything = list(range(count))
    shares = [split_prompts(everything, rank, 2) for rank in range(2)]
    assert two_ranks.run(_pictures, count, video) == [(shares[0], everything), (shares[1], everything)]


def _refused(case: str) -> str:
    import torch.distributed as dist

    rank = dist.get_rank()
    generators: Any = {"one": torch.Generator(), "none": None, "few": _generators(3)}.get(
        case, _generators(2)
    )
    names = ["0", "2"] if case == "others" and rank else ["0", "1"]
    made = _fake([], size=4 + rank if case == "sizes" else 4)
    if case == "broken" and rank == 1:
        made = mock.Mock(side_effect=ValueError("no memory"))
    if case == "others":
        generators = [torch.Generator().manual_seed(int(name)) for name in names]
    try:
        spread_prompts(
            made,
            names,
            mesh=init_mesh(ParallelConfig(dp=2)),
            generator=generators,
            negative_prompt=[f"not {name}" for name in names],
        )
    except (ShardwiseError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("one", "UnsupportedOption: generator is one for all", ""),
        ("none", "UnsupportedOption: generator is left out", ""),
        ("few", "UnsupportedOption: there are 3 generators for 2 pictures", ""),
        ("sizes", "UnsupportedOperation: pictures are gathered if all are of one size", ""),
        ("others", "RankFailure: drawing 2 prompts on 2 replicas: the ranks differ in prompts", ""),
        ("broken", "failed on rank 1 of 2: ValueError: no memory", "ValueError: no memory"),
    ],
)
def test_prompts_that_cannot_be_shared_out_raise_on_every_rank(
    two_ranks: Pool, case: str, first: str, second: str
) -> None:
    answers = two_ranks.run(_refused, case)
    assert first in answers[0]
    assert (second or first) in answers[1]


def _one_generator_for_all() -> float:
    """Let every replica draw from a generator of its own that is seeded alike, as one for all would be."""
    mesh, made, prompts = init_mesh(ParallelConfig(dp=2)), _pipeline(), list(PROMPTS[:2])
    alone = made(prompt=prompts, generator=torch.Generator().manual_seed(0), **OPTIONS).images
    with mock.patch.object(replicas, "_check_generators"):
        shared = [torch.Generator().manual_seed(0)] * 2
        together = spread_prompts(made, prompts, mesh=mesh, generator=shared, **OPTIONS)
    return float(np.abs(together - alone).max())


def test_one_generator_for_all_would_draw_other_pictures(two_ranks: Pool) -> None:
    assert min(two_ranks.run(_one_generator_for_all)) > tolerances.MISTAKE
