"""Guidance spread over ranks: each branch on ranks of its own, the picture that of one process."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline, FirstBlockCacheConfig
from torch import Tensor, nn

from shardwise import ParallelConfig, demo_model_path, enable_parallelism, init_mesh, spread_guidance
from shardwise.demo import CALL
from shardwise.errors import RankFailure, UnsupportedOperation, UnsupportedState
from shardwise.runtime import batches, branches
from shardwise.runtime.branches import denoisers
from shardwise.runtime.pending import Pending, Round
from tests import tolerances
from tests.helpers import randomize, relative_error
from tests.pipelines import STEPS, draw, pipeline
from tests.pool import Pool


def _cfg_mesh() -> Any:
    return init_mesh(ParallelConfig(cfg=2, tp=dist.get_world_size() // 2))


def _drawn(name: str, **changes: Any) -> tuple[bool, float, dict[str, int], bool]:
    """Draw by one process and with guidance spread; return whether they are equal, the error, and the counts."""
    made = pipeline(name)
    alone = draw(made, name, **changes)
    with spread_guidance(made, mesh=_cfg_mesh()) as spread:
        together = draw(made, name, **changes)
    again = draw(made, name, **changes)
    error = relative_error(together, alone)
    return torch.equal(together, alone), error, asdict(spread.report), torch.equal(again, alone)


# What becomes of two calls in each of four steps: those that teach shapes run on every rank.
DEALT = {"QwenImage": (2, 6), "Wan": (2, 4), "HunyuanVideo15": (1, 6)}


@pytest.mark.parametrize("name", DEALT)
def test_branches_that_are_dealt_draw_what_one_process_does_to_the_last_bit(
    two_ranks: Pool, name: str
) -> None:
    everywhere, overlapped = DEALT[name]
    for equal, _, report, closed in two_ranks.run(_drawn, name):
        assert equal
        assert closed
        assert (report["calls"], report["split"]) == (2 * STEPS, 0)
        assert (report["everywhere"], report["overlapped"]) == (everywhere, overlapped)


SKIPPED = {"skip_guidance_layers": [1], "skip_layer_guidance_start": -1.0, "skip_layer_guidance_stop": 0.9}


@pytest.mark.parametrize(
    ("name", "changes", "further"), [("SD3", {}, 0), ("SD3", SKIPPED, STEPS), ("ZImage", {}, 0)]
)
def test_batch_of_both_branches_is_split_and_differs_by_rounding(
    two_ranks: Pool, name: str, changes: dict[str, Any], further: int
) -> None:
    for _, error, report, closed in two_ranks.run(_drawn, name, **changes):
        assert error < tolerances.FP32
        assert closed
        # Each further call, of one branch, stands alone; the first of them teaches shapes.
        everywhere = 2 + (further > 0)
        assert (report["calls"], report["everywhere"], report["split"]) == (
            STEPS + further,
            everywhere,
            STEPS - 2,
        )


def _without_guidance() -> tuple[bool, str, list[str]]:
    """Draw one branch; return whether it is that of one process, the report, and what is logged."""
    made = pipeline("QwenImage")
    alone = draw(made, "QwenImage", true_cfg_scale=1.0)
    with mock.patch.object(branches.logger, "warning") as warning:
        with spread_guidance(made, mesh=_cfg_mesh()) as spread:
            together = draw(made, "QwenImage", true_cfg_scale=1.0)
        logged = [str(call.args[1]) for call in warning.call_args_list]
    return torch.equal(together, alone), str(spread.report), logged


def test_pipeline_without_guidance_draws_the_same_and_is_told_that_ranks_only_waited(two_ranks: Pool) -> None:
    for equal, report, logged in two_ranks.run(_without_guidance):
        assert equal
        assert report.startswith(
            "4 calls of the denoiser: 0 beside another, 0 split by the batch, 3 by one rank"
        )
        assert "no call ran beside another, so ranks for cfg gain nothing here" in report
        assert logged == [report]


# ---------------------------------------------------------------- with tensor parallelism


def _on_two_axes(name: str) -> tuple[bool, float]:
    """Return whether tp 2 x cfg 2 draws what tp 2 alone does, and the error to one process."""
    made, mesh = pipeline(name), _cfg_mesh()
    alone = draw(made, name)
    for model in denoisers(made):
        enable_parallelism(model, config=ParallelConfig(tp=2, cfg=2).tensor_parallel(mesh))
    sharded = draw(made, name)
    with spread_guidance(made, mesh=mesh):
        both = draw(made, name)
    return torch.equal(both, sharded), relative_error(both, alone)


@pytest.mark.parametrize("name", ["QwenImage", "Wan", "SD3"])
def test_both_branches_on_sharded_models_draw_what_sharded_models_draw(four_ranks: Pool, name: str) -> None:
    for equal, error in four_ranks.run(_on_two_axes, name):
        assert equal or name == "SD3"
        assert error < tolerances.FP32


def _demo(steps: int, tp: int) -> tuple[Any, Any]:
    """Return the embedded pipeline, sharded over `tp` ranks, and the mesh."""
    mesh = init_mesh(config := ParallelConfig(cfg=2, tp=tp))
    made = DiffusionPipeline.from_pretrained(demo_model_path())
    made.set_progress_bar_config(disable=True)
    if tp > 1:
        enable_parallelism(made.transformer, config=config.tensor_parallel(mesh))
    return made, mesh


@torch.inference_mode()
def _draw_demo(made: Any, steps: int) -> Tensor:
    prompts = ["a red circle on a white background", "two red hearts on a black background"]
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    call = CALL | {"num_inference_steps": steps, "output_type": "pt"}
    return made(prompt=prompts, generator=generators, **call).images.clone()


def _drawn_demo(tp: int, steps: int = 6) -> tuple[bool, dict[str, int]]:
    """Return whether the embedded model draws the same with guidance spread as without, and the counts."""
    made, mesh = _demo(steps, tp)
    alone = _draw_demo(made, steps)
    with spread_guidance(made, mesh=mesh) as spread:
        together = _draw_demo(made, steps)
    return torch.equal(together, alone), asdict(spread.report)


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_embedded_model_draws_the_same_picture_with_guidance_on_two_halves(ranks: Pool) -> None:
    for equal, report in ranks.run(_drawn_demo, ranks.size // 2):
        assert equal
        assert report["overlapped"] == 2 * 6 - 2
        # Of a batch of two, 64 tokens of 16 channels for each branch and step, in fp32.
        assert report["exchanged_bytes"] == 2 * 6 * 2 * 64 * 16 * 4


def _views_read_too_early() -> bool:
    """Draw with views that are plain tensors, while memory that waits for another rank is NaN."""

    def dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view:
            return func(*[getattr(a, "buffer", a) for a in args], **(kwargs or {}))
        return whole(func, types, args, kwargs)

    whole = Pending.__torch_dispatch__
    made, mesh = _demo(3, 1)
    with (
        mock.patch.object(batches.Like, "empty", lambda like: torch.full(like.shape, torch.nan)),
        mock.patch.object(Pending, "__torch_dispatch__", classmethod(dispatch)),
        spread_guidance(made, mesh=mesh),
    ):
        return bool(_draw_demo(made, 3).isnan().any())


def test_view_that_is_read_before_the_exchange_spoils_the_picture(two_ranks: Pool) -> None:
    assert any(two_ranks.run(_views_read_too_early))


# ---------------------------------------------------------------- caches


def _with_cache(swapped: bool) -> tuple[bool, float]:
    """Draw by Wan with a cache that is hit; `swapped` lets the ranks take turns in what they compute."""
    made = pipeline("Wan")
    for model in denoisers(made):
        model.enable_cache(FirstBlockCacheConfig(threshold=0.5))
    alone = draw(made, "Wan", 8)
    rounds = iter(range(1000))

    class Swapped(Round):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._calls = next(rounds) if swapped else 0

    with mock.patch.object(branches, "Round", Swapped), spread_guidance(made, mesh=_cfg_mesh()):
        together = draw(made, "Wan", 8)
    return torch.equal(together, alone), relative_error(together, alone)


def test_branch_stays_with_its_rank_so_that_caches_are_of_one_branch(two_ranks: Pool) -> None:
    assert [equal for equal, _ in two_ranks.run(_with_cache, False)] == [True, True]
    assert min(error for _, error in two_ranks.run(_with_cache, True)) > tolerances.MISTAKE


# ---------------------------------------------------------------- one queue, errors, refusals


class Toy(nn.Module):
    """A model that returns a tuple, and may be told to fail or to look at the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.error: BaseException | None = None
        self.coupled = False

    def forward(self, hidden_states: Tensor) -> tuple[Tensor]:
        if self.error is not None:
            raise self.error
        return (self.linear(hidden_states - hidden_states.mean(0) if self.coupled else hidden_states),)


