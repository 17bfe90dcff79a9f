"""Locating weights: local folders and the hub's cache, one file or an index, and names that must not be followed."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError
from safetensors.torch import save_file

from shardwise.checkpoint import files
from shardwise.checkpoint.files import Source, locate
from shardwise.checkpoint.index import read_index
from shardwise.errors import CheckpointError, ShardwiseError, UnsupportedOption
from tests.hostile import ESCAPES

STEM = "diffusion_pytorch_model"
SINGLE = f"{STEM}.safetensors"
INDEX = f"{STEM}.safetensors.index.json"
SHARDS = [f"{STEM}-0000{i}-of-00002.safetensors" for i in (1, 2)]
REPO = "organisation/tiny"
COMMITS = {"main": "0123456789abcdef" * 2 + "01234567", "older": "fedcba9876543210" * 2 + "fedcba98"}


def put(folder: Path, *names: str) -> None:
    """Create files in a folder; each holds its own name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(name)


def put_index(folder: Path, shards: Iterable[object], name: str = INDEX) -> Path:
    """Write an index that names `shards`, one tensor in each."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {f"tensor.{i}": shard for i, shard in enumerate(shards)}
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 8}, "weight_map": weight_map}))
    return folder / name


def put_in_cache(cache: Path, revision: str, path: str, content: bytes | str) -> Path:
    """Put a file into a cache as the hub's client keeps it: a blob, and a link to it in a snapshot."""
    content = content.encode() if isinstance(content, str) else content
    repository = cache / f"models--{REPO.replace('/', '--')}"
    blob = repository / "blobs" / hashlib.sha256(content).hexdigest()
    link = repository / "snapshots" / COMMITS[revision] / path
    for folder in (blob.parent, link.parent, repository / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    link.symlink_to(os.path.relpath(blob, link.parent))
    (repository / "refs" / revision).write_text(COMMITS[revision])
    return blob


def cached(cache: Path, **hub: Any) -> dict[str, Any]:
    return {"cache_dir": str(cache), "local_files_only": True, **hub}


def names(found: Iterable[Path]) -> list[str]:
    return [path.name for path in found]


# ---------------------------------------------------------------- local folders


@pytest.mark.parametrize("subfolder", [None, "", "transformer", "a/b"])
def test_single_file_is_found_in_its_subfolder(tmp_path: Path, subfolder: str | None) -> None:
    folder = tmp_path / (subfolder or "")
    put(folder, SINGLE, "config.json")
    put(tmp_path / "other", SINGLE)
    assert locate(Source(str(tmp_path), subfolder)) == [folder / SINGLE]


def test_files_of_an_index_are_found_each_once_in_order(tmp_path: Path) -> None:
    put(tmp_path, *SHARDS)
    put_index(tmp_path, [SHARDS[1], SHARDS[0], SHARDS[1], SHARDS[0]])
    assert locate(Source(str(tmp_path))) == [tmp_path / name for name in SHARDS]


def test_index_goes_before_a_single_file(tmp_path: Path) -> None:
    put(tmp_path, SINGLE, *SHARDS)
    put_index(tmp_path, SHARDS)
    assert names(locate(Source(str(tmp_path)))) == SHARDS


def test_stem_other_than_of_diffusers_is_found(tmp_path: Path) -> None:
    put(tmp_path, SINGLE, "model.safetensors")
    assert names(locate(Source(str(tmp_path), stem="model"))) == ["model.safetensors"]


def test_variant_of_a_single_file_is_found_beside_the_plain_one(tmp_path: Path) -> None:
    put(tmp_path, SINGLE, f"{STEM}.fp16.safetensors")
    assert names(locate(Source(str(tmp_path), variant="fp16"))) == [f"{STEM}.fp16.safetensors"]
    assert names(locate(Source(str(tmp_path)))) == [SINGLE]


@pytest.mark.parametrize(
    "index", [f"{STEM}.safetensors.index.fp16.json", f"{STEM}.safetensors.fp16.index.json"]
)
def test_index_of_a_variant_is_found_under_both_conventions(tmp_path: Path, index: str) -> None:
    shards = [f"{STEM}.fp16-0000{i}-of-00002.safetensors" for i in (1, 2)]
    put(tmp_path, SINGLE, *SHARDS, *shards)
    put_index(tmp_path, SHARDS)
    put_index(tmp_path, shards, index)
    assert names(locate(Source(str(tmp_path), variant="fp16"))) == shards
    assert names(locate(Source(str(tmp_path)))) == SHARDS


def test_variant_that_is_not_there_is_refused_although_the_plain_file_is(tmp_path: Path) -> None:
    put(tmp_path, SINGLE)
    with pytest.raises(CheckpointError, match=rf"has no {STEM}\.safetensors of variant 'fp16'"):
        locate(Source(str(tmp_path), variant="fp16"))


def test_link_to_a_file_is_followed(tmp_path: Path) -> None:
    put(tmp_path / "elsewhere", "blob")
    (tmp_path / SINGLE).symlink_to(Path("elsewhere") / "blob")
    (found,) = locate(Source(str(tmp_path)))
    assert found.read_text() == "blob"


# ---------------------------------------------------------------- nothing there, or not as safetensors


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        (f"{STEM}.bin", None),
        (f"{STEM}.bin.index.json", None),
        (f"{STEM}.fp16.bin", "fp16"),
    ],
)
def test_E1_weights_that_are_pickled_are_refused(tmp_path: Path, name: str, variant: str | None) -> None:
    put(tmp_path / "unet", name)
    with pytest.raises(UnsupportedOption, match="needs safetensors") as caught:
        locate(Source(str(tmp_path), "unet", variant))
    assert f"{tmp_path}/unet" in str(caught.value)


