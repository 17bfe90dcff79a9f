"""Ranks that do not do the same thing: every one of them gets an error, soon, and none is half done."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shardwise import (
    DiffusionPipeline,
    DivideAttributes,
    ParallelConfig,
    TensorParallelConfig,
    demo_model_path,
    enable_parallelism,
)
from shardwise.checkpoint.read import SliceReader
from shardwise.models import parallelism
from shardwise.runtime import shard
from shardwise.runtime.agreement import waiting_at_most
from shardwise.runtime.group import TensorParallelGroup
from shardwise.runtime.shard import sharding_of
from tests.helpers import randomize, tiny_model
from tests.lora import adapter
from tests.pool import Pool
from tests.small_models import Mlp, Modulation, Transformer
from tests.whole_pipelines import embedded_copy


def world() -> TensorParallelConfig:
    return TensorParallelConfig(tp_degree=dist.get_world_size())


def _outcome(call: Any) -> str:
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _plans(plans: list[Any], cls: type[Any]) -> tuple[str, bool]:
    model = randomize(cls())
    outcome = _outcome(lambda: enable_parallelism(model, config=world(), plan=plans[dist.get_rank()]))
    return outcome, sharding_of(model) is None


@pytest.mark.parametrize(
    ("cls", "plans"),
    [
        (Modulation, [{"linear": "rowwise"}, {"linear": "rowwise_split_input"}]),
        (Transformer, [Transformer._tp_plan, Transformer._tp_plan | {"blocks.*": DivideAttributes()}]),
        (Mlp, [Mlp._tp_plan, {}]),
        (Mlp, [Mlp._tp_plan, 3]),
    ],
    ids=["same_layout_other_style", "attributes", "empty", "not_a_plan"],
)
def test_plans_that_differ_are_refused_on_every_rank(
    two_ranks: Pool, cls: type[Any], plans: list[Any]
) -> None:
    for outcome, untouched in two_ranks.run(_plans, plans, cls):
        assert outcome.startswith(("RankFailure", "PlanError"))
        assert untouched


def _dtypes(folder: Path) -> str:
    dtype = [torch.bfloat16, torch.float16][dist.get_rank()]
    return _outcome(lambda: Mlp.from_pretrained(folder, parallel_config=world(), dtype=dtype))


def test_dtypes_that_differ_are_refused_on_every_rank(two_ranks: Pool, tmp_path: Path) -> None:
    randomize(Mlp()).save_pretrained(tmp_path)
    for outcome in two_ranks.run(_dtypes, tmp_path):
        assert "differ in dtype" in outcome
        assert "rank 1: torch.float16" in outcome


def _degrees(degrees: list[int]) -> str:
    config = TensorParallelConfig(tp_degree=degrees[dist.get_rank()])
    return _outcome(lambda: enable_parallelism(randomize(Transformer()), config=config))


def test_degrees_that_differ_are_refused_on_every_rank(two_ranks: Pool) -> None:
    first, second = two_ranks.run(_degrees, [2, 4])
    assert first.startswith("RankFailure")
    assert second.startswith("GroupError")


def _one_stays_away() -> tuple[str, float]:
    start = time.monotonic()
    if dist.get_rank() == 1:
        return "away", 0.0
    with waiting_at_most(timedelta(seconds=1)):
        outcome = _outcome(lambda: enable_parallelism(randomize(Mlp()), config=world()))
    return outcome, time.monotonic() - start


def _catch_up() -> None:
    """Bring the counts of exchanges together again after one rank stayed away."""
    counts: list[Any] = [None] * dist.get_world_size()
    words = TensorParallelGroup.of(world()).words
    dist.all_gather_object(counts, words._turn)
    words._turn = max(counts)


def test_rank_that_does_not_make_the_call_is_named_when_patience_ends(two_ranks: Pool) -> None:
    (outcome, _), _ = two_ranks.run(_one_stays_away)
    two_ranks.run(_catch_up)
    assert outcome.startswith("RankFailure: rank 1 of 2 (global rank 1) did not answer within 0:00:01")


def _fails_on_rank_one(place: str, error: type[BaseException], folder: Path) -> tuple[str, bool]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error("made to fail")

    target, name = {"reading": (SliceReader, "read"), "allocating": (shard, "_make_room")}[place]
    model = randomize(Mlp())
    original = getattr(target, name)
    with mock.patch.object(target, name, fail if dist.get_rank() == 1 else original):
        if place == "reading":
            return _outcome(lambda: Mlp.from_pretrained(folder, parallel_config=world())), True
        outcome = _outcome(lambda: enable_parallelism(model, config=world()))
    return outcome, sharding_of(model) is None and model.up.weight.shape == (16, 8)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["reading", "allocating"])
def test_failure_of_one_rank_reaches_all_and_leaves_the_model_whole(
    two_ranks: Pool, tmp_path: Path, place: str, error: type[BaseException]
) -> None:
    randomize(Mlp()).save_pretrained(tmp_path)
    (first, first_whole), (second, second_whole) = two_ranks.run(_fails_on_rank_one, place, error, tmp_path)
    assert first.startswith("RankFailure")
    assert "made to fail" in first
    assert second.startswith(error.__name__)
    assert first_whole
    assert second_whole


def _bad_config_on_one_rank(folder: Path) -> str:
    config = world() if dist.get_rank() == 0 else "2"
    with waiting_at_most(timedelta(seconds=2)):
        return _outcome(lambda: Mlp.from_pretrained(folder, parallel_config=config))


def test_config_that_is_none_on_one_rank_is_an_error_there_and_a_short_wait_elsewhere(
    two_ranks: Pool, tmp_path: Path
) -> None:
    randomize(Mlp()).save_pretrained(tmp_path)
    first, second = two_ranks.run(_bad_config_on_one_rank, tmp_path)
    two_ranks.run(_catch_up)
    assert second.startswith("ConfigError")
    assert first.startswith("RankFailure")


def _slow(folder: Path, function: str, **options: Any) -> str:
    """Take longer on one rank than the process group's own time-out allows a collective to take."""
    brief = dist.new_group(timeout=timedelta(seconds=2))
    config = TensorParallelConfig(mesh=dist.DeviceMesh.from_group(brief, "cpu"), **options)
    original = getattr(parallelism, function)

    def slowly(*args: Any) -> Any:
        time.sleep(4 if dist.get_rank() == 1 else 0)
        return original(*args)

    with mock.patch.object(parallelism, function, slowly):
        return _outcome(lambda: Mlp.from_pretrained(folder, parallel_config=config))


