"""`shardwise generate` on the embedded model: the pictures of one process, or one clear message."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLFlux2, DiffusionPipeline, Flux2Transformer2DModel
from PIL import Image
from safetensors.torch import save_file

import shardwise
from shardwise.demo import CALL, demo_model_path
from shardwise.errors import RankFailure
from shardwise.generate import worker
from shardwise.generate.progress import Progress
from shardwise.generate.request import Request
from shardwise.launch import run_ranks
from shardwise.launch.group import limit_collectives
from tests import tolerances
from tests.lora import adapter
from tests.machine import with_cores
from tests.pool import COLLECTIVE_SECONDS, Pool, RankError
from tests.videos import frames_of
from tests.whole_pipelines import save_small

BIN = Path(sys.executable).parent
PROMPT = "a red circle on a white background"
PROMPTS = (PROMPT, "a blue square on a yellow background")
SEED = 7
LIMIT = 30
"""Seconds within which everything has to have ended, once a rank has failed."""


def pixels(file: str | Path) -> np.ndarray:
    with Image.open(file) as picture:
        return np.asarray(picture).astype(int)


@pytest.fixture(scope="module")
def one_process() -> list[np.ndarray]:
    """Two pictures of each prompt, as stock diffusers draws them in this process, from the seeds 7 to 10."""
    pipeline = DiffusionPipeline.from_pretrained(demo_model_path())
    pipeline.set_progress_bar_config(disable=True)
    generators = [torch.Generator().manual_seed(SEED + i) for i in range(4)]
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    drawn = pipeline(prompt=prompts, generator=generators, **CALL).images
    return [np.asarray(picture).astype(int) for picture in drawn]


def steps_of_255(files: Sequence[str], expected: Sequence[np.ndarray]) -> int:
    return max(int(np.abs(pixels(f) - e).max()) for f, e in zip(files, expected, strict=True))


def events_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_ranks_draw_the_pictures_of_one_process(
    ranks: Pool, one_process: list[np.ndarray], tmp_path: Path
) -> None:
    request = Request("embedded", PROMPTS, tp=ranks.size, seed=SEED, images=2, out=str(tmp_path))
    files, *others = ranks.run(worker.generate, request)
    assert others == [files] * (ranks.size - 1)
    assert [Path(file).name for file in files] == [f"seed-{SEED + i}.png" for i in range(4)]
    assert steps_of_255(files, one_process) <= tolerances.PIXEL


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"tp": 2, "unload_text_encoders": True, "components": ("transformer",)}),
        (2, {"cfg": 2}),
        (2, {"ulysses": 2}),
        (2, {"dp": 2}),
        (4, {"tp": 2, "cfg": 2}),
        (4, {"tp": 2, "dp": 2}),
        (4, {"tp": 2, "ulysses": 2}),
        (4, {"cfg": 2, "dp": 2}),
        (4, {"cfg": 2, "ulysses": 2}),
        (4, {"dp": 2, "ulysses": 2}),
    ],
    ids=str,
)
def test_ranks_that_share_other_work_draw_the_pictures_of_one_process(
    request: pytest.FixtureRequest, one_process: list[np.ndarray], tmp_path: Path, size: int, options: Any
) -> None:
    pool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[size])
    asked = Request("embedded", (PROMPT,), seed=SEED, images=2, out=str(tmp_path), **options)
    files = pool.run(worker.generate, asked)
    assert files == files[:1] * size
    assert steps_of_255(files[0], one_process[:2]) <= tolerances.PIXEL


def test_video_is_written_as_frames_with_its_parameters(two_ranks: Pool, tmp_path: Path) -> None:
    save_small("WanPipeline", tmp_path / "model")
    request = Request(
        str(tmp_path / "model"),
        (PROMPT,),
        tp=2,
        steps=2,
        size=(32, 48),
        frames=5,
        out=str(tmp_path),
        arguments={"max_sequence_length": 16},
    )
    (file,), _ = two_ranks.run(worker.generate, request)
    assert len(frames_of(file, 48, 32)) == 5
    parameters = json.loads(Path(file).with_suffix(".json").read_text())
    assert (parameters["pipeline"], parameters["num_frames"], parameters["tp"]) == ("WanPipeline", 5, 2)


def _tile(request: Request) -> list[str]:
    """Generate with tiles that are small enough for a small picture."""
    with mock.patch.object(AutoencoderKLFlux2, "enable_tiling", _small_tiles):
        return worker.generate(request)


def _small_tiles(vae: Any) -> None:
    vae.use_tiling = True
    vae.tile_sample_min_size, vae.tile_latent_min_size = 32, 8


def test_spread_decode_draws_the_picture_of_one_process_with_tiling(two_ranks: Pool, tmp_path: Path) -> None:
    pipeline = DiffusionPipeline.from_pretrained(demo_model_path())
    pipeline.set_progress_bar_config(disable=True)
    _small_tiles(pipeline.vae)
    expected = pipeline(prompt=PROMPT, generator=torch.Generator().manual_seed(SEED), **CALL).images[0]
    request = Request("embedded", (PROMPT,), tp=2, seed=SEED, spread_decode=True, out=str(tmp_path))
    files, _ = two_ranks.run(_tile, request)
    assert steps_of_255(files, [np.asarray(expected).astype(int)]) <= tolerances.PIXEL


@pytest.fixture(scope="module")
def lora_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter for the embedded model's transformer."""
    file = tmp_path_factory.mktemp("lora") / "adapter.safetensors"
    model = Flux2Transformer2DModel.from_pretrained(demo_model_path(), subfolder="transformer")
    save_file({name: 0.3 * factor for name, factor in adapter(model).items()}, file)
    return file