def test_E1_pickled_weights_beside_safetensors_do_not_matter(tmp_path: Path) -> None:
    put(tmp_path, SINGLE, f"{STEM}.bin")
    assert names(locate(Source(str(tmp_path)))) == [SINGLE]


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=rf"{tmp_path} has no {STEM}\.safetensors, and no index of one$"
    ):
        locate(Source(str(tmp_path)))


@pytest.mark.parametrize("name", [SINGLE, INDEX])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("directory", "is a directory, not a file"),
        ("pipe", "is a pipe, a socket or a device, not a file"),
        ("dangling", "may be a link to nothing"),
        ("loop", "symbolic links"),
    ],
)
def test_what_is_no_file_is_refused_and_not_passed_over(
    tmp_path: Path, name: str, kind: str, message: str
) -> None:
    if name == INDEX:
        put(tmp_path, SINGLE)  # must not be taken instead
    path = tmp_path / name
    make = {
        "directory": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "dangling": lambda: path.symlink_to(tmp_path / "nowhere"),
        "loop": lambda: path.symlink_to(path),
    }
    make[kind]()
    with pytest.raises(CheckpointError) as caught:
        locate(Source(str(tmp_path)))
    assert f"{path} " in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("subfolder", [None, "transformer"])
def test_folder_that_does_not_exist_is_refused(tmp_path: Path, subfolder: str | None) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        locate(Source(str(tmp_path / "nowhere"), subfolder))


# ---------------------------------------------------------------- the hub


@pytest.mark.parametrize("subfolder", [None, "transformer"])
def test_single_file_of_the_hub_is_found_in_the_cache(tmp_path: Path, subfolder: str | None) -> None:
    path = f"{subfolder}/{SINGLE}" if subfolder else SINGLE
    blob = put_in_cache(tmp_path, "main", path, "weights")
    put_in_cache(tmp_path, "main", f"other/{SINGLE}", "other weights")
    (found,) = locate(Source(REPO, subfolder, hub=cached(tmp_path)))
    assert found.name == SINGLE
    assert found.resolve() == blob


def test_indexed_files_of_the_hub_are_read_through_their_links(tmp_path: Path) -> None:
    for i, name in enumerate(SHARDS):
        save_file({f"tensor.{i}": torch.ones(2)}, tmp_path / name)
        put_in_cache(tmp_path, "main", f"transformer/{name}", (tmp_path / name).read_bytes())
    index = put_index(tmp_path, SHARDS).read_text()
    put_in_cache(tmp_path, "main", f"transformer/{INDEX}", index)
    found = locate(Source(REPO, "transformer", hub=cached(tmp_path)))
    assert names(found) == SHARDS
    assert all(path.is_symlink() for path in found)
    assert read_index(found).keys() == {"tensor.0", "tensor.1"}


def test_variant_of_the_hub_is_found_under_the_older_convention(tmp_path: Path) -> None:
    shard = f"{STEM}.fp16-00001-of-00001.safetensors"
    put_in_cache(tmp_path, "main", SINGLE, "plain")
    put_in_cache(tmp_path, "main", shard, "half")
    older = f"{STEM}.safetensors.fp16.index.json"
    put_in_cache(tmp_path, "main", older, json.dumps({"weight_map": {"a": shard}}))
    assert names(locate(Source(REPO, variant="fp16", hub=cached(tmp_path)))) == [shard]


