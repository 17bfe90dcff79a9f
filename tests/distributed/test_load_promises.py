"""What sharded loading promises: exactly its bytes, a few MiB of memory beside them, one download, one bar."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from shardwise import TensorParallelConfig
from shardwise.checkpoint import files, hub
from shardwise.runtime import group
from shardwise.runtime.shard import local_slice, sharding_of
from tests.helpers import randomize
from tests.pool import Pool
from tests.small_models import Mlp, Parallel

WIDE = {"width": 1024, "hidden": 8192}
"""64 MiB of weights: a rank of two may keep 32, and a loader that reads all of it would show."""
MIB = 2**20


def load(folder: Path | str, cls: type[Any] = Mlp, **kwargs: Any) -> Any:
    return cls.from_pretrained(folder, parallel_config=TensorParallelConfig(dist.get_world_size()), **kwargs)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint large enough for its bytes to stand out."""
    folder = tmp_path_factory.mktemp("wide")
    randomize(Mlp(**WIDE)).save_pretrained(folder)
    return folder


# --- bytes -----------------------------------------------------------------------------------------------------------


def _requested() -> int:
    """Return the bytes that this process has asked of files so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar:")).split()[1])


def _bytes_requested(folder: Path, dtype: torch.dtype) -> tuple[int, int]:
    load(folder, dtype=dtype)  # imports what is imported late
    dist.barrier()
    before = _requested()
    report = load(folder, dtype=dtype).load_report
    return _requested() - before, report.bytes_read


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["kept", "cast"])
def test_bytes_requested_are_those_of_the_plan_and_the_headers(
    ranks: Pool, wide: Path, dtype: torch.dtype
) -> None:
    size = sum(file.stat().st_size for file in wide.glob("*.safetensors"))
    for requested, planned in ranks.run(_bytes_requested, wide, dtype):
        assert planned < 1.01 * size / ranks.size
        assert planned < requested < 1.01 * planned


def _requested_by_a_full_load(folder: Path) -> int:
    before = _requested()
    for file in folder.glob("*.safetensors"):
        file.read_bytes()
    return _requested() - before


def test_bytes_that_a_full_load_requests_are_seen(two_ranks: Pool, wide: Path) -> None:
    assert min(two_ranks.run(_requested_by_a_full_load, wide)) > 60 * MIB


# --- memory ----------------------------------------------------------------------------------------------------------


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024


@contextlib.contextmanager
def _peak() -> Iterator[dict[str, int]]:
    """Measure memory above that at the start of the context: the highest inside, and what is left of files."""
    grown: dict[str, int] = {}
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else freed memory is used again, and new memory does not show
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest so far
    before = {field: _memory(field) for field in ("VmRSS", "RssFile")}
    yield grown
    grown["peak"] = _memory("VmHWM") - before["VmRSS"]
    grown["files"] = _memory("RssFile") - before["RssFile"]


def _peak_of_a_load(folder: Path, dtype: torch.dtype) -> tuple[dict[str, int], int]:
    load(folder, dtype=dtype)
    with _peak() as grown:
        model = load(folder, dtype=dtype)
    return grown, sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["kept", "cast"])
def test_L4_peak_memory_is_the_shard_and_a_few_megabytes(ranks: Pool, wide: Path, dtype: torch.dtype) -> None:
    for grown, shard in ranks.run(_peak_of_a_load, wide, dtype):
        assert grown["peak"] < shard + 8 * MIB
        assert grown["files"] < 2 * MIB


def _peak_of_a_mapped_load(folder: Path) -> dict[str, int]:
    degree, rank = dist.get_world_size(), dist.get_rank()
    with _peak() as grown:
        tensors = load_file(folder / "diffusion_pytorch_model.safetensors")
        slices = [t.chunk(degree, 1)[rank].clone() for t in tensors.values() if t.dim() == 2]
        grown["shard"] = sum(t.nbytes for t in slices)
    return grown


def test_memory_of_a_mapped_load_is_seen(two_ranks: Pool, wide: Path) -> None:
    for grown in two_ranks.run(_peak_of_a_mapped_load, wide):
        assert grown["peak"] > grown["shard"] + 24 * MIB
        assert grown["files"] > 24 * MIB


# --- a report, and one bar -------------------------------------------------------------------------------------------


class Bar:
    """Takes the place of a progress bar."""

    made: list[Bar] = []

    def __init__(self, **options: Any) -> None:
        self.options, self.total, self.shown = options, None, 0
        Bar.made.append(self)

    def update(self, arrived: int) -> None:
        self.shown += arrived

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _bars(folder: Path) -> tuple[list[tuple[str, int, int]], int]:
    Bar.made.clear()
    with mock.patch.object(diffusers.utils.logging, "tqdm", Bar):
        report = load(folder).load_report
    return [(bar.options["desc"], bar.total, bar.shown) for bar in Bar.made], report.bytes_read


def test_progress_is_one_bar_of_bytes_on_rank_0(two_ranks: Pool, wide: Path) -> None:
    (bars, planned), (none, _) = two_ranks.run(_bars, wide)
    assert bars == [(f"loading Mlp from {wide}", planned, planned)]
    assert none == []


def _printed(folder: Path, enabled: bool) -> str:
    (
        diffusers.utils.logging.enable_progress_bar
        if enabled
        else diffusers.utils.logging.disable_progress_bar
    )()
    try:
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            load(folder)
    finally:
        diffusers.utils.logging.enable_progress_bar()
    return printed.getvalue()


@pytest.mark.parametrize("enabled", [True, False])
def test_progress_bar_obeys_the_switch_of_diffusers(two_ranks: Pool, wide: Path, enabled: bool) -> None:
    first, second = two_ranks.run(_printed, wide, enabled)
    assert ("loading Mlp" in first) == enabled
    assert second == ""


def _report(folder: Path) -> tuple[dict[str, Any], list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("shardwise.checkpoint.load")
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        report = load(folder, dtype=torch.bfloat16).load_report
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return {**vars(report), "gb_per_s": report.gb_per_s}, messages


def test_load_report_says_what_was_read_and_what_that_took(ranks: Pool, wide: Path) -> None:
    whole = sum(p.nbytes for p in Mlp(**WIDE).parameters())
    for report, messages in ranks.run(_report, wide):
        assert report["file_bytes"] == whole
        assert whole / ranks.size <= report["bytes_read"] < 1.01 * whole / ranks.size
        assert 0 < report["read_seconds"] <= report["seconds"] * report["threads"]
        assert report["convert_seconds"] > 0
        assert report["gb_per_s"] == pytest.approx(report["bytes_read"] / report["seconds"] / 1e9)
        assert 0 < report["staging_bytes"] <= report["threads"] * MIB
        assert 1 <= report["threads"] <= 4
        (message,) = messages
        assert message.startswith("Mlp: ")
        assert "GB/s" in message


# --- the hub ---------------------------------------------------------------------------------------------------------

REPO, COMMIT, NEWER = "someone/tiny", "0123456789abcdef" * 2 + "01234567", "fedcba9876543210" * 2 + "fedcba98"


def _cache(folder: Path, commit: str) -> Path:
    repository = folder / f"models--{REPO.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
    return repository / "snapshots" / commit


def _downloads(upstream: Path, cache: Path) -> tuple[list[str], bool]:
    """Load with a hub that is a folder; return what this rank downloaded, and whether its slices are right."""
    downloaded: list[str] = []
    cached = hub.hf_hub_download

    def download(repo: str, name: str, subfolder: str | None = None, **options: Any) -> str:
        target = cache / f"models--{REPO.replace('/', '--')}" / "snapshots" / COMMIT / name
        if not options.get("local_files_only") and (upstream / name).exists() and not target.exists():
            downloaded.append(name)
            shutil.copy(upstream / name, target)
        return cached(repo, name, subfolder=subfolder, **options)

    with mock.patch.object(files, "hf_hub_download", download):
        model = load(REPO, Parallel, cache_dir=cache)
    return downloaded, _is_mine(model, upstream)


def _is_mine(model: Any, folder: Path) -> bool:
    """Return whether a sharded model holds this rank's slices of the weights in a folder."""
    plan, rank, degree = sharding_of(model).plan, dist.get_rank(), dist.get_world_size()
    whole = dict(type(model).from_pretrained(folder).named_parameters())
    return all(
        torch.equal(p, local_slice(whole[name], plan.layout(name), rank, degree))
        for name, p in model.named_parameters()
    )