@pytest.mark.parametrize("function", ["locate", "load_tensors"])
def test_slow_rank_does_not_run_into_the_group_s_time_out(
    two_ranks: Pool, tmp_path: Path, function: str
) -> None:
    randomize(Mlp()).save_pretrained(tmp_path)
    assert two_ranks.run(_slow, tmp_path, function) == ["no error", "no error"]


def _slow_collective() -> str:
    brief = dist.new_group(timeout=timedelta(seconds=1))
    time.sleep(3 if dist.get_rank() == 1 else 0)
    return _outcome(lambda: dist.all_reduce(torch.ones(1), group=brief))


def test_collective_after_such_a_wait_would_run_into_it(two_ranks: Pool) -> None:
    assert "no error" not in two_ranks.run(_slow_collective)[0]


def test_rank_slower_than_the_load_s_own_time_out_is_an_error_on_all(two_ranks: Pool, tmp_path: Path) -> None:
    randomize(Mlp()).save_pretrained(tmp_path)
    first, second = two_ranks.run(_slow, tmp_path, "load_tensors", load_timeout=1)
    assert first.startswith("RankFailure: rank 1 of 2")
    assert "did not answer within 0:00:01" in first
    assert second.startswith("RankFailure: rank 0 of 2")
    assert "has given up" in second


# --- other copies of a model, as two machines have them ---------------------------------------------------------------