def test_lora_draws_the_picture_of_one_process_with_it(
    two_ranks: Pool, one_process: list[np.ndarray], lora_file: Path, tmp_path: Path
) -> None:
    pipeline = DiffusionPipeline.from_pretrained(demo_model_path())
    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_lora_weights(lora_file)
    drawn = pipeline(prompt=PROMPT, generator=torch.Generator().manual_seed(SEED), **CALL).images[0]
    expected = np.asarray(drawn).astype(int)
    assert np.abs(expected - one_process[0]).max() > 50
    request = Request("embedded", (PROMPT,), tp=2, seed=SEED, lora=str(lora_file), out=str(tmp_path))
    files, _ = two_ranks.run(worker.generate, request)
    assert steps_of_255(files, [expected]) <= tolerances.PIXEL


def test_int8_weights_are_fewer_bytes_and_draw_nearly_the_same_picture(
    two_ranks: Pool, one_process: list[np.ndarray], tmp_path: Path
) -> None:
    events = tmp_path / "events.jsonl"
    request = Request(
        "embedded", (PROMPT,), tp=2, seed=SEED, quantize="int8", out=str(tmp_path), events=str(events)
    )
    files, _ = two_ranks.run(worker.generate, request)
    assert 0 < np.abs(pixels(files[0]) - one_process[0]).mean() < 10
    (loaded,) = (event for event in events_of(events) if event["event"] == "loaded")
    held = {part["name"]: part["bytes"] for part in loaded["components"]}
    assert held["transformer"][0] < 3_318_096  # two bytes for each parameter of a rank, and not four


def test_another_seed_draws_another_picture(
    two_ranks: Pool, one_process: list[np.ndarray], tmp_path: Path
) -> None:
    # The negative control of the comparison above.
    request = Request("embedded", (PROMPT,), tp=2, seed=SEED + 1, out=str(tmp_path))
    files, _ = two_ranks.run(worker.generate, request)
    assert steps_of_255(files, one_process[1:2]) <= tolerances.PIXEL
    assert steps_of_255(files, one_process[:1]) > 100


def _unequal(request: Request) -> Any:
    return worker.generate(replace(request, seed=request.seed + torch.distributed.get_rank()))


