"""The benchmark measures what it says: the same numbers, the bytes that were asked for, the sums that were sent.

No time is asserted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from diffusers import Flux2Transformer2DModel as DiffusersModel
from safetensors.torch import load_file

from shardwise import models
from shardwise.bench import plot
from shardwise.bench.checkpoint import Sizes, shapes_of, sizes_for, write_checkpoint, write_model
from shardwise.bench.gauges import drop_from_memory, file_bytes, turns
from shardwise.bench.load import bench_load, require_same, summary
from shardwise.bench.loads import KINDS, config_of, measure, shard_bytes, weight_files
from shardwise.bench.ranks import Watch, run_fresh
from shardwise.bench.step import bench_step
from shardwise.bench.steps import ALONE, OURS, SAME_PLAN, SMALL, THEIRS, Case, measure_steps
from shardwise.cli import main
from shardwise.errors import RankFailure
from shardwise.models.lookup import skeleton
from shardwise.plan.resolve import resolve

TINY = Sizes(heads=4, double_blocks=1, single_blocks=1)
FIGURES = {
    "wall_s",
    "cpu_s",
    "staging_bytes",
    "file_backed_bytes",
    "peak_beyond_shard_bytes",
    "bytes_requested_per_rank",
    "storage_bytes_node",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FLUX.2 of 4 heads, with a block of each kind."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, TINY)
    return folder


# --- the checkpoint --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size_gb", [2.6, 3.6, 8, 64.4])
def test_checkpoint_has_the_shapes_of_flux2_dev(size_gb: float) -> None:
    shapes = shapes_of(sizes_for(int(size_gb * 1e9)))
    real = {name: tuple(p.shape) for name, p in skeleton(DiffusersModel).state_dict().items()}
    assert shapes.items() <= real.items()
    assert sum(2 * torch.Size(shape).numel() for shape in shapes.values()) == pytest.approx(
        size_gb * 1e9, rel=0.07
    )


def test_checkpoint_of_the_whole_size_is_flux2_dev() -> None:
    assert sizes_for(64_400_000_000) == Sizes(48, 8, 48)


def test_checkpoint_is_one_that_diffusers_loads(checkpoint: Path) -> None:
    model, info = DiffusersModel.from_pretrained(
        checkpoint, torch_dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    numbers = [p.flatten()[:4].tolist() for p in model.parameters()]
    assert all(torch.tensor(some).isfinite().all() for some in numbers)
    assert len({tuple(some) for some in numbers}) == len(numbers)


def test_checkpoint_of_several_files_has_each_tensor_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.bench.checkpoint.SHARD_BYTES", 4_000_000)
    nbytes = write_checkpoint(tmp_path, TINY)
    files = weight_files(tmp_path)
    assert len(files) > 2
    assert nbytes == sum(file.stat().st_size for file in files)
    found = [key for file in files for key in load_file(file)]
    assert sorted(found) == sorted(shapes_of(TINY))


# --- loads -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All kinds of load, warm, on two ranks."""
    return bench_load(2, 0.02, repeats=1, cold=False, folder=tmp_path_factory.mktemp("loads"))


def test_every_kind_of_load_is_reported(loaded: dict[str, Any]) -> None:
    assert loaded["ranks"] == 2
    assert list(loaded["variants"]) == list(KINDS)
    for figures in loaded["variants"].values():
        assert figures.keys() >= FIGURES
        assert "cold" not in figures
        assert figures["wall_s"] > 0
        assert figures["cpu_s"] > 0
    assert loaded["sequential_read"].keys() == {"warm_s"}
    assert {"date", "hardware", "versions"} <= loaded.keys()
    assert json.loads(json.dumps(loaded)) == loaded


def test_bytes_requested_are_those_of_the_plan(loaded: dict[str, Any]) -> None:
    for kind in ("shardwise", "shardwise_ready", "bytes_alone", "bytes_alone_ready"):
        requested = loaded["variants"][kind]["bytes_requested_per_rank"]
        assert loaded["plan_bytes_per_rank"] <= requested < 1.01 * loaded["plan_bytes_per_rank"]