def _toys(count: int) -> list[Toy]:
    return [randomize(Toy(), seed) for seed in range(count)]


@torch.no_grad()
def _two_models_beside_each_other(one_queue: bool) -> tuple[bool, int]:
    """Call one model after the other before reading; return whether that is right, and the calls that overlapped."""
    first, second = _toys(2)
    x, mesh = torch.ones(1, 4), _cfg_mesh()
    expected = first(x)[0] + second(x)[0]
    groups = [[first, second]] if one_queue else [[first], [second]]
    spreads = [spread_guidance(models, mesh=mesh) for models in groups]
    right = all(torch.equal(first(x)[0] + second(x)[0], expected) for _ in range(3))
    return right, sum(spread.report.overlapped for spread in spreads)


def test_calls_of_two_models_overlap_if_they_share_a_queue(two_ranks: Pool) -> None:
    assert two_ranks.run(_two_models_beside_each_other, True) == [(True, 4)] * 2
    assert two_ranks.run(_two_models_beside_each_other, False) == [(True, 0)] * 2


@torch.no_grad()
def _failing(call: int) -> tuple[str, float, bool]:
    """Let the rank that owns a call of a pair fail in it; return the error, how long it took, and what comes after."""
    (toy,) = _toys(1)
    x, rank = torch.ones(1, 4), dist.get_rank()
    with spread_guidance([toy], mesh=_cfg_mesh()):
        expected = toy(x)[0] + toy(x)[0]
        start = time.monotonic()
        try:
            outputs = []
            for i in range(2):
                toy.error = ValueError("no memory") if (i, rank) == (call, call) else None
                outputs.append(toy(x)[0])
            outputs[0] + outputs[1]
            text = "no error"
        except (ValueError, RankFailure) as error:
            text = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - start
        toy.error = None
        return text, seconds, torch.equal(toy(x)[0] + toy(x)[0], expected)


