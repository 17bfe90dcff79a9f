"""Folders are cut for ranks and put together again, bit for bit, in little memory, going on where it was stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from shardwise import TensorParallelConfig
from shardwise.checkpoint import layouts, reshard
from shardwise.checkpoint.layouts import Cut
from shardwise.checkpoint.reshard import Job
from shardwise.cli import main
from shardwise.errors import CheckpointError, PlanError, UnsupportedOption
from shardwise.models import offline
from shardwise.models.offline import shard_folder, unshard_folder
from shardwise.plan.layout import Shard
from tests.distributed.test_load_promises import MIB, WIDE, _peak
from tests.distributed.test_saving import differences
from tests.helpers import randomize, save_tiny
from tests.small_models import SMALL, Grouped, Mixture, Mlp, Parallel

FAMILIES = ["Flux2Transformer2DModel", "WanTransformer3DModel", "NucleusMoEImageTransformer2DModel"]


@pytest.fixture(autouse=True)
def small_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the classes of the small models be found by their names, as those of diffusers are."""
    classes, known = {cls.__name__: cls for cls in SMALL}, offline.model_class
    monkeypatch.setattr(offline, "model_class", lambda name: classes.get(name) or known(name))


def tp(degree: int, **options: Any) -> TensorParallelConfig:
    return TensorParallelConfig(degree, **options)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def equal(first: Path, second: Path) -> bool:
    a, b = tensors_of(first), tensors_of(second)
    same = all(t.dtype == b[n].dtype and torch.equal(t, b[n]) for n, t in a.items())
    config = (first / "config.json").read_bytes() == (second / "config.json").read_bytes()
    return a.keys() == b.keys() and same and config


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("cls", SMALL, ids=lambda cls: cls.__name__)
def test_folder_is_cut_and_put_together_again(tmp_path: Path, cls: type[Any]) -> None:
    randomize(cls()).save_pretrained(tmp_path / "source")
    shard_folder(tmp_path / "source", tmp_path / "four", tp(4))
    unshard_folder(tmp_path / "four", tmp_path / "whole")
    assert differences(tmp_path / "source", tmp_path / "whole") == []
    assert listing(tmp_path) == ["four", "source", "whole"]


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_cut_for_four_two_eight_and_put_together(tmp_path: Path, name: str) -> None:
    """Files of several parts, of bf16, each cut out of the one before; Nucleus has experts in one parameter."""
    save_tiny(name, tmp_path / "source", max_shard_size="60KB")
    before, degrees = tmp_path / "source", [4, 2, 4]
    for step, degree in enumerate(degrees):
        shard_folder(before, tmp_path / str(step), tp(degree))
        before = tmp_path / str(step)
    unshard_folder(before, tmp_path / "whole", max_shard_size="60KB")
    assert equal(tmp_path / "source", tmp_path / "whole")
    assert differences(tmp_path / "0", tmp_path / "2") == []


def test_mlp_is_cut_for_eight_and_back(tmp_path: Path) -> None:
    randomize(Mlp()).save_pretrained(tmp_path / "source")
    shard_folder(tmp_path / "source", tmp_path / "four", tp(4))
    shard_folder(tmp_path / "four", tmp_path / "two", tp(2))
    shard_folder(tmp_path / "two", tmp_path / "eight", tp(8))
    shard_folder(tmp_path / "eight", tmp_path / "again", tp(4))
    unshard_folder(tmp_path / "eight", tmp_path / "whole")
    assert differences(tmp_path / "four", tmp_path / "again") == []
    assert differences(tmp_path / "source", tmp_path / "whole") == []


def test_dtype_and_variant_are_kept(tmp_path: Path) -> None:
    randomize(Parallel()).to(torch.bfloat16).save_pretrained(tmp_path / "source", variant="bf16")
    shard_folder(tmp_path / "source", tmp_path / "two", tp(2), variant="bf16")
    unshard_folder(tmp_path / "two", tmp_path / "whole", variant="bf16")
    assert differences(tmp_path / "source", tmp_path / "whole") == []


def test_blocks_that_are_put_together_as_one_are_seen(tmp_path: Path) -> None:
    randomize(Parallel()).save_pretrained(tmp_path / "source")
    shard_folder(tmp_path / "source", tmp_path / "two", tp(2))
    read = layouts._cut

    def in_one_block(*args: Any) -> Cut:
        cut = read(*args)
        assert isinstance(cut.layout, Shard)
        return replace(cut, layout=cut.layout.of(cut.layout.size))

    with mock.patch.object(layouts, "_cut", in_one_block):
        unshard_folder(tmp_path / "two", tmp_path / "whole")
    assert differences(tmp_path / "source", tmp_path / "whole") == ["diffusion_pytorch_model.safetensors"]


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["shard", "unshard"])
def test_memory_does_not_grow_with_the_model(tmp_path: Path, step: str) -> None:
    randomize(Mlp(**WIDE)).save_pretrained(tmp_path / "source")
    shard_folder(tmp_path / "source", tmp_path / "two", tp(2))
    unshard_folder(tmp_path / "two", tmp_path / "whole")
    with _peak() as grown:
        if step == "shard":
            shard_folder(tmp_path / "source", tmp_path / "again", tp(2))
        else:
            unshard_folder(tmp_path / "two", tmp_path / "again")
    assert grown["peak"] < 16 * MIB + 8 * MIB
    assert differences(tmp_path / "source", tmp_path / "whole") == []