def test_files_are_mapped_by_diffusers_and_not_by_shardwise(loaded: dict[str, Any]) -> None:
    mapped = {kind: figures["file_backed_bytes"] for kind, figures in loaded["variants"].items()}
    assert mapped["shardwise"] < 2**21
    assert mapped["diffusers"] > loaded["plan_bytes_per_rank"] / 2


def test_load_into_ready_memory_takes_no_other(loaded: dict[str, Any]) -> None:
    beyond = {kind: figures["peak_beyond_shard_bytes"] for kind, figures in loaded["variants"].items()}
    assert beyond["shardwise_ready"] < 8 * 2**20
    assert beyond["shardwise"] < 8 * 2**20


def _request_all(watch: Watch, folder: Path) -> dict[str, int]:
    before = file_bytes()["rchar"]
    watch.begin()
    for file in weight_files(folder):
        file.read_bytes()
    watch.end()
    return {"requested": file_bytes()["rchar"] - before}


def test_bytes_and_memory_of_a_load_of_everything_are_seen(checkpoint: Path) -> None:
    size = sum(file.stat().st_size for file in weight_files(checkpoint))
    for result in run_fresh(_request_all, 2, checkpoint):
        assert result["requested"] >= size
        assert result["peak_anonymous"] > 0


def test_cold_load_takes_each_byte_from_storage_about_once(checkpoint: Path) -> None:
    dropped = drop_from_memory(weight_files(checkpoint))  # not where files are kept in memory only
    size = sum(file.stat().st_size for file in weight_files(checkpoint))
    results = run_fresh(measure, 2, "shardwise", checkpoint, checkpoint, True, True, False)
    assert all(result["cold"] for result in results) == dropped
    read = sum(result["from_storage"] for result in results)
    assert 0.9 * size * dropped <= read < 1.2 * size


