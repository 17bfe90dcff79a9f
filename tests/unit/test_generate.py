"""What `shardwise generate` makes of its options, and what it writes; nothing here starts a rank or loads a model."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from shardwise.cli import main
from shardwise.errors import ConfigError, OutputError, RankFailure, UnsupportedOption
from shardwise.generate import command, output
from shardwise.generate.degree import smallest_that_fits, weights_by_degree
from shardwise.generate.preflight import names_a_path
from shardwise.generate.request import Request
from tests.videos import frames_of

GIB = 2**30
TAKES = {"prompt", "negative_prompt", "num_inference_steps", "guidance_scale", "width", "height"}


# --- the pipeline's arguments -----------------------------------------------------------------------------------------


def test_options_become_the_arguments_of_the_pipeline() -> None:
    request = Request("m", ("a",), negative_prompt="b", steps=3, guidance=2.5, size=(32, 16))
    assert request.call("P", TAKES) == {
        "prompt": "a",
        "negative_prompt": "b",
        "num_inference_steps": 3,
        "guidance_scale": 2.5,
        "width": 32,
        "height": 16,
    }


def test_what_is_not_asked_for_is_left_to_the_pipeline() -> None:
    assert Request("m", ("a",)).call("P", TAKES) == {"prompt": "a"}


def test_several_pictures_are_as_many_prompts() -> None:
    call = Request("m", ("a", "b"), negative_prompt="n", images=2).call("P", TAKES)
    assert call == {"prompt": ["a", "a", "b", "b"], "negative_prompt": ["n"] * 4}


def test_embedded_model_is_called_as_it_was_trained_unless_said_otherwise() -> None:
    call = Request("embedded", ("a",), steps=3).call("P", TAKES)
    assert (call["height"], call["num_inference_steps"]) == (64, 3)


@pytest.mark.parametrize(
    ("asked", "option"),
    [
        ({"frames": 9}, "--num-frames: P takes no num_frames"),
        ({"arguments": {"strenth": 1}}, "--arguments: P takes no strenth"),
        ({"arguments": {"output_type": "pt"}}, "--arguments: output_type follows from other options"),
    ],
)
def test_option_that_the_pipeline_does_not_know_is_refused_by_name(asked: Any, option: str) -> None:
    with pytest.raises(UnsupportedOption, match=option):
        Request("m", ("a",), **asked).call("P", TAKES)


# --- the command ------------------------------------------------------------------------------------------------------


def invoke(*options: str) -> Any:
    return CliRunner().invoke(main, ["generate", "embedded", "--prompt", "a", *options])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tp", "two"], "neither a number of ranks nor"),
        (["--tp", "0"], "neither a number of ranks nor"),
        (["--size", "64"], "not a width and a height"),
        (["--size", "64x0"], "not a width and a height"),
        (["--arguments", "{"], "not valid JSON"),
        (["--arguments", "[1]"], "not a JSON object"),
        (["--seed", "-1"], "--seed"),
    ],
)
def test_option_that_cannot_be_meant_is_a_question_gone_wrong(options: list[str], says: str) -> None:
    result = invoke(*options)
    assert result.exit_code == 2
    assert says in result.output


def test_command_starts_as_many_ranks_as_the_degrees_make() -> None:
    options = "--tp 2 --cfg 2 --size 64x32 --components transformer,vae --device cpu --timeout 5".split()
    with mock.patch.object(command, "run_ranks", return_value=[["f.png"], []]) as started:
        result = invoke(*options)
    (name, ranks, request), kept = started.call_args
    assert (result.output, result.exit_code) == ("f.png\n", 0)
    assert (name, ranks, request.size, request.components) == (
        command.WORKER,
        4,
        (64, 32),
        ("transformer", "vae"),
    )
    assert (kept["device"], kept["timeout"].total_seconds()) == ("cpu", 5)


@pytest.mark.parametrize(
    ("error", "code"),
    [(RankFailure("rank 1 of 2 failed"), 1), (ConfigError("no"), 2), (KeyboardInterrupt(), 130)],
)
def test_exit_code_says_what_kind_of_end_it_was(tmp_path: Path, error: BaseException, code: int) -> None:
    events = tmp_path / "events.jsonl"
    with mock.patch.object(command, "run_ranks", side_effect=error):
        result = invoke("--events", str(events))
    assert result.exit_code == code
    assert result.output == (f"Error: {error}\n" if str(error) else "")
    if code == 1:
        (line,) = events.read_text().splitlines()
        assert json.loads(line)["message"] == "rank 1 of 2 failed"


def test_event_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with (
        mock.patch.object(command, "run_ranks", side_effect=RankFailure("rank 1 failed")),
        mock.patch.object(Path, "open", side_effect=OSError(errno.ENOSPC, "No space left on device")),
    ):
        result = invoke("--events", str(tmp_path / "e"))
    assert result.exit_code == 1
    assert "rank 1 failed" in result.output
    assert "No space left on device" in result.output


@pytest.mark.parametrize(
    ("location", "is_path"),
    [
        ("org/name", False),
        ("org/FLUX.1-lora", False),
        ("a.safetensors", True),
        ("d/a.safetensors", True),
        ("./a", True),
    ],
)
def test_adapter_of_the_hub_is_told_from_a_file(location: str, is_path: bool) -> None:
    assert names_a_path(location) == is_path


# --- --tp auto --------------------------------------------------------------------------------------------------------


def test_auto_takes_the_smallest_degree_that_fits_and_says_so() -> None:
    needed = {1: 40 * GIB, 2: 21 * GIB, 4: 11 * GIB}
    degree, why = smallest_that_fits(needed, dict.fromkeys(needed, 24 * GIB))
    assert degree == 2
    assert "2 needs 21.00 of 24.00 GiB" in why
    assert "1 needs 40.00 of 24.00 GiB" in why


def test_auto_takes_one_rank_where_one_is_enough() -> None:
    assert smallest_that_fits({1: GIB, 2: GIB // 2}, {1: GIB, 2: GIB})[0] == 1


def test_auto_says_so_where_nothing_fits() -> None:
    with pytest.raises(
        ConfigError, match=r"at no degree: tp 1 needs 4\.00 of 1\.00 GiB a rank; tp 2 needs 2\.00"
    ):
        smallest_that_fits({1: 4 * GIB, 2: 2 * GIB}, {1: GIB, 2: GIB})


def test_weights_of_a_degree_are_slices_of_what_is_sharded_and_all_of_the_rest() -> None:
    import torch

    request = Request("embedded", ("a",))
    needed = weights_by_degree(request, [1, 2, 4], torch.float32)
    apart = weights_by_degree(Request("embedded", ("a",), components=()), [1, 2], torch.float32)
    assert apart[1] == apart[2] == needed[1]
    assert needed[1] > needed[2] > needed[4] > 0


# --- files ------------------------------------------------------------------------------------------------------------

PARAMETERS = {"prompt": "ein Kreis, 円", "seed": 3, "shardwise": "1"}


def picture() -> Image.Image:
    return Image.fromarray(np.zeros((4, 4, 3), "uint8"))


def test_png_carries_its_parameters_in_any_language(tmp_path: Path) -> None:
    file = output.write_png(picture(), tmp_path, "p", PARAMETERS)
    with Image.open(file) as read:
        assert json.loads(read.text["parameters"]) == PARAMETERS
        assert read.text["Description"] == PARAMETERS["prompt"]


def test_no_picture_is_overwritten(tmp_path: Path) -> None:
    files = [output.write_png(picture(), tmp_path, "p", PARAMETERS).name for _ in range(3)]
    assert files == ["p.png", "p-2.png", "p-3.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)


def test_file_that_has_no_room_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    def full(file: Path, data: Any) -> None:
        file.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        mock.patch.object(Path, "write_bytes", full),
        pytest.raises(OutputError, match=r"p\.png .*No space left"),
    ):
        output.write_png(picture(), tmp_path, "p", PARAMETERS)
    assert not list(tmp_path.iterdir())


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file/out cannot be made"):
        output.require_folder(tmp_path / "file" / "out")


def test_video_has_its_frames_and_its_parameters_beside_it(tmp_path: Path) -> None:
    grey = np.linspace(0.1, 0.9, 5).reshape(5, 1, 1, 1) * np.ones((1, 32, 48, 3))
    file = output.write_mp4(grey, tmp_path, "v", PARAMETERS, 8)
    frames = frames_of(file, 32, 48)
    assert len(frames) == 5
    assert np.abs(frames.mean((1, 2, 3)) / 255 - grey.mean((1, 2, 3))).max() < 0.02
    assert json.loads((tmp_path / "v.json").read_text()) == PARAMETERS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v.json", "v.mp4"]


def test_what_is_missing_to_write_videos_is_said() -> None:
    with (
        mock.patch.object(output, "find_spec", return_value=None),
        pytest.raises(OutputError, match=r"\[video\]"),
    ):
        output.require_video_writer()


def test_events_have_the_time(tmp_path: Path) -> None:
    from shardwise.generate.events import append

    append(str(tmp_path / "e"), "step", step=1)
    append(None, "step", step=2)
    (line,) = (tmp_path / "e").read_text().splitlines()
    event = json.loads(line)
    assert abs(event.pop("time") - time.time()) < 60
    assert event == {"event": "step", "step": 1}


# --- steps ------------------------------------------------------------------------------------------------------------


class Bar:
    """A pipeline's own progress bar, that is not shown."""

    def __init__(self, iterable: Any = None, total: int | None = None) -> None:
        self.items, self.total = iterable, total if total is not None else len(iterable)

    def __iter__(self) -> Any:
        return iter(self.items)

    def set_postfix(self, text: str) -> str:
        return text