@pytest.mark.parametrize("call", [0, 1])
def test_error_on_the_rank_of_one_branch_is_raised_on_the_other_and_nobody_waits(
    two_ranks: Pool, call: int
) -> None:
    answers = two_ranks.run(_failing, call)
    assert answers[call][0] == "ValueError: no memory"
    other = answers[1 - call][0]
    assert other == f"RankFailure: guidance of Toy failed on rank {call} of 2: ValueError: no memory"
    assert all(seconds < 10 and works for _, seconds, works in answers)


@torch.no_grad()
def _waiting_in_vain() -> str:
    """Read an output on one rank at once, on the other when it is too late."""
    (toy,) = _toys(1)
    with spread_guidance([toy], mesh=_cfg_mesh(), timeout=0.5):
        output = toy(torch.ones(1, 4))[0]
        time.sleep(1.5 * dist.get_rank())
        try:
            return str(output + 0)
        except RankFailure as error:
            return str(error)


def test_rank_that_waits_in_vain_gives_up_in_time(two_ranks: Pool) -> None:
    first, second = two_ranks.run(_waiting_in_vain)
    assert "rank 1 of 2 (global rank 1) did not answer within 0:00:00.500000" in first
    assert "rank 0 of 2 (global rank 0) has given up" in second


@torch.no_grad()
def _compiled_afterwards() -> bool:
    (toy,) = _toys(1)
    x = torch.ones(1, 4)
    expected = toy(x)[0] + toy(x)[0]
    with spread_guidance([toy], mesh=_cfg_mesh()):
        toy.compile(backend="eager")
        return all(torch.equal(toy(x)[0] + toy(x)[0], expected) for _ in range(3))


