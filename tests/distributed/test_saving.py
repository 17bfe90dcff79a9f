"""Saving a sharded model: the files that the whole model would give, complete or absent, in little memory."""

from __future__ import annotations

import copy
import errno
import filecmp
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from shardwise import TensorParallelConfig, demo_model_path, enable_parallelism
from shardwise.checkpoint import save, write
from shardwise.errors import ShardwiseError
from shardwise.plan.layout import Layout, Shard
from shardwise.runtime.group import TensorParallelGroup
from tests.distributed.test_load_promises import MIB, WIDE, _peak
from tests.distributed.test_loading import Kept, Tied
from tests.helpers import family, outputs, randomize, relative_error, save_tiny, tiny_inputs, tiny_model
from tests.pool import Pool
from tests.small_models import SMALL, Glu, Grouped, Mlp, Parallel, Transformer

pytestmark = pytest.mark.any_device

FAMILIES = [
    "FluxTransformer2DModel",
    "Flux2Transformer2DModel",
    "QwenImageTransformer2DModel",
    "SD3Transformer2DModel",
    "WanTransformer3DModel",
    "NucleusMoEImageTransformer2DModel",
    "PriorTransformer",  # counts heads by an entry of its configuration
]


def world(**options: Any) -> TensorParallelConfig:
    return TensorParallelConfig(tp_degree=dist.get_world_size(), **options)


def load(cls: type[Any], folder: Path, uneven: bool = False, **options: Any) -> Any:
    return cls.from_pretrained(folder, parallel_config=world(uneven=uneven), **options)


def saved(cls: type[Any], source: Path, target: Path, uneven: bool = False, **options: Any) -> None:
    """Load a checkpoint sharded, and save it again."""
    load(cls, source, uneven).save_pretrained(target, **options)


def differences(first: Path, second: Path) -> list[str]:
    """Return the names of files that two folders do not hold alike, byte for byte; configurations as objects.

    Where a model was loaded from is in the configuration of one that was loaded.
    """
    names = sorted({file.name for folder in (first, second) for file in folder.iterdir()} - {"config.json"})
    _, wrong, missing = filecmp.cmpfiles(first, second, names, shallow=False)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (first, second)]
    for config in configs:
        config.pop("_name_or_path", None)
    return [*wrong, *missing, *(["config.json"] if configs[0] != configs[1] else [])]


# --- the same files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", SMALL, ids=lambda cls: cls.__name__)
def test_E3_saved_files_are_those_of_the_whole_model(ranks: Pool, tmp_path: Path, cls: type[Any]) -> None:
    source, target = tmp_path / "source", tmp_path / "deeper" / "target"
    randomize(cls()).save_pretrained(source)
    ranks.run(saved, cls, source, target)
    assert differences(source, target) == []
    assert os.listdir(target.parent) == ["target"]


@pytest.mark.parametrize("name", FAMILIES)
def test_E3_diffusers_loads_what_a_sharded_model_saved(ranks: Pool, tmp_path: Path, name: str) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    whole = save_tiny(name, source, max_shard_size="60KB").eval()
    ranks.run(saved, getattr(family(name), name), source, target, max_shard_size="60KB")
    assert differences(source, target) == []
    assert len(list(target.glob("*-of-*.safetensors"))) > 1
    again = getattr(diffusers, name).from_pretrained(target).eval()
    assert type(again) is type(whole)
    inputs = tiny_inputs(name)
    assert relative_error(outputs(again, inputs), outputs(whole, inputs)) == 0


