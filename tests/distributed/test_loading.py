"""Sharded loading against diffusers' one-process loading: dtypes, keys, ties, buffers, memory, failures."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import TensorParallelConfig, placement
from shardwise.errors import ShardwiseError
from shardwise.models import parallelism
from tests import tolerances
from tests.helpers import family, outputs, randomize, relative_error, save_tiny
from tests.pool import Pool
from tests.small_models import Mlp, Parallel, Transformer, small_input

pytestmark = pytest.mark.any_device

WEIGHTS = "diffusion_pytorch_model.safetensors"


def load(cls: type[Any], folder: Path, **kwargs: Any) -> Any:
    return cls.from_pretrained(folder, parallel_config=TensorParallelConfig(dist.get_world_size()), **kwargs)


def attempt(cls: type[Any], folder: Path, **kwargs: Any) -> str:
    """Return the error of a load, as a user would see it, or an empty text."""
    try:
        load(cls, folder, **kwargs)
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def rewrite(folder: Path, change: Any) -> None:
    """Change the tensors of a single-file checkpoint."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


# --- dtypes ------------------------------------------------------------------------------------------------


class Kept(Mlp):
    """An Mlp that keeps one planned and one unplanned module in fp32; `norm` must not catch `norm_out`."""

    _keep_in_fp32_modules = ["norm", "up"]
    _tp_plan = {"up": "colwise", "down": "rowwise"}

    def __init__(self, width: int = 8, hidden: int = 16, out: int | None = None) -> None:
        super().__init__(width, hidden, out)
        self.norm_out = nn.LayerNorm(width)
        self.register_buffer("steps", torch.arange(5))
        self.register_buffer("flag", torch.tensor([True, False]))


def _dtypes(folder: Path, **kwargs: Any) -> tuple[dict[str, str], dict[str, str]]:
    def table(model: nn.Module) -> dict[str, str]:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return {name: str(tensor.dtype) for name, tensor in tensors}

    return table(load(Kept, folder, **kwargs)), table(Kept.from_pretrained(folder, **kwargs))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"dtype": torch.bfloat16}, {"torch_dtype": torch.float16}, {"dtype": torch.float32}],
    ids=["no_dtype", "bf16", "torch_dtype_fp16", "fp32"],
)
def test_dtypes_are_those_of_a_one_process_load(
    two_ranks: Pool, tmp_path: Path, stored: torch.dtype, kwargs: dict[str, Any]
) -> None:
    randomize(Kept()).to(stored).save_pretrained(tmp_path)
    for sharded, whole in two_ranks.run(_dtypes, tmp_path, **kwargs):
        assert sharded == whole
        if kwargs.get("dtype") == torch.bfloat16:
            kept = {name for name, dtype in sharded.items() if dtype == "torch.float32"}
            assert kept == {"norm.weight", "norm.bias", "up.weight", "up.bias"}


def _values(folder: Path) -> bool:
    sharded, whole = (
        load(Kept, folder, dtype=torch.bfloat16),
        Kept.from_pretrained(folder, dtype=torch.bfloat16),
    )
    rank, degree = dist.get_rank(), dist.get_world_size()
    sharded.cpu()
    return torch.equal(sharded.up.weight, whole.up.weight.chunk(degree)[rank]) and torch.equal(
        sharded.down.weight, whole.down.weight.chunk(degree, 1)[rank]
    )


def test_slices_are_bit_equal_to_slices_of_a_one_process_load_with_a_cast(
    ranks: Pool, tmp_path: Path
) -> None:
    randomize(Kept()).save_pretrained(tmp_path)
    assert all(ranks.run(_values, tmp_path))


# --- keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["up.weight", "norm.weight", "down.bias"], ids=["planned", "unplanned", "whole_bias"]
)
def test_missing_weight_is_an_error_on_every_rank(two_ranks: Pool, tmp_path: Path, key: str) -> None:
    randomize(Mlp()).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop(key))
    for message in two_ranks.run(attempt, Mlp, tmp_path):
        assert message.startswith("CheckpointError")
        assert f"missing: {key}" in message