@pytest.mark.parametrize("kind", ["diffusers_ready", "diffusers_full_then_shard"])
def test_other_numbers_are_noticed(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    write_checkpoint(tmp_path, TINY, seed=1)
    first, same, other = (
        [r["check_sums"] for r in run_fresh(measure, 2, name, folder, checkpoint, True, False, True)]
        for name, folder in (("shardwise", checkpoint), (kind, checkpoint), (kind, tmp_path))
    )
    assert first[0] != first[1]
    require_same(kind, first, same)
    with pytest.raises(RankFailure, match=f"{kind} loaded other numbers on rank 0"):
        require_same(kind, first, other)


def test_plan_bytes_are_half_of_what_is_cut(checkpoint: Path) -> None:
    (whole,), half = (shard_bytes(checkpoint, config_of(checkpoint, degree, True)) for degree in (1, 2))
    assert half[0] == half[1]
    assert whole / 2 < half[0] < 1.05 * whole / 2


def test_modulations_are_whole_where_diffusers_own_plan_is_loaded(checkpoint: Path) -> None:
    modulations = sum(
        2 * torch.Size(shape).numel() for name, shape in shapes_of(TINY).items() if "modulation" in name
    )
    cut, whole = (shard_bytes(checkpoint, config_of(checkpoint, 2, cut))[0] for cut in (True, False))
    assert whole - cut >= modulations / 2
    tables = [config_of(checkpoint, 2, cut).plan or {} for cut in (True, False)]
    assert [any("modulation" in key for key in plan) for plan in tables] == [True, False]


def test_summary_takes_the_slowest_rank_and_the_sum_of_cpu_time() -> None:
    rank = {
        "wall_s": 1.0, "cpu_s": 0.5, "peak_anonymous": 300, "before_anonymous": 100, "new_bytes": 150,
        "peak_files": 30, "before_files": 20, "highest": 190, "requested": 7, "from_storage": 5,
    }  # fmt: skip
    slow = {**rank, "wall_s": 3.0, "peak_anonymous": 310}
    found = summary([[rank, slow], [rank, rank], [slow, rank]])
    assert found["wall_s"] == 3.0
    assert found["cpu_s"] == 1.0
    assert found["staging_bytes"] == 60
    assert found["file_backed_bytes"] == 10
    assert found["peak_beyond_shard_bytes"] == 40
    assert found["storage_bytes_node"] == 10


def test_each_kind_is_first_in_some_turn() -> None:
    names = list(KINDS)
    orders = [turns(names, turn) for turn in range(2 * len(names))]
    assert all(sorted(order) == sorted(names) for order in orders)
    assert {order[0] for order in orders} == set(names)
    assert len({tuple(order) for order in orders}) > len(names) / 2


def _fail(watch: Watch) -> None:
    raise ValueError("as it happens")


def test_failure_of_a_rank_is_raised() -> None:
    with pytest.raises(RankFailure, match="as it happens"):
        run_fresh(_fail, 2)


# --- steps -----------------------------------------------------------------------------------------------------------


def _case(name: str) -> Case:
    from shardwise.models.lookup import family_of

    family: Any = family_of(getattr(models, name))
    return Case(name, SMALL, family.TINY_CONFIG)


@pytest.fixture(scope="module")
def stepped() -> dict[str, Any]:
    """One class that diffusers has a plan for, and one that it has none for."""
    names = ("QwenImageTransformer2DModel", "MiniMaxH3Transformer3DModel")
    return bench_step(2, repeats=1, measured=[_case(name) for name in names])


def test_every_way_of_a_step_is_reported(stepped: dict[str, Any]) -> None:
    qwen, minimax = stepped["cases"]
    assert set(qwen["ways"]) == {ALONE, OURS, SAME_PLAN, THEIRS}
    assert set(minimax["ways"]) == {ALONE, OURS, SAME_PLAN}
    assert stepped["colwise_call"].keys() == {"colwise_us", "plain_us", "ratio"}
    assert json.loads(json.dumps(stepped)) == stepped


def test_all_reduces_of_a_step_are_those_of_the_plan(stepped: dict[str, Any]) -> None:
    for case in stepped["cases"]:
        model = skeleton(getattr(models, case["name"]), **case["config"])
        plan = resolve(model, getattr(models, case["name"])._tp_plan, 2)
        sums = sum(m.style.sums(model.get_submodule(m.path)) for m in plan.modules)
        assert case["ways"][OURS]["all_reduces"] == sums
        assert case["ways"][OURS]["all_reduce_bytes"] > 0
        assert case["ways"][ALONE]["all_reduces"] == 0
    qwen = stepped["cases"][0]["ways"]
    assert qwen[THEIRS]["all_reduces"] == qwen[OURS]["all_reduces"] - 4  # its plan leaves 4 modulations whole
    assert qwen[THEIRS]["all_reduces"] == qwen[SAME_PLAN]["all_reduces"]
    assert qwen[THEIRS]["all_reduce_bytes"] == qwen[SAME_PLAN]["all_reduce_bytes"]


def test_ways_of_a_step_compute_the_same(stepped: dict[str, Any]) -> None:
    for case in stepped["cases"]:
        assert all(figures["difference"] < 0.05 for figures in case["ways"].values())  # in bf16


def test_other_weights_are_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = _case("QwenImageTransformer2DModel")
    write_model(tmp_path, skeleton(getattr(models, case.name), **case.config))
    other = run_fresh(_difference_to_other_weights, 2, case, tmp_path)
    assert other[0] > 0.05


def _difference_to_other_weights(watch: Watch, case: Case, folder: Path) -> float:
    from shardwise.bench import steps

    ways = steps._ways(case, folder)
    with torch.no_grad():
        for parameter in ways[OURS].parameters():
            parameter.neg_()

    steps._ways = lambda *_: ways
    return float(measure_steps(watch, case, folder, 1).get(OURS, {}).get("difference", 0.0))


# --- the command -----------------------------------------------------------------------------------------------------


def test_command_writes_figures_and_a_picture(
    loaded: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.bench.load.bench_load", lambda *args, **kwargs: loaded)
    out, picture = tmp_path / "new" / "load.json", tmp_path / "load.png"
    result = CliRunner().invoke(main, ["bench", "load", "--json", str(out), "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text()) == loaded
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "shardwise" in result.output


def test_steps_are_drawn(stepped: dict[str, Any], tmp_path: Path) -> None:
    plot.draw_steps(stepped, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