@pytest.mark.parametrize("revision", ["older", COMMITS["older"]])
def test_revision_of_the_hub_decides_which_file(tmp_path: Path, revision: str) -> None:
    put_in_cache(tmp_path, "main", SINGLE, "new weights")
    old = put_in_cache(tmp_path, "older", SINGLE, "old weights")
    (found,) = locate(Source(REPO, hub=cached(tmp_path, revision=revision)))
    assert found.resolve() == old


def test_local_folder_goes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_cache(tmp_path / "cache", "main", SINGLE, "of the hub")
    put(tmp_path / REPO, SINGLE)
    monkeypatch.chdir(tmp_path)
    (found,) = locate(Source(REPO, hub=cached(tmp_path / "cache")))
    assert found.read_text() == SINGLE


def test_repository_without_weights_is_refused(tmp_path: Path) -> None:
    put_in_cache(tmp_path, "main", f"transformer/{SINGLE}", "weights")
    with pytest.raises(CheckpointError, match=f"^{REPO}/vae has no {STEM}.* nor within reach on the hub$"):
        locate(Source(REPO, "vae", hub=cached(tmp_path)))


def test_shard_of_the_hub_that_is_not_in_the_cache_is_refused_by_name(tmp_path: Path) -> None:
    put_in_cache(tmp_path, "main", SHARDS[0], "weights")
    put_in_cache(tmp_path, "main", INDEX, json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}))
    with pytest.raises(CheckpointError, match=SHARDS[1]):
        locate(Source(REPO, hub=cached(tmp_path)))


def test_E1_pickled_weights_of_the_hub_are_refused(tmp_path: Path) -> None:
    put_in_cache(tmp_path, "main", f"{STEM}.bin", "pickled")
    with pytest.raises(UnsupportedOption, match=REPO):
        locate(Source(REPO, hub=cached(tmp_path)))


class Hub:
    """Answers as `hf_hub_download` does, from a folder, and remembers what it was asked for."""

    def __init__(self, folder: Path, missing: Callable[[str], Exception] = EntryNotFoundError) -> None:
        self.folder, self.missing = folder, missing
        self.asked: list[str] = []
        self.options: list[dict[str, Any]] = []

    def download(self, repo_id: str, filename: str, **options: Any) -> str:
        assert repo_id == REPO
        self.asked.append(filename)
        self.options.append(options)
        path = self.folder / filename
        if not path.is_file():
            raise self.missing(filename)
        return str(path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A hub whose one repository is a folder of the test."""
    hub = Hub(tmp_path)
    monkeypatch.setattr(files, "hf_hub_download", hub.download)
    return hub


def test_options_of_the_hub_are_passed_on_unchanged(hub: Hub) -> None:
    put(hub.folder, SINGLE)
    options = {"revision": "older", "cache_dir": "/c", "token": "t", "local_files_only": False}
    locate(Source(REPO, "transformer", hub=options))
    assert hub.asked == [INDEX, SINGLE]
    assert all(given == {"subfolder": "transformer", **options} for given in hub.options)


@pytest.mark.parametrize("missing", [EntryNotFoundError, LocalEntryNotFoundError])
def test_file_that_the_hub_does_not_have_is_looked_for_under_the_next_name(
    hub: Hub, missing: type[Exception]
) -> None:
    put(hub.folder, f"{STEM}.fp16.safetensors")
    hub.missing = missing
    assert names(locate(Source(REPO, variant="fp16", hub={}))) == [f"{STEM}.fp16.safetensors"]
    assert len(hub.asked) == 3


@pytest.mark.parametrize("status", [401, 403, 404, 500])
def test_answer_of_the_hub_other_than_a_file_is_an_error_with_its_reason(hub: Hub, status: int) -> None:
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    reason = HfHubHTTPError(f"status {status}", response=response)
    hub.missing = lambda name: reason
    with pytest.raises(CheckpointError, match=f"{REPO} cannot be fetched from the hub: .*{status}"):
        locate(Source(REPO))


def test_failure_of_the_hub_is_not_taken_for_a_missing_file(hub: Hub) -> None:
    put(hub.folder, SINGLE)
    hub.missing = ConnectionError
    with pytest.raises(ConnectionError):
        locate(Source(REPO))


@pytest.mark.parametrize("name", ESCAPES)
def test_path_that_leads_out_of_the_repository_is_never_asked_for(hub: Hub, name: str) -> None:
    put_index(hub.folder, [name, *SHARDS])
    with pytest.raises(ShardwiseError):
        locate(Source(REPO))
    assert hub.asked == [INDEX]


def test_source_reads_as_the_user_named_it() -> None:
    assert str(Source(REPO)) == REPO
    assert str(Source(REPO, "transformer", "fp16")) == f"{REPO}/transformer"
