"""A file for each rank: written by all, read at the same degree as it lies there and cut again at any other."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwise import TensorParallelConfig
from shardwise.checkpoint import save
from shardwise.models import offline as offline_module
from shardwise.models.offline import shard_folder
from tests.distributed.test_load_promises import MIB, WIDE, _is_mine, _peak, _requested
from tests.distributed.test_saving import attempt, differences, load
from tests.helpers import family, outputs, randomize, relative_error, save_tiny, tiny_inputs
from tests.pool import Pool
from tests.small_models import SMALL, Grouped, Mixture, Mlp, Parallel, Transformer

FAMILIES = ["Flux2Transformer2DModel", "WanTransformer3DModel", "NucleusMoEImageTransformer2DModel"]
FILES = ["diffusion_pytorch_model-rank-00001-of-00002.safetensors", "diffusion_pytorch_model.sharded.json"]


def saved(cls: type[Any], source: Path, target: Path, uneven: bool = False, **options: Any) -> None:
    load(cls, source, uneven).save_pretrained(target, sharded=True, **options)


def read(cls: type[Any], folder: Path, source: Path, uneven: bool = False, **options: Any) -> bool:
    """Return whether this rank's slices are those of the source, as read of a folder."""
    return _is_mine(load(cls, folder, uneven, **options), source)


@pytest.mark.parametrize("cls", SMALL, ids=lambda cls: cls.__name__)
def test_E3_files_of_two_ranks_are_read_by_two_by_four_and_by_one(
    two_ranks: Pool, four_ranks: Pool, tmp_path: Path, cls: type[Any]
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    randomize(cls()).save_pretrained(source)
    two_ranks.run(saved, cls, source, target)
    assert all(two_ranks.run(read, cls, target, source))
    assert all(four_ranks.run(read, cls, target, source))
    cls.from_pretrained(target).save_pretrained(tmp_path / "again")
    assert differences(source, tmp_path / "again") == []


@pytest.mark.parametrize(
    ("cls", "config", "uneven"),
    [
        (Grouped, {"kv_heads": 1}, False),
        (Grouped, {"kv_heads": 2}, False),
        (Transformer, {"width": 24, "num_attention_heads": 6}, True),
        (Mixture, {}, False),
    ],
    ids=["one_key_head", "two_key_heads", "six_heads", "experts"],
)
def test_E3_files_of_four_ranks_are_read_by_four_by_two_and_by_one(
    two_ranks: Pool, four_ranks: Pool, tmp_path: Path, cls: type[Any], config: dict[str, Any], uneven: bool
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    whole = randomize(cls(**config))
    whole.save_pretrained(source)
    four_ranks.run(saved, cls, source, target, uneven)
    assert all(four_ranks.run(read, cls, target, source, uneven))
    assert all(two_ranks.run(read, cls, target, source, uneven))
    alone = cls.from_pretrained(target, parallel_config=TensorParallelConfig(1))
    inputs = {"x": torch.ones(3, 7, config.get("width", SMALL[cls][-1]))}
    assert relative_error(outputs(alone, inputs), outputs(whole, inputs)) == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_E3_families_are_read_again_at_another_degree(
    two_ranks: Pool, four_ranks: Pool, tmp_path: Path, name: str
) -> None:
    source, target, cls = tmp_path / "source", tmp_path / "target", getattr(family(name), name)
    whole = save_tiny(name, source).eval()
    four_ranks.run(saved, cls, source, target)
    assert all(two_ranks.run(read, cls, target, source))
    alone, inputs = cls.from_pretrained(target), tiny_inputs(name)
    assert relative_error(outputs(alone, inputs), outputs(whole, inputs)) == 0


def _chain(folder: Path, target: Path, sharded: bool) -> None:
    load(Parallel, folder).save_pretrained(target, sharded=sharded)


def test_E3_four_two_four_and_back_to_whole_files_are_the_files_of_the_start(
    two_ranks: Pool, four_ranks: Pool, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    randomize(Parallel()).save_pretrained(source)
    four_ranks.run(_chain, source, tmp_path / "four", True)
    two_ranks.run(_chain, tmp_path / "four", tmp_path / "two", True)
    four_ranks.run(_chain, tmp_path / "two", tmp_path / "four_again", True)
    assert differences(tmp_path / "four", tmp_path / "four_again") == []
    two_ranks.run(_chain, tmp_path / "four_again", tmp_path / "whole", False)
    assert differences(source, tmp_path / "whole") == []


def _cast(folder: Path, source: Path) -> bool:
    model, whole = load(Mlp, folder, dtype=torch.bfloat16), load(Mlp, source, dtype=torch.bfloat16)
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), whole.parameters(), strict=True))