def test_ranks_that_are_asked_for_different_things_raise_alike(two_ranks: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        two_ranks.run(_unequal, Request("embedded", (PROMPT,), tp=2, out=str(tmp_path)))
    assert str(caught.value).count("RankFailure: starting to generate: the ranks differ in seed") == 2
    assert not list(tmp_path.iterdir())


def _timeouts() -> tuple[set[timedelta], set[timedelta]]:
    """Return the time-outs of all groups, once a mesh has added some, before and after they are limited."""
    shardwise.init_mesh(shardwise.ParallelConfig(tp=2))
    groups = torch.distributed.distributed_c10d._world.pg_map
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    before = {backend.options._timeout for backend in backends}
    limit_collectives(timedelta(seconds=77))
    after = {backend.options._timeout for backend in backends}
    limit_collectives(timedelta(seconds=COLLECTIVE_SECONDS))
    return before, after


def test_groups_of_a_mesh_wait_no_longer_than_was_said(two_ranks: Pool) -> None:
    for before, after in two_ranks.run(_timeouts):
        assert len(before) > 1  # what is limited
        assert after == {timedelta(seconds=77)}


# --- what cannot be done, on every rank -------------------------------------------------------------------------------


def _truncate(folder: Path) -> None:
    os.truncate(folder / "transformer" / "diffusion_pytorch_model.safetensors", 1_000_000)


def _lose_the_vae(folder: Path) -> None:
    shutil.rmtree(folder / "vae")


def _lose_the_index(folder: Path) -> None:
    (folder / "model_index.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_truncate, "transformer/diffusion_pytorch_model.safetensors"),
        (_lose_the_vae, "vae"),
        (_lose_the_index, "is no pipeline"),
    ],
)
def test_files_that_cannot_be_read_are_named_on_every_rank(
    two_ranks: Pool, tmp_path: Path, spoil: Callable[[Path], None], says: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo_model_path(), folder)
    spoil(folder)
    request = Request(str(folder), (PROMPT,), tp=2, out=str(tmp_path), arguments=CALL)
    with pytest.raises(RankError) as caught:
        two_ranks.run(worker.generate, request)
    for text in str(caught.value).split("--- rank ")[1:]:
        assert says in text
        assert "CheckpointError" in text