CASES: dict[str, tuple[type[Any], dict[str, Any], dict[str, Any]]] = {
    # what is held by several ranks, what they hold unequal parts of; names of files; ties and dtypes
    "a_key_head_for_all": (Grouped, {"kv_heads": 1}, {}),
    "six_heads": (Transformer, {"width": 24, "num_attention_heads": 6}, {"uneven": True}),
    "variant": (Parallel, {}, {"variant": "fp16"}),
    "variant_in_files": (Parallel, {}, {"variant": "fp16", "max_shard_size": "2KB"}),
    "files": (Parallel, {}, {"max_shard_size": 3000}),
    "a_file_for_each": (Mlp, {}, {"max_shard_size": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_E3_options_and_layouts_give_the_files_of_the_whole_model(
    ranks: Pool, tmp_path: Path, case: str
) -> None:
    cls, config, options = CASES[case]
    whole, source, plain, target = randomize(cls(**config)), *(tmp_path / name for name in "spt")
    whole.save_pretrained(plain)
    kwargs = {key: value for key, value in options.items() if key != "uneven"}
    whole.save_pretrained(source, **kwargs)
    ranks.run(saved, cls, plain, target, **options)
    assert differences(source, target) == []


def _cast(source: Path, target: Path) -> None:
    load(Kept, source, dtype=torch.bfloat16).save_pretrained(target)


def test_E3_dtypes_are_those_of_the_model(two_ranks: Pool, tmp_path: Path) -> None:
    randomize(Kept()).save_pretrained(tmp_path / "fp32")
    Kept.from_pretrained(tmp_path / "fp32", dtype=torch.bfloat16).save_pretrained(tmp_path / "source")
    two_ranks.run(_cast, tmp_path / "fp32", tmp_path / "target")
    assert differences(tmp_path / "source", tmp_path / "target") == []


def _tied(target: Path) -> None:
    model = randomize(Tied())
    model.enable_parallelism(config=world())
    model.save_pretrained(target)


def test_E3_tied_weights_are_saved_under_each_name(two_ranks: Pool, tmp_path: Path) -> None:
    two_ranks.run(_tied, tmp_path / "target")
    whole, again = randomize(Tied()).state_dict(), Tied.from_pretrained(tmp_path / "target").state_dict()
    assert whole.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())


def _in_memory(name: str, target: Path) -> tuple[str, bool]:
    model = enable_parallelism(tiny_model(name, stock=True), config=world())
    model.save_pretrained(target)
    return type(model).__module__, callable(model.save_pretrained)


def test_E3_class_of_diffusers_sharded_in_memory_is_saved(two_ranks: Pool, tmp_path: Path) -> None:
    name = "Flux2Transformer2DModel"
    save_tiny(name, tmp_path / "source")
    for module, _ in two_ranks.run(_in_memory, name, tmp_path / "target"):
        assert module.startswith("diffusers.")
    assert differences(tmp_path / "source", tmp_path / "target") == []


def _changed(source: Path, target: Path) -> None:
    model = load(Glu, source)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
        twin.down.weight.set_(twin.down.weight.t().contiguous().t())  # another order in memory
    twin.save_pretrained(target)


def test_E3_copy_of_a_sharded_model_saves_its_own_weights(two_ranks: Pool, tmp_path: Path) -> None:
    source, target, whole = tmp_path / "source", tmp_path / "target", randomize(Glu())
    whole.save_pretrained(source)
    two_ranks.run(_changed, source, target)
    twice = Glu.from_pretrained(target).state_dict()
    assert all(torch.equal(2 * tensor, twice[name]) for name, tensor in whole.state_dict().items())


def _round_trip(source: Path, target: Path) -> float:
    model = load(Parallel, source)
    model.save_pretrained(target)
    inputs = {"x": torch.ones(2, 3, 16)}
    return relative_error(outputs(load(Parallel, target), inputs), outputs(model, inputs))


def test_E3_saved_folder_is_loaded_sharded_again(ranks: Pool, tmp_path: Path) -> None:
    randomize(Parallel()).save_pretrained(tmp_path / "source")
    assert set(ranks.run(_round_trip, tmp_path / "source", tmp_path / "target")) == {0.0}


def _of_a_pipeline(folder: Path) -> None:
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging

    logging.disable_progress_bar()
    pipeline, name = DiffusionPipeline.from_pretrained(demo_model_path()), "Flux2Transformer2DModel"
    pipeline.transformer = load(getattr(family(name), name), demo_model_path(), subfolder="transformer")
    pipeline.save_pretrained(folder)


def test_E3_pipeline_with_a_sharded_model_is_saved_and_diffusers_loads_it(
    two_ranks: Pool, tmp_path: Path
) -> None:
    two_ranks.run(_of_a_pipeline, tmp_path / "pipeline")
    saved_one, source = (folder / "transformer" for folder in (tmp_path / "pipeline", demo_model_path()))
    weights = "diffusion_pytorch_model.safetensors"
    first, second = load_file(saved_one / weights), load_file(source / weights)
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    again = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "pipeline")
    assert type(again.transformer) is diffusers.Flux2Transformer2DModel


def _in_two_groups(source: Path, target: Path) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Parallel.from_pretrained(source, parallel_config=TensorParallelConfig(mesh=mesh["tp"]))
    model.save_pretrained(target / f"group-{mesh.get_coordinate()[0]}")


@pytest.mark.any_device(False)
def test_E3_each_group_of_a_larger_world_saves_its_model(four_ranks: Pool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    randomize(Parallel()).save_pretrained(source)
    four_ranks.run(_in_two_groups, source, tmp_path)
    assert all(differences(source, tmp_path / f"group-{number}") == [] for number in (0, 1))


def _compiled(source: Path, target: Path) -> None:
    torch.compile(load(Parallel, source), backend="eager").save_pretrained(target)


def test_E3_compiled_model_is_saved(two_ranks: Pool, tmp_path: Path) -> None:
    randomize(Parallel()).save_pretrained(tmp_path / "source")
    two_ranks.run(_compiled, tmp_path / "source", tmp_path / "target")
    assert differences(tmp_path / "source", tmp_path / "target") == []


# --- negative controls -----------------------------------------------------------------------------------------------


def _saved_wrongly(source: Path, target: Path, wrong: Callable[[Layout], Layout]) -> None:
    wanted = save._wanted

    def changed(file: Any, layouts: Any) -> Any:
        return {k: replace(w, layout=wrong(w.layout)) for k, w in wanted(file, layouts).items()}

    with mock.patch.object(save, "_wanted", changed):
        saved(Parallel, source, target)


def in_one_block(layout: Layout) -> Layout:
    return layout.of(layout.size) if isinstance(layout, Shard) else layout


@pytest.mark.parametrize("wrong", [in_one_block, None], ids=["one_block", "none"])
def test_blocks_that_are_put_together_wrongly_are_seen(
    two_ranks: Pool, tmp_path: Path, wrong: Callable[[Layout], Layout] | None
) -> None:
    randomize(Parallel()).save_pretrained(tmp_path / "source")
    two_ranks.run(_saved_wrongly, tmp_path / "source", tmp_path / "target", wrong or _same)
    found = differences(tmp_path / "source", tmp_path / "target")
    assert found == (["diffusion_pytorch_model.safetensors"] if wrong else [])


def _same(layout: Layout) -> Layout:
    return layout


def test_E3_configuration_of_one_rank_would_be_seen(two_ranks: Pool, tmp_path: Path) -> None:
    name = "PriorTransformer"
    save_tiny(name, tmp_path / "source")
    divided = two_ranks.run(_divided_config, name, tmp_path / "source")
    whole = json.loads((tmp_path / "source" / "config.json").read_text())
    assert divided == [whole["num_attention_heads"] // 2] * 2


def _divided_config(name: str, source: Path) -> int:
    return load(getattr(family(name), name), source).config.num_attention_heads


# --- memory ----------------------------------------------------------------------------------------------------------


def _peak_of_a_save(source: Path, target: Path) -> int:
    model = load(Mlp, source)
    model.save_pretrained(target / "first")  # imports what is imported late
    with _peak() as grown:
        model.save_pretrained(target / "second")
    return grown["peak"]


def _peak_of_a_gather() -> int:
    own = torch.ones(16 * MIB, dtype=torch.uint8)
    with _peak() as grown:
        torch.cat([own] * dist.get_world_size()).sum()
    return grown["peak"]


@pytest.mark.any_device(False)
def test_E3_no_rank_holds_more_than_a_piece_beside_its_slices(ranks: Pool, tmp_path: Path) -> None:
    randomize(Mlp(**WIDE)).save_pretrained(tmp_path / "source")
    peaks = ranks.run(_peak_of_a_save, tmp_path / "source", tmp_path / "target")
    assert max(peaks) < 16 * MIB + 8 * MIB
    assert differences(tmp_path / "source", tmp_path / "target" / "second") == []


def test_memory_of_a_gathered_tensor_is_seen(two_ranks: Pool) -> None:
    assert min(two_ranks.run(_peak_of_a_gather)) > 24 * MIB


# --- complete or absent ----------------------------------------------------------------------------------------------


def attempt(save_it: Callable[[], None]) -> str:
    try:
        save_it()
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    except BaseException as error:  # an interrupt, too
        return f"{type(error).__name__}: {error}"
    return "no error"


def _raising(error: BaseException, after: int) -> Callable[..., Any]:
    """Return a function that raises from its n-th call on."""
    calls = 0

    def raises(real: Callable[..., Any], *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error
        return real(*args)

    return raises


FULL = OSError(errno.ENOSPC, "No space left on device")
FAILURES: dict[str, tuple[Any, str, BaseException, int, int]] = {
    # where, what, with which error, after how many calls, on which rank
    "piece_of_rank_1": (save._Courier, "_piece", MemoryError("no memory"), 2, 1),
    "interrupt_of_rank_1": (save._Courier, "_piece", KeyboardInterrupt(), 0, 1),
    "piece_of_rank_0": (save._Courier, "_piece", MemoryError("no memory"), 1, 0),
    "full_disk": (write.os, "pwrite", FULL, 5, 0),
    "full_at_once": (write.os, "ftruncate", FULL, 0, 0),
    "full_at_the_second_file": (write.os, "ftruncate", FULL, 1, 0),
    "no_sync": (write.os, "fsync", OSError(errno.EIO, "Input/output error"), 0, 0),
    "no_sync_at_the_end": (write.os, "fsync", OSError(errno.EIO, "Input/output error"), 7, 0),
}


def _failing(case: str, source: Path, target: Path, options: dict[str, Any]) -> tuple[str, str]:
    where, what, error, after, rank = FAILURES[case]
    model, real, raises = load(Parallel, source), getattr(where, what), _raising(error, after)

    def broken(*args: Any) -> Any:
        return raises(real, *args)

    with mock.patch.object(where, what, broken if dist.get_rank() == rank else real):
        first = attempt(lambda: model.save_pretrained(target / "new" / "out", **options))
    dist.barrier()  # rank 0 cleans up, and the others do not wait for it
    left = sorted(path.name for path in target.rglob("*"))
    dist.barrier()
    return first, f"{left} {attempt(lambda: model.save_pretrained(target / 'out', **options))}"


@pytest.mark.parametrize("case", FAILURES)
def test_E3_what_fails_on_one_rank_fails_on_all_and_nothing_is_left(
    two_ranks: Pool, tmp_path: Path, case: str
) -> None:
    source, target, failing = tmp_path / "source", tmp_path / "target", FAILURES[case][-1]
    target.mkdir()
    options = {"max_shard_size": "2KB"}
    randomize(Parallel()).save_pretrained(source, **options)
    answers = two_ranks.run(_failing, case, source, target, options)
    for rank, (error, then) in enumerate(answers):
        known = isinstance(FAILURES[case][2], OSError)
        expected = "CheckpointError" if known else "RankFailure"
        assert error.startswith(
            type(FAILURES[case][2]).__name__ if rank == failing and not known else expected
        )
        assert then == "[] no error"
    assert differences(source, target / "out") == []
    assert os.listdir(target) == ["out"]


def _over(folder: Path, others: Path, **options: Any) -> str:
    model = load(Mlp, others)
    return attempt(lambda: model.save_pretrained(folder, **options))


def test_E3_older_checkpoint_is_replaced_as_a_whole(two_ranks: Pool, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    randomize(Mlp(), 2).save_pretrained(source)
    randomize(Parallel()).save_pretrained(target, max_shard_size="2KB")
    assert two_ranks.run(_over, target, source) == ["no error"] * 2
    assert differences(source, target) == []
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]


@pytest.mark.parametrize(
    "other", ["README.md", "diffusion_pytorch_model.fp16.safetensors", "model_index.json"]
)
def test_E3_folder_with_something_else_in_it_is_refused_and_kept(
    two_ranks: Pool, tmp_path: Path, other: str
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source, target):
        randomize(Mlp()).save_pretrained(folder)
    (target / other).write_text("kept")
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    for message in two_ranks.run(_over, target, source):
        assert message.startswith("CheckpointError")
        assert other in message
        assert "folder of its own" in message
    assert {file.name: file.read_bytes() for file in target.iterdir()} == before


# --- what is refused -------------------------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {"safe_serialization": False},
    {"is_main_process": False},
    {"save_function": print},
    {"push_to_hub": True},
    {"use_flashpack": True},
    {"max_shard_size": "large"},
    {"max_shard_size": None},
    {"variant": "../x"},
    {"shards": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_E3_option_that_cannot_be_honoured_raises_before_anything_is_written(
    two_ranks: Pool, tmp_path: Path, options: dict[str, Any]
) -> None:
    source, target = tmp_path / "source", tmp_path / "new" / "target"
    randomize(Mlp()).save_pretrained(source)
    for message in two_ranks.run(_over, target, source, **options):
        assert message.startswith("UnsupportedOption")
        assert next(iter(options)) in message
    assert not target.parent.exists()


def test_options_of_diffusers_are_known() -> None:
    import inspect

    theirs = inspect.signature(diffusers.ModelMixin.save_pretrained).parameters.keys()
    from shardwise.models import saving

    ours = inspect.signature(saving.save_sharded).parameters.keys()
    assert theirs - {"self", "kwargs"} <= ours | saving.SaveOptions.refused.keys()


class Quantized(nn.Parameter):
    """A stand-in for any quantizer's own kind of parameter."""


def _adapted(model: Any) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=2, target_modules=["up"]), model)


def _quantized(model: Any) -> None:
    model.up._parameters["weight"] = Quantized(model.up.weight.data, requires_grad=False)


def _offloaded(model: Any) -> None:
    model.up.to("meta")


def _resized(model: Any) -> None:
    model.up.weight = nn.Parameter(torch.ones(3, 8))


def _reduced(model: Any) -> None:
    model.up.bias = None


STATES: dict[str, tuple[Callable[[Any], None], str]] = {
    "adapter": (_adapted, "up has an adapter"),
    "quantized": (_quantized, "up.weight is not a plain tensor"),
    "offloaded": (_offloaded, "is not a plain tensor in memory"),
    "resized": (_resized, "up.weight is [3, 8] on rank"),
    "reduced": (_reduced, "it has no up.bias any more"),
}


def _in_state(state: str, source: Path, target: Path) -> str:
    model = load(Mlp, source)
    STATES[state][0](model)
    return attempt(lambda: model.save_pretrained(target))


@pytest.mark.parametrize("state", STATES)
def test_E3_model_that_is_not_as_it_was_sharded_is_not_saved(
    two_ranks: Pool, tmp_path: Path, state: str
) -> None:
    randomize(Mlp()).save_pretrained(tmp_path / "source")
    for message in two_ranks.run(_in_state, state, tmp_path / "source", tmp_path / "target"):
        assert message.startswith("UnsupportedOperation")
        assert STATES[state][1] in message
    assert os.listdir(tmp_path) == ["source"]


def _two_folders(source: Path, target: Path) -> str:
    model = load(Mlp, source)
    return attempt(lambda: model.save_pretrained(target / str(dist.get_rank())))


def test_E3_ranks_that_name_two_folders_are_told(two_ranks: Pool, tmp_path: Path) -> None:
    randomize(Mlp()).save_pretrained(tmp_path / "source")
    for message in two_ranks.run(_two_folders, tmp_path / "source", tmp_path / "target"):
        assert message.startswith("RankFailure")
        assert "differ in folder" in message
    assert os.listdir(tmp_path) == ["source"]


def _sent(source: Path, target: Path) -> tuple[list[int], int]:
    model, sent, bring = load(Grouped, source), [], TensorParallelGroup.bring

    def noted(self: Any, tensor: torch.Tensor, owner: int) -> None:
        if owner == self.rank != 0:
            sent.append(tensor.nbytes)
        bring(self, tensor, owner)

    with mock.patch.object(TensorParallelGroup, "bring", noted):
        model.save_pretrained(target)
    return sent, sum(p.nbytes for p in model.parameters())


def test_E3_each_piece_is_sent_once_though_several_ranks_hold_it(four_ranks: Pool, tmp_path: Path) -> None:
    whole = randomize(Grouped(kv_heads=2))
    whole.save_pretrained(tmp_path / "source")
    answers = four_ranks.run(_sent, tmp_path / "source", tmp_path / "target")
    size, held = sum(p.nbytes for p in whole.parameters()), answers[0][1]
    assert sum(sum(sent) for sent, _ in answers) == size - held
    assert sum(held for _, held in answers) > size