@pytest.mark.parametrize("indexed", [True, False], ids=["indexed", "single"])
def test_only_needed_files_are_downloaded_and_by_one_rank_of_a_node(
    ranks: Pool, tmp_path: Path, indexed: bool
) -> None:
    upstream, cache = tmp_path / "upstream", tmp_path / "cache"
    model = randomize(Parallel())
    model.save_pretrained(upstream, max_shard_size="2KB" if indexed else "10GB")
    needed = sorted(file.name for file in upstream.iterdir() if file.name != "config.json")
    for unneeded in ("bin", "fp16.safetensors"):
        (upstream / f"diffusion_pytorch_model.{unneeded}").write_text("not asked for")
    shutil.copy(upstream / "config.json", _cache(cache, COMMIT))
    first, *others = ranks.run(_downloads, upstream, cache)
    assert sorted(first[0]) == needed
    assert (len(needed) > 2) == indexed
    assert all(downloaded == [] for downloaded, _ in others)
    assert all(right for _, right in (first, *others))


def _downloads_as_nodes(upstream: Path, caches: list[Path]) -> tuple[list[str], bool]:
    """Load as ranks of machines that have one name, each with a cache of its own."""
    rank = dist.get_rank()
    with mock.patch.object(group, "_boot", return_value=f"machine {rank}"):
        return _downloads(upstream, caches[rank])