def test_mismatched_shapes_are_reported_once_and_together(two_ranks: Pool, tmp_path: Path) -> None:
    randomize(Mlp(hidden=24)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden": 16}))
    for message in two_ranks.run(attempt, Mlp, tmp_path):
        assert message.startswith("CheckpointError")
        assert message.count("up.weight is [24, 8] in the checkpoint, [16, 8] in the model") == 1
        assert "down.weight is [8, 24]" in message


class Ignoring(Mlp):
    _keys_to_ignore_on_load_unexpected = [r"^old\."]


def _loading_info(folder: Path) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    _, sharded = load(Ignoring, folder, output_loading_info=True)
    _, whole = Ignoring.from_pretrained(folder, output_loading_info=True)
    return sharded, whole


def test_unknown_keys_are_reported_once_without_the_ignored(two_ranks: Pool, tmp_path: Path) -> None:
    randomize(Ignoring()).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"junk": torch.ones(1), "old.table": torch.ones(1)}))
    for sharded, whole in two_ranks.run(_loading_info, tmp_path):
        assert sharded["unexpected_keys"] == ["junk"]
        assert sharded == whole


# --- what is in no checkpoint, or in it once ------------------------------------------------------------------


class Tied(Mlp):
    """Two Linears that share one weight, both planned, and two norms that share theirs, both whole."""

    _tp_plan = {"up": "colwise", "twin": "colwise", "down": "rowwise"}

    def __init__(self, width: int = 8, hidden: int = 16, out: int | None = None) -> None:
        super().__init__(width, hidden, out)
        self.twin = nn.Linear(width, hidden)
        self.twin.weight = self.up.weight
        self.norm_twin = nn.LayerNorm(width)
        self.norm_twin.weight = self.norm.weight

    def forward(self, x: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        return (self.down(self.up(self.norm(x)) * self.twin(self.norm_twin(x))),)


def _tied(folder: Path) -> tuple[float, bool]:
    model = load(Tied, folder)
    error = relative_error(outputs(model, small_input(Mlp)), outputs(randomize(Tied()), small_input(Mlp)))
    return error, model.up.weight is model.twin.weight and model.norm.weight is model.norm_twin.weight


@pytest.mark.parametrize("dropped", ["twin.weight", "up.weight"])
def test_tied_weights_stay_tied_whichever_name_the_file_holds(
    two_ranks: Pool, tmp_path: Path, dropped: str
) -> None:
    model = randomize(Tied())
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    del tensors[dropped], tensors["norm_twin.weight"]
    model.save_config(tmp_path)
    save_file(tensors, tmp_path / WEIGHTS)
    for error, tied in two_ranks.run(_tied, tmp_path):
        assert error < tolerances.FP32
        assert tied


class Legacy(Transformer):
    """A model whose attention had other names in old checkpoints; diffusers renames them on load."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for block in self.blocks:
            block._from_deprecated_attn_block = True


def _legacy(folder: Path) -> float:
    inputs = small_input(Transformer)
    return relative_error(outputs(load(Legacy, folder), inputs), outputs(randomize(Transformer()), inputs))


def test_legacy_attention_keys_are_renamed_before_they_are_sliced(two_ranks: Pool, tmp_path: Path) -> None:
    model = randomize(Legacy())
    model.save_pretrained(tmp_path)
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

    def age(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            for new, legacy in old.items():
                if f".{new}." in name:
                    tensors[name.replace(f".{new}.", f".{legacy}.")] = tensors.pop(name)

    rewrite(tmp_path, age)
    assert max(two_ranks.run(_legacy, tmp_path)) < tolerances.FP32


def _buffers(folder: Path) -> tuple[Tensor, list[str]]:
    model = load(Transformer, folder, dtype=torch.bfloat16)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return model.table.cpu(), [name for name, tensor in tensors if tensor.is_meta]


def test_L4_buffers_that_no_checkpoint_holds_are_computed(two_ranks: Pool, tmp_path: Path) -> None:
    randomize(Transformer()).save_pretrained(tmp_path)
    expected = Transformer.from_pretrained(tmp_path, dtype=torch.bfloat16).table
    for table, on_meta in two_ranks.run(_buffers, tmp_path):
        assert torch.equal(table, expected)
        assert table.dtype == expected.dtype
        assert not on_meta


# --- files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["single", "indexed", "subfolder", "variant", "indexed_variant"])
def test_L4_every_layout_of_a_checkpoint_loads(two_ranks: Pool, tmp_path: Path, layout: str) -> None:
    kwargs: dict[str, Any] = {"subfolder": "transformer"} if layout == "subfolder" else {}
    kwargs |= {"variant": "fp16"} if "variant" in layout else {}
    size = "2KB" if "indexed" in layout else "10GB"
    folder = tmp_path / kwargs.get("subfolder", "")
    randomize(Parallel()).save_pretrained(folder, max_shard_size=size, variant=kwargs.get("variant"))
    assert any(".index." in file.name for file in folder.iterdir()) == ("indexed" in layout)
    assert max(two_ranks.run(_parallel, tmp_path, kwargs)) < tolerances.FP32


def _parallel(folder: Path, kwargs: dict[str, Any]) -> float:
    inputs = small_input(Parallel)
    return relative_error(
        outputs(load(Parallel, folder, **kwargs), inputs), outputs(randomize(Parallel()), inputs)
    )


def test_hub_id_loads_from_the_local_cache(two_ranks: Pool, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    randomize(Parallel()).save_pretrained(snapshot / "transformer", max_shard_size="2KB")
    (tmp_path / "models--someone--tiny" / "refs").mkdir()
    (tmp_path / "models--someone--tiny" / "refs" / "main").write_text(snapshot.name)
    kwargs = {"subfolder": "transformer", "cache_dir": tmp_path, "local_files_only": True}
    assert max(two_ranks.run(_parallel, "someone/tiny", kwargs)) < tolerances.FP32


# --- memory --------------------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Remembers every storage outside of the meta device that an operation returned: the largest, and their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.alive: list[torch.UntypedStorage] = []  # so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.sizes:
                    self.sizes[storage.data_ptr()] = storage.nbytes()
                    self.alive.append(storage)
        return result


def _allocations(name: str, folder: Path, in_memory: bool) -> tuple[int, int]:
    """Return the bytes of the largest storage that a load made, and of all of them."""
    cls = getattr(family(name), name)
    config = TensorParallelConfig(dist.get_world_size())
    with Allocations() as seen:
        if in_memory:
            cls.from_pretrained(folder).enable_parallelism(config=config)
        else:
            cls.from_pretrained(folder, parallel_config=config)
    return max(seen.sizes.values()), sum(seen.sizes.values())


@pytest.mark.any_device(False)
def test_L4_L7_no_rank_ever_holds_a_full_size_planned_tensor(ranks: Pool, tmp_path: Path) -> None:
    name = "Flux2Transformer2DModel"
    config = {"num_attention_heads": 8, "num_layers": 1, "num_single_layers": 1}
    model = save_tiny(name, tmp_path, **config)
    fused = model.single_transformer_blocks[0].attn.to_qkv_mlp_proj.weight
    unplanned = {
        n: p.nbytes
        for n, p in model.named_parameters()
        if "modulation" in n or "embed" in n or "norm_out" in n
    }
    bound = max(fused.nbytes // ranks.size, *unplanned.values())
    whole = sum(p.nbytes for p in model.parameters())
    local = sum(unplanned.values()) + (whole - sum(unplanned.values())) / ranks.size
    assert bound < fused.nbytes
    for largest, total in ranks.run(_allocations, name, tmp_path, in_memory=False):
        assert largest <= bound
        assert total < 1.1 * local  # the slices themselves, and a few small buffers
    # The negative control: loading first and sharding afterwards holds whole tensors, and all of them.
    for largest, total in ranks.run(_allocations, name, tmp_path, in_memory=True):
        assert largest >= fused.nbytes
        assert total > whole


def _three_files(folder: Path) -> tuple[int, int, int, int]:
    model = load(Parallel, folder)
    report = placement(model)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return (
        model.load_report.bytes_read,
        report.weight_bytes,
        sum(storages.values()),
        report.weight_bytes_one_process,
    )


def test_L4_bytes_from_a_checkpoint_of_three_files_are_a_rank_s_share(ranks: Pool, tmp_path: Path) -> None:
    model = randomize(Parallel(layers=6))
    model.save_pretrained(tmp_path, max_shard_size="26KB")
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    whole = sum(p.nbytes for p in model.parameters())
    biases_and_norm = sum(
        p.nbytes for n, p in model.named_parameters() if "proj_out.bias" in n or "norm" in n
    )
    share = (whole - biases_and_norm) // ranks.size + biases_and_norm
    assert ranks.run(_three_files, tmp_path) == [(share, share, share, whole)] * ranks.size


# --- failures on one rank ----------------------------------------------------------------------------------------


def _one_rank_reads_elsewhere(good: Path, bad: Path) -> str:
    return attempt(Mlp, bad if dist.get_rank() == 1 else good)


def test_truncated_file_on_one_rank_is_the_same_error_on_all(two_ranks: Pool, tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder in (good, bad):
        randomize(Mlp()).save_pretrained(folder)
    data = (bad / WEIGHTS).read_bytes()
    (bad / WEIGHTS).write_bytes(data[:-10])
    first, second = two_ranks.run(_one_rank_reads_elsewhere, good, bad)
    assert first == second
    assert first.startswith(f"CheckpointError: {bad / WEIGHTS}")
    assert "truncated" in first
    assert first.endswith("on rank 1 of 2")


def test_missing_file_on_one_rank_is_the_same_error_on_all(two_ranks: Pool, tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    randomize(Mlp()).save_pretrained(good)
    Mlp().save_config(bad)
    first, second = two_ranks.run(_one_rank_reads_elsewhere, good, bad)
    assert first == second
    assert first.startswith(f"CheckpointError: {bad} has no")


def _file_is_written_before_it_is_read(folders: list[Path]) -> str:
    """Load while rank 1's file is written again, the same bytes, when its header is known and its data is not."""
    folder = folders[dist.get_rank()]
    load_tensors = parallelism.load_tensors

    def late(*args: Any) -> Any:
        if dist.get_rank() == 1:
            (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes())
            os.utime(folder / WEIGHTS, ns=(0, 0))  # whatever the clock's resolution
        return load_tensors(*args)

    with mock.patch.object(parallelism, "load_tensors", late):
        return attempt(Mlp, folder)


def test_file_that_is_written_after_its_header_was_read_is_the_same_error_on_all(
    two_ranks: Pool, tmp_path: Path
) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        randomize(Mlp()).save_pretrained(folder)
    first, second = two_ranks.run(_file_is_written_before_it_is_read, folders)
    assert first == second
    assert first.startswith(f"CheckpointError: {folders[1] / WEIGHTS} was changed while it was read")


def test_different_checkpoints_on_the_ranks_are_an_error_on_all(two_ranks: Pool, tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    randomize(Mlp()).save_pretrained(good)
    randomize(Mlp()).bfloat16().save_pretrained(bad)
    for message in two_ranks.run(_one_rank_reads_elsewhere, good, bad):
        assert message.startswith("RankFailure")
        assert "the ranks differ" in message