def test_E3_variant_and_dtype_are_those_that_are_asked_for(
    two_ranks: Pool, four_ranks: Pool, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    randomize(Mlp()).save_pretrained(source)
    two_ranks.run(saved, Mlp, source, target, variant="v")
    assert "diffusion_pytorch_model.sharded.v.json" in os.listdir(target)
    assert all(four_ranks.run(read, Mlp, target, source, variant="v"))
    two_ranks.run(saved, Mlp, source, tmp_path / "plain")
    assert all(four_ranks.run(_cast, tmp_path / "plain", source))


# --- bytes and memory -------------------------------------------------------------------------------------------------


def _costs(source: Path, target: Path) -> tuple[int, int, int, int]:
    """Return peak memory while saving, bytes asked of files while loading, and the bytes of the plan and the shard."""
    model = load(Mlp, source)
    model.save_pretrained(target / "first", sharded=True)
    with _peak() as grown:
        model.save_pretrained(target / "second", sharded=True)
    load(Mlp, target / "second")
    dist.barrier()
    before = _requested()
    again = load(Mlp, target / "second")
    shard = sum(p.nbytes for p in again.parameters())
    return grown["peak"], _requested() - before, again.load_report.bytes_read, shard


def test_E3_saving_takes_no_memory_and_loading_reads_each_byte_once(ranks: Pool, tmp_path: Path) -> None:
    randomize(Mlp(**WIDE)).save_pretrained(tmp_path / "source")
    for peak, requested, planned, shard in ranks.run(_costs, tmp_path / "source", tmp_path):
        assert peak < 8 * MIB
        assert planned == shard
        assert planned < requested < 1.01 * planned


def _peak_of_another_degree(folder: Path) -> tuple[int, int]:
    load(Mlp, folder)
    with _peak() as grown:
        model = load(Mlp, folder)
    return grown["peak"], sum(p.nbytes for p in model.parameters())


def test_E3_cutting_again_takes_the_shard_and_a_few_megabytes(
    two_ranks: Pool, four_ranks: Pool, tmp_path: Path
) -> None:
    randomize(Mlp(**WIDE)).save_pretrained(tmp_path / "source")
    four_ranks.run(saved, Mlp, tmp_path / "source", tmp_path / "target")
    for peak, shard in two_ranks.run(_peak_of_another_degree, tmp_path / "target"):
        assert peak < shard + 8 * MIB


# --- complete or absent, and what is refused --------------------------------------------------------------------------


def _failing(source: Path, target: Path, failing: int) -> tuple[str, list[str]]:
    model, created = load(Mlp, source), save.created

    def broken(path: Path, file: Any) -> Any:
        if dist.get_rank() == failing:
            raise OSError("no")
        return created(path, file)

    with mock.patch.object(save, "created", broken):
        error = attempt(lambda: model.save_pretrained(target, sharded=True))
    dist.barrier()
    return error, sorted(os.listdir(target.parent))


@pytest.mark.parametrize("failing", [0, 1])
def test_E3_rank_that_fails_leaves_nothing(two_ranks: Pool, tmp_path: Path, failing: int) -> None:
    randomize(Mlp()).save_pretrained(tmp_path / "source")
    answers = two_ranks.run(_failing, tmp_path / "source", tmp_path / "target", failing)
    for rank, (error, left) in enumerate(answers):
        assert error.startswith("OSError" if rank == failing else "RankFailure")
        assert left == ["source"]


def _unseen(source: Path, target: Path) -> str:
    model, is_dir = load(Mlp, source), Path.is_dir
    hidden = dist.get_rank() == 1
    with mock.patch.object(Path, "is_dir", lambda p: is_dir(p) and not (hidden and ".saving-" in p.name)):
        return attempt(lambda: model.save_pretrained(target, sharded=True))


def test_E3_rank_that_does_not_see_the_folder_is_told_on_all(two_ranks: Pool, tmp_path: Path) -> None:
    randomize(Mlp()).save_pretrained(tmp_path / "source")
    for message in two_ranks.run(_unseen, tmp_path / "source", tmp_path / "target"):
        assert message.startswith("CheckpointError: rank 1 does not see the folder")
    assert os.listdir(tmp_path) == ["source"]


def _refused(source: Path, target: Path, options: dict[str, Any]) -> str:
    model = load(Mlp, source)
    first = options.pop("first", {})
    mine = options if dist.get_rank() else {**options, **first}
    return attempt(lambda: model.save_pretrained(target, **mine))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharded": True, "max_shard_size": "1GB"}, "max_shard_size and sharded=True exclude each other"),
        ({"sharded": True, "first": {"sharded": False}}, "the ranks differ in sharded"),
    ],
    ids=["size", "one_rank_only"],
)
def test_E3_what_contradicts_itself_is_refused(
    two_ranks: Pool, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    randomize(Mlp()).save_pretrained(tmp_path / "source")
    for error in two_ranks.run(_refused, tmp_path / "source", tmp_path / "target", options):
        assert message in error
    assert os.listdir(tmp_path) == ["source"]


def test_E3_whole_model_is_not_saved_as_if_it_were_sharded(tmp_path: Path) -> None:
    message = attempt(lambda: Mlp().save_pretrained(tmp_path / "target", sharded=True))
    assert message.startswith("UnsupportedOption")
    assert "`shardwise shard`" in message
    assert os.listdir(tmp_path) == []


def _error(folder: Path) -> str:
    return attempt(lambda: load(Mlp, folder))


def test_E3_hostile_layouts_are_the_same_error_on_every_rank(
    two_ranks: Pool, four_ranks: Pool, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    randomize(Mlp()).save_pretrained(source)
    two_ranks.run(saved, Mlp, source, target)
    assert sorted(os.listdir(target))[1::2] == FILES
    content = (target / FILES[0]).read_bytes()
    assert b'\\"blocks\\":[16]' in content
    (target / FILES[0]).write_bytes(content.replace(b'\\"blocks\\":[16]', b'\\"blocks\\":[61]', 1))
    for pool in (two_ranks, four_ranks):
        messages = set(pool.run(_error, target))
        (message,) = messages
        assert message.startswith("CheckpointError")
        assert FILES[0] in message
        assert "sum to 61" in message
    assert attempt(lambda: Mlp.from_pretrained(target)).startswith("CheckpointError")


def test_E3_manifest_that_names_other_files_is_an_error(two_ranks: Pool, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    randomize(Mlp()).save_pretrained(source)
    two_ranks.run(saved, Mlp, source, target)
    manifest = json.loads((target / FILES[1]).read_text())
    (target / FILES[1]).write_text(json.dumps({**manifest, "files": manifest["files"][::-1]}))
    for message in two_ranks.run(_error, target):
        assert "stands for 0 of 2" in message


def test_E3_diffusers_does_not_take_the_files_for_a_checkpoint(two_ranks: Pool, tmp_path: Path) -> None:
    import diffusers

    name = "Flux2Transformer2DModel"
    save_tiny(name, tmp_path / "source")
    two_ranks.run(saved, getattr(family(name), name), tmp_path / "source", tmp_path / "target")
    with pytest.raises(OSError, match="no file named"):
        getattr(diffusers, name).from_pretrained(tmp_path / "target")


@pytest.mark.parametrize("cls", [Parallel, Grouped, Mixture], ids=lambda cls: cls.__name__)
def test_E3_files_of_the_ranks_are_those_of_the_command(ranks: Pool, tmp_path: Path, cls: type[Any]) -> None:
    source, target, offline = (tmp_path / name for name in ("source", "target", "offline"))
    randomize(cls()).save_pretrained(source)
    ranks.run(saved, cls, source, target)
    with mock.patch.object(offline_module, "model_class", return_value=cls):
        shard_folder(source, offline, TensorParallelConfig(ranks.size))
    assert differences(target, offline) == []