def test_each_node_downloads_for_itself(two_ranks: Pool, tmp_path: Path) -> None:
    upstream, caches = tmp_path / "upstream", [tmp_path / "first", tmp_path / "second"]
    randomize(Parallel()).save_pretrained(upstream, max_shard_size="2KB")
    for cache in caches:
        shutil.copy(upstream / "config.json", _cache(cache, COMMIT))
    needed = sorted(file.name for file in upstream.iterdir() if file.name != "config.json")
    for downloaded, right in two_ranks.run(_downloads_as_nodes, upstream, caches):
        assert sorted(downloaded) == needed
        assert right


def _no_network(cache: Path) -> str:
    try:
        load(REPO, Parallel, cache_dir=cache)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_download_that_fails_is_the_same_error_on_every_rank(two_ranks: Pool, tmp_path: Path) -> None:
    randomize(Parallel()).save_config(_cache(tmp_path, COMMIT))
    first, second = two_ranks.run(_no_network, tmp_path)
    assert first == second
    assert first.startswith(f"CheckpointError: {REPO} has no diffusion_pytorch_model.safetensors")


def _which_commit(caches: list[Path], folder: Path) -> bool:
    return _is_mine(load(REPO, Parallel, cache_dir=caches[dist.get_rank()]), folder)


def test_branch_that_has_moved_for_one_rank_is_the_first_rank_s_commit_on_all(
    two_ranks: Pool, tmp_path: Path
) -> None:
    caches = [tmp_path / "first", tmp_path / "second"]
    for cache in caches:
        for seed, commit in ((5, NEWER), (4, COMMIT)):
            randomize(Parallel(), seed).save_pretrained(_cache(cache, commit))
    _cache(caches[1], NEWER)  # its main
    expected = tmp_path / "expected"
    randomize(Parallel(), 4).save_pretrained(expected)
    assert all(two_ranks.run(_which_commit, caches, expected))
    # The negative control: had each rank followed its own branch, the second would have other weights.
    caches.reverse()
    assert not any(two_ranks.run(_which_commit, caches, expected))


# --- a model in memory -----------------------------------------------------------------------------------------------


def _held_while_sharding() -> tuple[list[int], list[int], int, int]:
    """Return the bytes that the model holds, and those that are sent, at each broadcast; and the first and last."""
    model, held, sent = randomize(Parallel()), [], []
    broadcast = group.TensorParallelGroup.broadcast

    def bytes_held() -> int:
        return sum(
            {
                p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
            }.values()
        )

    def noted(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        held.append(bytes_held())
        sent.append(tensor.nbytes)
        return broadcast(self, tensor)

    whole = bytes_held()
    with mock.patch.object(group.TensorParallelGroup, "broadcast", noted):
        model.enable_parallelism(config=TensorParallelConfig(dist.get_world_size()))
    largest = max(p.nbytes for p in model.parameters())
    assert held[0] == whole
    return held, sent, bytes_held(), largest


def test_L8_model_in_memory_is_sent_in_slices_and_gives_up_each_tensor_as_it_is_cut(ranks: Pool) -> None:
    for held, sent, shard, largest in ranks.run(_held_while_sharding):
        assert max(sent) == largest
        assert held == sorted(held, reverse=True)
        assert len(set(held)) > 3
        assert held[0] > held[-1] >= shard