def _set(file: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        entries = json.loads((folder / file).read_text("utf-8"))
        (folder / file).write_text(json.dumps(entries | values), "utf-8")

    return change


def _fine_tuned(component: str) -> Callable[[Path], None]:
    """Change all weights of a component, and none of its headers."""

    def change(folder: Path) -> None:
        (file,) = (folder / component).glob("*.safetensors")
        header = int.from_bytes(file.read_bytes()[:8], "little")
        with safe_open(file, "pt") as stream:
            metadata = stream.metadata()
        save_file({name: tensor * 1.01 for name, tensor in load_file(file).items()}, file, metadata)
        assert int.from_bytes(file.read_bytes()[:8], "little") == header

    return change


OTHER_COPIES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "transformer": ("transformer/diffusion_pytorch_model.safetensors", _fine_tuned("transformer")),
    "vae": ("vae/diffusion_pytorch_model.safetensors", _fine_tuned("vae")),
    "scheduler": ("scheduler/scheduler_config.json", _set("scheduler/scheduler_config.json", shift=9.0)),
    "tokenizer": ("tokenizer/tokenizer_config.json", _set("tokenizer/tokenizer_config.json", pad_token="a")),
    "encoder's configuration": (
        "text_encoder/config.json",
        _set("text_encoder/config.json", rms_norm_eps=0.5),
    ),
}


def _pipeline(folders: list[Path], compared: bool) -> str:
    folder, config = folders[dist.get_rank()], ParallelConfig(tp=2)
    comparing = nullcontext() if compared else mock.patch("shardwise.pipeline.load.compare_copies")
    models = nullcontext() if compared else mock.patch("shardwise.models.parallelism.compare_copies")
    with comparing, models:
        return _outcome(lambda: DiffusionPipeline.from_pretrained(folder, parallel_config=config))


@pytest.mark.parametrize("part", OTHER_COPIES)
def test_pipeline_of_which_a_rank_has_another_copy_is_refused_on_every_rank(
    two_ranks: Pool, tmp_path: Path, part: str
) -> None:
    file, change = OTHER_COPIES[part]
    change(embedded_copy(tmp_path / "b"))
    folders = [demo_model_path(), tmp_path / "b"]
    for outcome in two_ranks.run(_pipeline, folders, True):
        assert outcome.startswith("RankFailure")
        assert "the ranks read different copies of the model" in outcome
        assert f"{file}: rank 0: " in outcome
        assert outcome.count("rank 1: ") == 1
    # The negative control: nothing else would notice.
    assert two_ranks.run(_pipeline, folders, False) == ["no error"] * 2


def test_pipeline_of_which_each_rank_has_an_equal_copy_is_loaded(two_ranks: Pool, tmp_path: Path) -> None:
    (embedded_copy(tmp_path / "b") / "README.md").write_text("another page")
    assert two_ranks.run(_pipeline, [demo_model_path(), tmp_path / "b"], True) == ["no error"] * 2


def _model(folders: list[Path]) -> str:
    return _outcome(lambda: Mlp.from_pretrained(folders[dist.get_rank()], parallel_config=world()))


@pytest.mark.parametrize("file", ["diffusion_pytorch_model.safetensors", "config.json"])
def test_model_of_which_a_rank_has_another_copy_is_refused_on_every_rank(
    two_ranks: Pool, tmp_path: Path, file: str
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    model = randomize(Mlp())
    for folder in folders:
        model.save_pretrained(folder)
    if file == "config.json":
        _set(file, _diffusers_version="0.1")(folders[1])
    else:
        randomize(Mlp(), seed=3).save_pretrained(folders[1])
    for outcome in two_ranks.run(_model, folders):
        assert f"different copies of the model; copy one of them to all machines\n  {file}: rank 0" in outcome


def _adapter(seeds: list[int]) -> str:
    whole = randomize(tiny_model("FluxTransformer2DModel"))
    state = adapter(whole, seed=seeds[dist.get_rank()], prefix="")
    sharded = enable_parallelism(whole, config=world())
    return _outcome(lambda: sharded.load_lora_adapter(state, prefix=None))


def test_adapter_of_which_a_rank_has_another_of_the_same_shapes_is_refused_on_every_rank(
    two_ranks: Pool,
) -> None:
    assert two_ranks.run(_adapter, [7, 7]) == ["no error"] * 2
    for outcome in two_ranks.run(_adapter, [7, 8]):
        assert outcome.startswith("RankFailure")
        assert "the ranks differ in adapter" in outcome