def test_model_that_is_compiled_afterwards_computes_the_same(two_ranks: Pool) -> None:
    assert two_ranks.run(_compiled_afterwards) == [True, True]


@torch.no_grad()
def _different_shapes() -> str:
    (toy,) = _toys(1)
    with spread_guidance([toy], mesh=_cfg_mesh()):
        try:
            toy(torch.ones(1 + dist.get_rank(), 4))
        except RankFailure as error:
            return str(error)
    return "no error"


@torch.no_grad()
def _read_at_another_place() -> str:
    """Read the first of two outputs before the second call, on one rank only."""
    (toy,) = _toys(1)
    x = torch.ones(1, 4)
    with spread_guidance([toy], mesh=_cfg_mesh()):
        toy(x)[0] + 0
        try:
            first = toy(x)[0]
            if dist.get_rank() == 0:
                first + 0
            return str(first + toy(x)[0])
        except RankFailure as error:
            return str(error)


def test_ranks_that_read_at_other_places_are_told_so(two_ranks: Pool) -> None:
    for text in two_ranks.run(_read_at_another_place):
        assert "the ranks differ in the number of calls before an output is read" in text


def test_ranks_that_make_other_calls_are_told_so(two_ranks: Pool) -> None:
    for text in two_ranks.run(_different_shapes):
        assert "the ranks differ in what Toy returns" in text
        assert "rank 1: float32 [2, 4]" in text


@torch.no_grad()
def _coupled() -> tuple[bool, int]:
    """Call a model that mixes the samples of a batch, which the ranks divide."""
    (toy,) = _toys(1)
    toy.coupled = True
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    expected = toy(x)[0]
    with spread_guidance([toy], mesh=_cfg_mesh()) as spread:
        right = [torch.equal(toy(x)[0] + 0, expected) for _ in range(4)]
    return all(right), spread.report.split


def _coupled_and_believed() -> tuple[bool, int]:
    with mock.patch.object(branches, "rounding", return_value=float("inf")):
        return _coupled()


def test_batch_whose_samples_depend_on_each_other_is_not_split(two_ranks: Pool) -> None:
    assert two_ranks.run(_coupled) == [(True, 0)] * 2
    assert two_ranks.run(_coupled_and_believed) == [(False, 2)] * 2


def _refusals() -> list[str]:
    (toy,) = _toys(1)
    mesh, texts = _cfg_mesh(), []

    def refused(kind: type[Exception], action: Any) -> None:
        try:
            action()
        except kind as error:
            texts.append(str(error))

    refused(UnsupportedState, lambda: spread_guidance([], mesh=mesh))
    with spread_guidance([toy], mesh=mesh) as spread:
        refused(UnsupportedState, lambda: spread_guidance([toy], mesh=mesh))
        refused(UnsupportedOperation, lambda: toy(torch.ones(1, 4)))
        ours, vars(toy)["forward"] = toy.forward, lambda x: x
        refused(UnsupportedState, spread.close)
        vars(toy)["forward"] = ours
    toy.compile(backend="eager")
    refused(UnsupportedState, lambda: spread_guidance([toy], mesh=mesh))
    return texts


def test_what_cannot_be_spread_is_refused_on_every_rank(two_ranks: Pool) -> None:
    for texts in two_ranks.run(_refusals):
        assert [
            next(word for word in words if word in text) for text, words in zip(texts, REASONS, strict=True)
        ]


REASONS = (
    ["list has no component named transformer or unet"],
    ["spread already: close() that first"],
    ["has no gradients"],
    ["was replaced after spread_guidance"],
    ["is compiled as a whole"],
)