def _with_little_room(request: Request) -> Any:
    def full(file: Path, data: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(Path, "write_bytes", full):
        return worker.generate(request)


def test_picture_without_room_is_said_on_every_rank(two_ranks: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        two_ranks.run(_with_little_room, Request("embedded", (PROMPT,), tp=2, out=str(tmp_path)))
    first, second = str(caught.value).split("--- rank ")[1:]
    assert "OutputError: " in first
    assert "writing failed on rank 0 of 2: OutputError: " in second
    assert "seed-0.png cannot be written: No space left on device" in second
    assert not list(tmp_path.iterdir())


# --- the command ------------------------------------------------------------------------------------------------------


def run(
    *command: str | Path, code: int = 0, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    done = subprocess.run([str(c) for c in command], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_command_draws_and_says_where(one_process: list[np.ndarray], tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    options = [
        "--tp",
        "2",
        "--device",
        "cpu",
        "--seed",
        SEED,
        "--steps",
        12,
        "--size",
        "64x64",
        "--out",
        tmp_path,
    ]
    done = run(
        BIN / "shardwise", "generate", "embedded", "--prompt", PROMPT, *map(str, options), "--events", events
    )
    (file,) = done.stdout.splitlines()
    assert steps_of_255([file], one_process[:1]) <= tolerances.PIXEL
    for name in ("transformer", "denoising", "decoding"):  # one display, of the first rank
        assert done.stderr.count(f"\n{name} ") == 1
    _check_metadata(file)
    _check_events(events_of(events), file)


def _check_metadata(file: str) -> None:
    with Image.open(file) as picture:
        text = picture.text
    parameters = json.loads(text["parameters"])
    wanted = {
        "prompt": PROMPT,
        "seed": SEED,
        "num_inference_steps": 12,
        "guidance_scale": 2.0,
        "width": 64,
        "model": "embedded",
        "pipeline": "Flux2KleinPipeline",
        "tp": 2,
        "dtype": "float32",
        "shardwise": shardwise.__version__,
    }
    assert wanted.items() <= parameters.items()
    assert text["Description"] == PROMPT


def _check_events(events: list[dict[str, Any]], file: str) -> None:
    assert [event["phase"] for event in events if event["event"] == "phase"] == [
        "loading", "encoding", "denoising", "decoding", "writing",
    ]  # fmt: skip
    loads = [event for event in events if event["event"] == "load" and event["component"] == "transformer"]
    assert len(loads[-1]["bytes"]) == 2
    assert sum(loads[-1]["bytes"]) == loads[-1]["total"] == 2 * loads[-1]["bytes"][0]
    steps = [event for event in events if event["event"] == "step"]
    assert [(step["step"], step["of"]) for step in steps] == [(i, 12) for i in range(1, 13)]
    assert all(step["seconds"] > 0 for step in steps)
    assert all(memory > 1e6 for memory in steps[-1]["memory"])
    assert len(steps[-1]["memory"]) == 2
    assert events[-1]["event"] == "done"
    assert events[-1]["files"] == [file]


def test_command_draws_where_a_rank_has_four_cores(one_process: list[np.ndarray], tmp_path: Path) -> None:
    options = ["--tp", "2", "--device", "cpu", "--prompt", PROMPT, "--seed", str(SEED), "--out", tmp_path]
    run(BIN / "shardwise", "generate", "embedded", *options, variables=with_cores(tmp_path, 8))
    assert steps_of_255([str(tmp_path / f"seed-{SEED}.png")], one_process[:1]) <= tolerances.PIXEL


def test_command_is_a_rank_under_torchrun(one_process: list[np.ndarray], tmp_path: Path) -> None:
    command = ["--nproc-per-node", "2", "--no-python", str(BIN / "shardwise"), "generate", "embedded"]
    options = ["--prompt", PROMPT, "--tp", "auto", "--device", "cpu", "--seed", str(SEED), "--out", tmp_path]
    run(BIN / "torchrun", *command, *options)
    assert steps_of_255([str(tmp_path / f"seed-{SEED}.png")], one_process[:1]) <= tolerances.PIXEL


# --- a rank that fails ------------------------------------------------------------------------------------------------


def _die_in(request: Request, phase: str, folder: Path) -> None:
    """Generate, but have rank 1 killed when a phase begins."""
    rank = int(os.environ["RANK"])
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    tell = Progress.phase

    def stop(progress: Progress, name: str) -> None:
        tell(progress, name)
        if name == phase and rank == 1:
            os.kill(os.getpid(), 9)

    Progress.phase = stop  # type: ignore[method-assign]
    worker.generate(request)


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("phase", ["loading", "denoising", "decoding"])
def test_rank_that_is_killed_ends_the_job_with_one_message(tmp_path: Path, phase: str) -> None:
    out, events = tmp_path / "out", tmp_path / "events.jsonl"
    request = Request("embedded", (PROMPT,), tp=2, out=str(out), events=str(events))
    with pytest.raises(RankFailure) as caught:
        run_ranks(_die_in, 2, request, phase, tmp_path, device="cpu")
    (died,) = (event for event in events_of(events) if event.get("phase") == phase)
    assert time.time() - died["time"] < LIMIT
    assert str(caught.value).startswith("rank 1 of 2 was killed by SIGKILL")
    assert str(caught.value).count("rank 1 of 2") == 1
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]
    assert not [pid for pid in pids if is_there(pid)]
    assert not [name for name in os.listdir("/dev/shm") for pid in pids if str(pid) in name]
    # Rank 0 may have finished its picture before it was ended; there is none that is half written.
    assert not list(out.glob(".*"))
    assert phase == "decoding" or not out.exists()