class Pipeline:
    """What is watched of a pipeline; it asks for its bar as pipelines of diffusers do, in one of two ways."""

    progress_bar = staticmethod(Bar)

    def set_progress_bar_config(self, disable: bool) -> None:
        assert disable

    def counted(self, fails: bool = False) -> None:
        with self.progress_bar(total=2) as bar:
            bar.update()
            assert bar.set_postfix("x") == "x"
            if fails:
                raise ValueError
            bar.update()

    def iterated(self) -> None:
        assert list(self.progress_bar([5, 6])) == [5, 6]


def told(run: Any) -> list[Any]:
    """Return what a job is told while a pipeline runs."""
    from shardwise.generate.progress import watch_steps

    progress, pipeline = mock.Mock(), Pipeline()
    watch_steps(pipeline, progress)
    run(pipeline)
    return [
        call.args[0] if name == "phase" else call.args[:2]
        for call in progress.method_calls
        for name in [call[0]]
    ]


@pytest.mark.parametrize("run", [Pipeline.counted, Pipeline.iterated])
def test_steps_are_told_in_either_way_of_asking_for_a_bar(run: Any) -> None:
    assert told(run) == ["denoising", (1, 2), (2, 2), "decoding"]


def test_denoising_that_fails_is_followed_by_no_decoding() -> None:
    def run(pipeline: Pipeline) -> None:
        with pytest.raises(ValueError):
            pipeline.counted(fails=True)

    assert told(run) == ["denoising", (1, 2)]
