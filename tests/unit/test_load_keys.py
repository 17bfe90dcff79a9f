"""How the keys of a checkpoint meet the tensors of a model: found, missing, unexpected, mismatched, tied, computed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwise.checkpoint.index import TensorEntry, read_header
from shardwise.checkpoint.load import KeyReport, load_tensors, match_keys
from shardwise.checkpoint.read import SliceReader
from shardwise.checkpoint.report import LoadReport
from shardwise.errors import CheckpointError
from shardwise.plan.meta import meta_parameters
from shardwise.plan.resolve import resolve

PARAMETERS = ["norm.weight", "norm.bias", "up.weight", "up.bias", "scale"]
BUFFERS = ["mean"]


class Model(nn.Module):
    """Parameters, a 0-d parameter, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.register_buffer("mean", torch.arange(3.0))
        self.register_buffer("table", torch.arange(5.0), persistent=False)


class Tied(nn.Module):
    """One weight under three names, beside one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.again = nn.Linear(4, 8, bias=False)
        self.other = nn.Linear(4, 8, bias=False)
        self.head.weight = self.again.weight = self.embedding.weight


ALIASES = ["embedding.weight", "head.weight", "again.weight"]


def index_of(model: nn.Module, **shapes: tuple[int, ...]) -> dict[str, TensorEntry]:
    """Return the index of a checkpoint of `model`; `shapes` replaces or adds entries, `__` standing for a dot."""
    stored = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    stored |= {name.replace("__", "."): shape for name, shape in shapes.items()}
    return {name: TensorEntry(Path("x"), torch.float32, shape, 0, 0) for name, shape in stored.items()}


def without(index: dict[str, TensorEntry], *names: str) -> dict[str, TensorEntry]:
    return {name: found for name, found in index.items() if name not in names}


# ---------------------------------------------------------------- names


def test_complete_checkpoint_has_nothing_to_report() -> None:
    keys = match_keys(Model(), index_of(Model()))
    assert keys.sources == {name: name for name in [*PARAMETERS, *BUFFERS]}
    assert (keys.missing, keys.computed, keys.unexpected, keys.mismatched) == ((), (), (), ())
    keys.raise_for_errors("checkpoint")


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_that_is_not_in_the_checkpoint_is_missing(name: str) -> None:
    keys = match_keys(Model(), without(index_of(Model()), name))
    assert (keys.missing, keys.computed) == ((name,), ())
    assert name not in keys.sources
    with pytest.raises(CheckpointError, match=f"missing: {name}"):
        keys.raise_for_errors("checkpoint")


def test_persistent_buffer_that_is_not_in_the_checkpoint_keeps_its_computed_value() -> None:
    keys = match_keys(Model(), without(index_of(Model()), "mean"))
    assert (keys.missing, keys.computed) == ((), ("mean",))
    keys.raise_for_errors("checkpoint")


def test_buffer_that_is_never_saved_is_no_matter_when_absent_and_unexpected_when_present() -> None:
    assert "table" not in match_keys(Model(), index_of(Model())).computed
    keys = match_keys(Model(), index_of(Model(), table=(5,)))
    assert keys.unexpected == ("table",)
    assert "table" not in keys.sources


def test_key_that_the_model_does_not_have_is_unexpected_once_and_no_error() -> None:
    keys = match_keys(Model(), index_of(Model(), junk=(3,), up__lora=(2,)))
    assert keys.unexpected == ("junk", "up.lora")
    keys.raise_for_errors("checkpoint")


@pytest.mark.parametrize(
    ("ignored", "left"),
    [
        (None, ("norm.added_kv", "rope.freqs", "up.rope_bias")),
        ([], ("norm.added_kv", "rope.freqs", "up.rope_bias")),
        (["rope"], ("norm.added_kv",)),
        ([r"^rope\."], ("norm.added_kv", "up.rope_bias")),
        ([r"^rope\.", "norm.added_kv"], ("up.rope_bias",)),
        (["Rope"], ("norm.added_kv", "rope.freqs", "up.rope_bias")),
    ],
)
def test_unexpected_keys_that_match_an_ignored_pattern_are_left_out(
    ignored: list[str] | None, left: tuple[str, ...]
) -> None:
    index = index_of(Model(), norm__added_kv=(1,), rope__freqs=(1,), up__rope_bias=(1,))
    assert match_keys(Model(), index, ignored).unexpected == left
    assert match_keys(Model(), index, iter(ignored or ())).unexpected == left


def test_ignored_pattern_hides_no_key_that_the_model_has() -> None:
    keys = match_keys(Model(), without(index_of(Model()), "norm.bias"), [".*"])
    assert keys.missing == ("norm.bias",)
    assert "up.weight" in keys.sources


@pytest.mark.parametrize(
    ("name", "found", "wanted"),
    [
        ("up.weight", (4, 6), (6, 4)),
        ("up.weight", (24,), (6, 4)),
        ("up.bias", (6, 1), (6,)),
        ("scale", (1,), ()),
        ("mean", (4,), (3,)),
    ],
)
def test_tensor_of_another_shape_is_mismatched(
    name: str, found: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    keys = match_keys(Model(), index_of(Model(), **{name.replace(".", "__"): found}))
    assert keys.mismatched == ((name, found, wanted),)
    assert (keys.missing, keys.unexpected) == ((), ())
    with pytest.raises(CheckpointError) as caught:
        keys.raise_for_errors("checkpoint")
    assert f"shape: {name} is {list(found)} in the checkpoint, {list(wanted)} in the model" in str(
        caught.value
    )


def test_error_lists_every_weight_that_does_not_fit() -> None:
    index = without(index_of(Model(), up__bias=(7,), junk=(1,)), "norm.weight", "scale", "mean")
    with pytest.raises(CheckpointError) as caught:
        match_keys(Model(), index).raise_for_errors("organisation/tiny")
    assert str(caught.value).splitlines() == [
        "organisation/tiny: 3 weights do not fit the model; "
        "is it the checkpoint of this model class and configuration?",
        "  missing: scale",
        "  missing: norm.weight",
        "  shape: up.bias is [7] in the checkpoint, [6] in the model",
    ]


def test_model_without_weights_matches_as_the_whole_model_does() -> None:
    with meta_parameters():
        bare, bare_tied = Model(), Tied()
    index = without(index_of(Model(), junk=(1,)), "mean", "scale")
    assert match_keys(bare, index) == match_keys(Model(), index)
    assert match_keys(bare_tied, index_of(Tied())) == match_keys(Tied(), index_of(Tied()))


def test_matching_changes_neither_model_nor_index() -> None:
    model, index = Model(), index_of(Model(), junk=(1,))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}, dict(index)
    assert match_keys(model, index) == match_keys(model, index)
    assert index == before[1]
    assert all(torch.equal(tensor, before[0][name]) for name, tensor in model.state_dict().items())


# ---------------------------------------------------------------- tied weights


@pytest.mark.parametrize("stored", ALIASES)
def test_tied_weight_is_found_under_each_of_its_names(stored: str) -> None:
    keys = match_keys(Tied(), without(index_of(Tied()), *(set(ALIASES) - {stored})))
    assert keys.sources == {**dict.fromkeys(ALIASES, stored), "other.weight": "other.weight"}
    assert (keys.missing, keys.unexpected) == ((), ())


def test_tied_weight_that_is_stored_under_all_names_is_read_once() -> None:
    keys = match_keys(Tied(), index_of(Tied()))
    assert {keys.sources[name] for name in ALIASES} == {ALIASES[0]}
    assert keys.unexpected == ()


def test_tied_weight_that_is_stored_under_no_name_is_missing_once() -> None:
    keys = match_keys(Tied(), without(index_of(Tied()), *ALIASES))
    assert keys.missing == (ALIASES[0],)


def test_tied_weight_of_another_shape_is_mismatched() -> None:
    index = without(index_of(Tied(), head__weight=(4, 8)), "embedding.weight", "again.weight")
    assert {(name, found) for name, found, _ in match_keys(Tied(), index).mismatched} == {
        (name, (4, 8)) for name in ALIASES
    }


# ---------------------------------------------------------------- loading what was matched


def load(
    tmp_path: Path, model: nn.Module, stored: dict[str, Tensor], plan: dict[str, object], rank: int = 1
) -> tuple[dict[str, Tensor], LoadReport, KeyReport]:
    """Load `stored` into `model` as one of two ranks."""
    file = tmp_path / "model.safetensors"
    save_file(stored, file)
    index = read_header(file)
    keys = match_keys(model, index)
    reader = SliceReader(rank, 2, torch.device("cpu"))
    resolved = resolve(model, plan, 2 if plan else 1)
    tensors, report = load_tensors(model, index, keys, resolved, reader, lambda n, s, b: s)
    return tensors, report, keys


@pytest.mark.parametrize("rank", [0, 1])
def test_L4_loaded_tensors_are_this_ranks_slices_and_the_bytes_are_counted(tmp_path: Path, rank: int) -> None:
    stored = {name: torch.randn(tensor.shape) for name, tensor in Model().state_dict().items()}
    tensors, report, _ = load(tmp_path, Model(), stored, {"up": "colwise"}, rank)
    expected = {name: t.chunk(2)[rank] if name.startswith("up.") else t for name, t in stored.items()}
    assert tensors.keys() == {*expected, "table"}
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    assert report.bytes_read == sum(tensor.nbytes for tensor in expected.values())
    assert report.file_bytes == sum(tensor.nbytes for tensor in stored.values())


def test_loaded_tensors_keep_what_the_model_said_of_them(tmp_path: Path) -> None:
    tensors, _, _ = load(tmp_path, Model(), dict(Model().state_dict()), {"up": "colwise"})
    for name, tensor in [*Model().named_parameters(), *Model().named_buffers()]:
        assert isinstance(tensors[name], nn.Parameter) == isinstance(tensor, nn.Parameter)
        assert tensors[name].requires_grad == tensor.requires_grad


@pytest.mark.parametrize("name", ["mean", "table"])
def test_buffer_that_is_not_in_the_checkpoint_is_loaded_as_computed(tmp_path: Path, name: str) -> None:
    stored = {key: tensor for key, tensor in Model().state_dict().items() if key != name}
    tensors, _, _ = load(tmp_path, Model(), stored, {})
    assert torch.equal(tensors[name], getattr(Model(), name))


@pytest.mark.parametrize("stored_as", ALIASES)
def test_tied_weights_share_memory_after_loading(tmp_path: Path, stored_as: str) -> None:
    stored = {stored_as: torch.randn(8, 4), "other.weight": torch.randn(8, 4)}
    tensors, report, _ = load(tmp_path, Tied(), stored, {})
    assert len({id(tensors[name]) for name in ALIASES}) == 1
    assert tensors["other.weight"] is not tensors[stored_as]
    assert torch.equal(tensors[ALIASES[0]], stored[stored_as])
    assert report.bytes_read == report.file_bytes