def test_memory_of_one_tensor_is_seen(tmp_path: Path) -> None:
    with _peak() as grown:
        randomize(Mlp(**WIDE))
    assert grown["peak"] > 60 * MIB


# --- stopped, and gone on with ----------------------------------------------------------------------------------------


class Stopped(BaseException):
    """What an interrupt is to a job."""


def stop_after(calls: int) -> Callable[..., None]:
    """Return a `write_all` that is stopped in its n-th call."""
    write_all, made = reshard.write_all, 0

    def write(*args: Any) -> None:
        nonlocal made
        made += 1
        if made > calls:
            raise Stopped
        write_all(*args)

    return write


def stopped(source: Path, target: Path, calls: int, degree: int = 4) -> Path:
    """Cut a folder until it is stopped, and return the folder that is left."""
    with mock.patch.object(reshard, "write_all", stop_after(calls)), pytest.raises(Stopped):
        shard_folder(source, target, tp(degree))
    assert not target.exists()
    (left,) = target.parent.glob(".target.saving-*")
    return left


@pytest.fixture
def source(tmp_path: Path) -> Path:
    randomize(Parallel(layers=1)).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def test_stopped_job_goes_on_and_writes_no_file_again(tmp_path: Path, source: Path) -> None:
    shard_folder(source, tmp_path / "straight", tp(4))
    written: list[str] = []
    real = Job._write

    def noted(self: Job, folder: Path, target: Any, progress: Any) -> None:
        written.append(target.file.name)
        real(self, folder, target, progress)

    left = stopped(source, tmp_path / "target", 25)
    complete = [name for name in listing(left) if name.endswith(".safetensors")]
    (unfinished,) = (name for name in listing(left) if name.endswith(".part"))
    assert 0 < len(complete) < 4
    with mock.patch.object(Job, "_write", noted):
        assert shard_folder(source, tmp_path / "target", tp(4)) == len(complete)
    assert len(written) == 4 - len(complete)
    assert written[0] == unfinished.removesuffix(".part")
    assert not set(written) & set(complete)
    assert differences(tmp_path / "straight", tmp_path / "target") == []
    assert listing(tmp_path) == ["source", "straight", "target"]


def test_job_that_is_stopped_again_and_again_comes_to_its_end(tmp_path: Path, source: Path) -> None:
    shard_folder(source, tmp_path / "straight", tp(4))
    stops = 0
    while not (tmp_path / "target").exists():
        with suppress(Stopped), mock.patch.object(reshard, "write_all", stop_after(20)):
            shard_folder(source, tmp_path / "target", tp(4))
        stops += 1
        assert stops < 5
    assert stops > 2
    assert differences(tmp_path / "straight", tmp_path / "target") == []


@pytest.mark.parametrize("damage", ["shorter", "another_header", "a_folder_of_another_job"])
def test_file_that_is_not_what_it_should_be_is_written_again(
    tmp_path: Path, source: Path, damage: str
) -> None:
    shard_folder(source, tmp_path / "straight", tp(4))
    left = stopped(source, tmp_path / "target", 25)
    complete = sorted(left.glob("*.safetensors"))
    content = complete[0].read_bytes()
    if damage == "shorter":
        complete[0].write_bytes(content[:-1])
    elif damage == "another_header":
        complete[0].write_bytes(content.replace(b'"rank', b'"rink', 1))
    else:
        randomize(Parallel(layers=1), 5).save_pretrained(source)
        shard_folder(source, tmp_path / "other", tp(4))
    expected = len(complete) - 1 if damage != "a_folder_of_another_job" else 0
    assert shard_folder(source, tmp_path / "target", tp(4)) == expected
    straight = tmp_path / ("other" if damage == "a_folder_of_another_job" else "straight")
    assert differences(straight, tmp_path / "target") == []


def test_two_processes_do_not_do_one_job(tmp_path: Path, source: Path) -> None:
    left = stopped(source, tmp_path / "target", 1)
    with reshard._alone(left), pytest.raises(CheckpointError, match="another process is writing"):
        shard_folder(source, tmp_path / "target", tp(4))


def test_source_that_changes_meanwhile_is_an_error(tmp_path: Path, source: Path) -> None:
    real = Job._write

    def touched(self: Job, *args: Any) -> None:
        os.utime(source / "diffusion_pytorch_model.safetensors", ns=(1, 1))
        real(self, *args)

    with (
        mock.patch.object(Job, "_write", touched),
        pytest.raises(CheckpointError, match="was changed while it was read"),
    ):
        shard_folder(source, tmp_path / "target", tp(2))
    assert not (tmp_path / "target").exists()


# --- what is refused --------------------------------------------------------------------------------------------------


def test_whole_checkpoint_is_not_put_together(tmp_path: Path, source: Path) -> None:
    with pytest.raises(CheckpointError, match="a whole checkpoint already"):
        unshard_folder(source, tmp_path / "target")


def test_size_that_is_none_is_refused(tmp_path: Path, source: Path) -> None:
    shard_folder(source, tmp_path / "two", tp(2))
    with pytest.raises(UnsupportedOption, match="max_shard_size"):
        unshard_folder(tmp_path / "two", tmp_path / "target", max_shard_size="much")


def test_degree_that_does_not_divide_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    randomize(Mlp(hidden=10)).save_pretrained(tmp_path / "source")
    with pytest.raises(PlanError, match="degrees that fit the whole plan: 1, 2, 5, 10"):
        shard_folder(tmp_path / "source", tmp_path / "target", tp(4))
    assert listing(tmp_path) == ["source"]


def test_weights_that_are_missing_are_named(tmp_path: Path, source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "layers": 2}))
    with pytest.raises(CheckpointError, match=r"missing: blocks.1.proj_in.weight"):
        shard_folder(source, tmp_path / "target", tp(2))


def test_folder_with_something_else_is_refused(tmp_path: Path, source: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"holds notes.txt"):
        shard_folder(source, tmp_path / "target", tp(2))
    assert listing(tmp_path / "target") == ["notes.txt"]


# --- the commands -----------------------------------------------------------------------------------------------------


def command(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def test_commands_cut_and_put_together(tmp_path: Path) -> None:
    randomize(Mixture()).save_pretrained(tmp_path / "source")
    first = command("shard", tmp_path / "source", tmp_path / "two", "--tp", 2)
    assert first.exit_code == 0, first.output
    assert "for 2 ranks: 100%" in first.output
    second = command("unshard", tmp_path / "two", tmp_path / "whole", "--max-shard-size", "1KB")
    assert second.exit_code == 0, second.output
    assert equal(tmp_path / "source", tmp_path / "whole")
    assert "diffusion_pytorch_model.safetensors.index.json" in listing(tmp_path / "whole")
    assert type(Mixture.from_pretrained(tmp_path / "whole")) is Mixture


def test_command_says_what_was_complete_before(tmp_path: Path, source: Path) -> None:
    complete = len(list(stopped(source, tmp_path / "target", 25).glob("*.safetensors")))
    result = command("shard", source, tmp_path / "target", "--tp", 4)
    assert result.exit_code == 0
    assert f"{complete} file{'s' if complete > 1 else ''} had been completed before" in result.output


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("shard", "{source}", "{target}", "--tp", "3"), 1, "tp_degree 3"),
        (("unshard", "{source}", "{target}"), 2, "a whole checkpoint already"),
        (("shard", "{tmp}", "{target}", "--tp", "2"), 2, "has no readable config.json"),
        (("shard", "{source}", "{target}", "--tp", "1"), 2, "1 is not in the range x>=2"),
    ],
    ids=["degree", "whole", "no_config", "one"],
)
def test_command_says_what_is_wrong(
    tmp_path: Path, source: Path, args: tuple[str, ...], code: int, message: str
) -> None:
    where = {"source": source, "target": tmp_path / "target", "tmp": tmp_path}
    result = command(*(arg.format(**where) for arg in args))
    assert result.exit_code == code
    assert message in result.output


def test_command_takes_a_plan_and_uneven_heads(tmp_path: Path) -> None:
    randomize(Grouped(kv_heads=8)).save_pretrained(tmp_path / "source")
    assert command("shard", tmp_path / "source", tmp_path / "three", "--tp", 3).exit_code == 1
    result = command("shard", tmp_path / "source", tmp_path / "three", "--tp", 3, "--uneven")
    assert result.exit_code == 0, result.output
    unshard_folder(tmp_path / "three", tmp_path / "whole")
    assert differences(tmp_path / "source", tmp_path / "whole") == []
    (tmp_path / "plan.json").write_text(json.dumps({"blocks.*.q_proj": "colwise"}))
    assert (
        command("shard", tmp_path / "source", tmp_path / "x", "--plan", tmp_path / "plan.json").exit_code == 1
    )
