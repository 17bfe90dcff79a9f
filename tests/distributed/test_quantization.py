"""Quantized sharded models against one process that quantizes: errors, bits, rules, memory, and what is refused."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
import torch.distributed as dist
from diffusers import BitsAndBytesConfig, ConfigMixin, GGUFQuantizationConfig, ModelMixin, TorchAoConfig
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    FqnToConfig,
    Int4WeightOnlyConfig,
    Int8WeightOnlyConfig,
    PerGroup,
    quantize_,
)

from shardwise import TensorParallelConfig, TensorParallelMixin, enable_parallelism, placement
from shardwise.checkpoint import load as load_module
from shardwise.checkpoint.read import SliceReader
from shardwise.compose import quantize
from shardwise.errors import ShardwiseError
from shardwise.models import FluxTransformer2DModel
from shardwise.models.quantization import Quantization
from shardwise.plan.layout import Shard
from shardwise.runtime.shard import local_slice, sharding_of
from tests import tolerances
from tests.distributed.test_load_promises import MIB, Bar, _peak
from tests.helpers import distance, outputs, randomize, save_tiny, tiny_inputs
from tests.pool import Pool, RankError, at_two_ranks_and_once_at_four
from tests.quantized import (
    FAMILIES,
    FURTHER_KINDS,
    IN_GROUPS,
    INT8,
    INT8_PRODUCTS,
    KINDS,
    Distances,
    equal,
    errors,
    is_quantized,
    load,
    pair,
    parts,
    quantize_as,
    rounds_activations,
)
from tests.small_models import Glu, Mlp, Modulation, Parallel, Transformer, small_input

FLUX, FLUX2 = FAMILIES[:2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny models on disk, each written once."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            save_tiny(name, made[name])
        return made[name]

    return folder


def int8(**options: Any) -> Any:
    return TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False), **options)


def in_groups(size: int) -> Any:
    return TorchAoConfig(Int8WeightOnlyConfig(granularity=PerGroup(size), set_inductor_config=False))


def of_proj_out(size: int) -> Any:
    return TorchAoConfig(FqnToConfig({r"re:.*\.proj_out": in_groups(size).quant_type}))


def shard(cls: type[Any], folder: Path, config: Any, **options: Any) -> Any:
    parallel = TensorParallelConfig(dist.get_world_size(), check=False)
    return cls.from_pretrained(folder, parallel_config=parallel, quantization_config=config, **options)


def message(function: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    """Return the error of a call as a user would see it, or an empty text."""
    try:
        function(*args, **kwargs)
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --- as exact as one process -----------------------------------------------------------------------------------------


def computable(kind: str) -> bool:
    """Return whether this processor computes a kind rightly: it is refused elsewhere."""
    return kind not in INT8_PRODUCTS or quantize.multiplies_int8_rightly()


def _errors(name: str, folder: Path) -> dict[str, Distances]:
    return {kind: errors(name, folder, kind) for kind in KINDS if computable(kind)}


def _assert_as_exact(found: Distances, kind: str) -> None:
    """Hold a sharded quantized model against one process that quantizes.

    Rounding in the last digit does not turn how a given weight is rounded to 8 bits, or seldom; that of an activation
    it does.
    """
    sharded, whole = found.means
    if rounds_activations(kind):
        assert found.excess(tolerances.QUANTIZED_RATIO) < tolerances.STANDARD_ERRORS, kind
    else:
        assert sharded < tolerances.QUANTIZED_RATIO * whole, kind
    assert whole > tolerances.MISTAKE, kind  # it is quantized


@pytest.mark.any_device
@at_two_ranks_and_once_at_four(FAMILIES, FLUX2)
def test_quantized_model_is_as_exact_as_one_process(
    ranks: Pool, folders: Callable[[str], Path], name: str
) -> None:
    for result in ranks.run(_errors, name, folders(name)):
        for kind, found in result.items():
            _assert_as_exact(found, kind)
        # The negative controls: comparisons that let a coarser kind pass would see nothing.
        coarser = Distances(result[IN_GROUPS].sharded, result[INT8].whole)
        assert coarser.means[0] > 3 * tolerances.QUANTIZED_RATIO * coarser.means[1]
        assert coarser.excess(tolerances.QUANTIZED_RATIO) > 2 * tolerances.STANDARD_ERRORS


@pytest.mark.any_device
@pytest.mark.parametrize("kind", FURTHER_KINDS)
def test_further_kinds_are_as_exact_as_one_process(
    two_ranks: Pool, folders: Callable[[str], Path], kind: str
) -> None:
    if not computable(kind):
        _assert_refused(two_ranks.run(_attempt_kind, folders(FLUX), kind, simulated=False))
        return
    for found in two_ranks.run(errors, FLUX, folders(FLUX), kind):
        _assert_as_exact(found, kind)


def _without_vnni(a: Tensor, b: Tensor) -> Tensor:
    """Multiply as oneDNN does where pairs of products, of numbers of 0 to 255 with signed ones, fit in 16 bits."""
    products = (a.int() + 128)[:, :, None] * b.int()[None]
    pairs = products.unflatten(1, (-1, 2)).sum(2, dtype=torch.int32)
    return pairs.clamp(-(2**15), 2**15 - 1).sum(1, dtype=torch.int32) - 128 * b.sum(0, dtype=torch.int32)


def _attempt_kind(folder: Path, kind: str, simulated: bool) -> str:
    config = TorchAoConfig((KINDS | FURTHER_KINDS)[kind]())
    with mock.patch.object(torch, "_int_mm", _without_vnni) if simulated else nullcontext():
        return _attempt(FluxTransformer2DModel, folder, config)


def _assert_refused(texts: list[str]) -> None:
    for text in texts:
        assert text.startswith(
            "UnsupportedOption: quantization_config=Int8DynamicActivationInt8WeightConfig gives wrong numbers on this"
        )
        assert "with Int8WeightOnlyConfig" in text


@pytest.mark.parametrize("kind", sorted(INT8_PRODUCTS))
def test_kind_that_a_processor_computes_wrongly_is_refused_there_before_reading(
    two_ranks: Pool, folders: Callable[[str], Path], kind: str
) -> None:
    _assert_refused(two_ranks.run(_attempt_kind, folders(FLUX), kind, simulated=True))


@pytest.mark.parametrize("kind", sorted((KINDS | FURTHER_KINDS).keys() - INT8_PRODUCTS - {IN_GROUPS}))
def test_kind_that_multiplies_no_integers_is_not_refused_there(
    two_ranks: Pool, folders: Callable[[str], Path], kind: str
) -> None:
    with pytest.raises(RankError, match="a weight was read"):
        two_ranks.run(_attempt_kind, folders(FLUX), kind, simulated=True)


# --- the same bits ---------------------------------------------------------------------------------------------------


def _bits(name: str, folder: Path, kind: str) -> dict[str, list[bool]]:
    """Return, for the weights cut along each dim, whether a rank's part is a slice of that of one process.

    And whether it is that of the next rank, which is to be seen.
    """
    sharded, whole = pair(name, folder, kind)
    plan, rank, degree = sharding_of(sharded).plan, dist.get_rank(), dist.get_world_size()
    found: dict[str, list[bool]] = {"rows": [], "rows of another rank": [], "inputs": [], "whole": []}
    weights = dict(whole.named_parameters())
    for path, weight in sharded.named_parameters():
        layout = plan.layout(path)
        if not is_quantized(weight):
            continue
        if not isinstance(layout, Shard):
            found["whole"].append(equal(weight, weights[path]))
            continue
        found["inputs" if layout.dim else "rows"].append(
            _is_part(weight, weights[path], layout, rank, degree)
        )
        if not layout.dim:
            found["rows of another rank"].append(
                _is_part(weight, weights[path], layout, (rank + 1) % degree, degree)
            )
    return found


def _is_part(local: Tensor, whole: Tensor, layout: Shard, rank: int, degree: int) -> bool:
    """Return whether the numbers and scales of a slice are slices of those of the whole weight."""
    mine, theirs = parts(local), parts(whole)

    def cut(part: Tensor) -> Tensor:
        groups = layout.size // part.shape[layout.dim]  # how many features share a number
        if any(block % groups for block in layout.blocks) or part.shape[layout.dim] == 1:
            return part
        return local_slice(part, layout.of(*(block // groups for block in layout.blocks)), rank, degree)

    return all(torch.equal(mine[key], cut(part)) for key, part in theirs.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_on_a_rank_are_quantized_as_in_one_process(
    ranks: Pool, folders: Callable[[str], Path], name: str
) -> None:
    for found in ranks.run(_bits, name, folders(name), INT8):
        assert found["rows"]
        assert all(found["rows"])
        assert all(found["whole"])
        assert not any(found["rows of another rank"])  # the negative control
        assert found["inputs"]
        assert not any(found["inputs"])  # scales of their own


@at_two_ranks_and_once_at_four(FAMILIES, FLUX2)
def test_groups_on_a_rank_are_those_of_one_process(
    ranks: Pool, folders: Callable[[str], Path], name: str
) -> None:
    for found in ranks.run(_bits, name, folders(name), IN_GROUPS):
        assert found["inputs"]
        assert all(found["inputs"])
        assert all(found["rows"])


def _by_hand(name: str, folder: Path) -> tuple[bool, bool, int]:
    """Call torchao's `quantize_` on a sharded model; compare its weights and outputs with those of one loaded so."""
    read, made = load(name, folder, INT8, sharded=True), load(name, folder, sharded=True)
    count = quantize_as(made, read, INT8)
    same = all(equal(p, q) for p, q in zip(read.parameters(), made.parameters(), strict=True))
    inputs = tiny_inputs(name)
    alike = [torch.equal(a, b) for a, b in zip(outputs(read, inputs), outputs(made, inputs), strict=True)]
    return same, all(alike), count


@at_two_ranks_and_once_at_four(FAMILIES, FLUX2)
def test_quantize_on_a_sharded_model_gives_what_loading_gives(
    ranks: Pool, folders: Callable[[str], Path], name: str
) -> None:
    for same, alike, count in ranks.run(_by_hand, name, folders(name)):
        assert same
        assert alike
        assert count > 10


SMALL = (Mlp, Glu, Modulation, Parallel, Transformer)


def _filtered(cls: type[Any]) -> tuple[float, float, int]:
    """Quantize the planned Linears of a small model; return both distances to fp32, and how many they are."""
    distances, count = [0.0, 0.0], 0
    for seed in range(20):
        exact = randomize(cls(), seed)
        whole, sharded = copy.deepcopy(exact), copy.deepcopy(exact)
        enable_parallelism(sharded, config=TensorParallelConfig(dist.get_world_size(), check=False))
        planned = {module.path for module in sharding_of(sharded).plan.modules}
        for i, model in enumerate((sharded, whole)):
            quantize_(model, KINDS[INT8](), partial(_is_planned_linear, planned))
            inputs = small_input(cls, seed)
            distances[i] += distance(outputs(model, inputs), outputs(exact, inputs))
        count = sum(is_quantized(p) for p in sharded.parameters())
    return *distances, count


def _is_planned_linear(planned: set[str], module: nn.Module, path: str) -> bool:
    return path in planned and isinstance(module, nn.Linear)


@pytest.mark.parametrize(("cls", "layers"), [*zip(SMALL, (2, 2, 1, 4, 8), strict=True)])
def test_layers_that_a_filter_names_are_quantized_and_right(ranks: Pool, cls: type[Any], layers: int) -> None:
    for sharded, whole, count in ranks.run(_filtered, cls):
        assert 0 < sharded < tolerances.QUANTIZED_RATIO * whole
        assert count == layers


# --- diffusers' rules ------------------------------------------------------------------------------------------------


class Kept(Mlp):
    """An Mlp that keeps a planned module in fp32."""

    _keep_in_fp32_modules = ["down"]


def _kinds(model: nn.Module) -> list[tuple[str, str, torch.dtype, bool]]:
    return [(n, type(p).__name__, p.dtype, p.requires_grad) for n, p in model.named_parameters()]


def _rules(cls: type[Any], folder: Path, config: Any, **options: Any) -> tuple[object, object]:
    """Return what a model consists of and remembers, sharded and in one process."""
    models = (
        shard(cls, folder, config, **options),
        cls.from_pretrained(folder, quantization_config=config, **options),
    )
    first, second = (
        (
            _kinds(m),
            {k: str(v) for k, v in m.config.items()},
            m.is_quantized,
            m.quantization_method,
            type(m.hf_quantizer),
            m.training,
        )
        for m in models
    )
    return first, second


@pytest.mark.parametrize(
    ("cls", "config", "options"),
    [
        (Mlp, int8(), {}),
        (Mlp, int8(), {"dtype": torch.float32}),
        (Mlp, int8(modules_to_not_convert=["up"]), {"dtype": torch.float32}),
        (Kept, int8(), {"dtype": torch.bfloat16}),
        (
            Mlp,
            TorchAoConfig(FqnToConfig({"up": KINDS["fp8 weights"](), "down": None})),
            {"dtype": torch.float32},
        ),
    ],
    ids=["default-dtype", "fp32", "not-converted", "kept-in-fp32", "by-name"],
)
def test_what_is_quantized_follows_diffusers_rules(
    two_ranks: Pool, tmp_path: Path, cls: type[Any], config: Any, options: dict[str, Any]
) -> None:
    randomize(Mlp()).save_pretrained(tmp_path)
    kinds = set()
    for sharded, whole in two_ranks.run(_rules, cls, tmp_path, config, **options):
        assert sharded == whole
        kinds |= {kind for _, kind, _, _ in sharded[0]}
    assert kinds > {"Parameter"}  # something is quantized, and something is not


def _rules_broken(folder: Path, config: Any) -> tuple[object, object]:
    with mock.patch.object(Quantization, "_chosen", lambda self, name, weight: weight.dim() == 2):
        return _rules(Mlp, folder, config, dtype=torch.float32)


def test_rule_that_is_not_followed_is_seen(two_ranks: Pool, tmp_path: Path) -> None:
    randomize(Mlp()).save_pretrained(tmp_path)
    for sharded, whole in two_ranks.run(_rules_broken, tmp_path, int8(modules_to_not_convert=["up"])):
        assert sharded != whole


def _of_rank_files(folder: Path) -> bool:
    """Load a folder with a file for each rank, quantized and whole."""
    model = Mlp.from_pretrained(folder / "whole")
    enable_parallelism(model, config=TensorParallelConfig(dist.get_world_size(), check=False))
    model.save_pretrained(folder / "sharded", sharded=True)
    read = Mlp.from_pretrained(folder / "sharded", quantization_config=int8(), dtype=torch.float32)
    whole = Mlp.from_pretrained(folder / "whole", quantization_config=int8(), dtype=torch.float32)
    return all(equal(p, q) for p, q in zip(read.parameters(), whole.parameters(), strict=True)) and (
        read.is_quantized and _kinds(read) == _kinds(whole)
    )


def test_files_of_ranks_are_quantized_when_they_are_read_whole(two_ranks: Pool, tmp_path: Path) -> None:
    randomize(Mlp()).save_pretrained(tmp_path / "whole")
    assert all(two_ranks.run(_of_rank_files, tmp_path))


def _own_config(folder: Path) -> str:
    options = {} if dist.get_rank() else {"modules_to_not_convert": ["up"]}
    return message(shard, Mlp, folder, int8(**options), dtype=torch.float32)


def test_ranks_that_quantize_otherwise_are_told(two_ranks: Pool, tmp_path: Path) -> None:
    randomize(Mlp()).save_pretrained(tmp_path)
    for text in two_ranks.run(_own_config, tmp_path):
        assert text.startswith("RankFailure")
        assert "quantization" in text


# --- memory ----------------------------------------------------------------------------------------------------------


class Deep(TensorParallelMixin, ModelMixin, ConfigMixin):
    """Many layers of one size: what is held of them as they were read would show."""

    _tp_plan = {"ups.*": "colwise", "downs.*": "rowwise"}

    @register_to_config
    def __init__(self, layers: int = 8, width: int = 512, hidden: int = 4096) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(layers))


_M_MMAP_THRESHOLD = -3


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 128 MiB, of which a rank of two reads 64, in slices of 4, and keeps 16 in int8."""
    folder = tmp_path_factory.mktemp("deep")
    Deep().save_pretrained(folder)
    return folder


def _peak_of_a_load(folder: Path, streamed: bool) -> tuple[int, int, int]:
    # What is freed goes back to the system at once: else the peak is one of holes between what is kept, by chance.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)
    shard(Deep, folder, int8(), dtype=torch.float32)
    at_once = mock.patch.object(load_module, "_parts", lambda wanted, reader: [wanted])
    with _peak() as grown:
        if streamed:
            model = shard(Deep, folder, int8(), dtype=torch.float32)
        else:
            with at_once:
                model = shard(Deep, folder, int8(), dtype=torch.float32)
    return grown["peak"], placement(model).weight_bytes, model.load_report.bytes_read


def test_peak_memory_is_the_quantized_shard_and_what_one_layer_takes(ranks: Pool, deep: Path) -> None:
    for peak, held, read in ranks.run(_peak_of_a_load, deep, True):
        layer = read / 16
        assert read == 128 * MIB // ranks.size
        assert read / 4 < held < 1.01 * read / 4
        assert peak < held + 4 * layer + 4 * MIB


def test_memory_of_a_load_that_quantizes_at_the_end_is_seen(two_ranks: Pool, deep: Path) -> None:
    for peak, held, read in two_ranks.run(_peak_of_a_load, deep, False):
        assert peak > held + 4 * read / 16 + 4 * MIB


def _bytes_held(name: str, folder: Path) -> tuple[int, int, int, int]:
    sharded, whole = load(name, folder, INT8, sharded=True), load(name, folder, INT8)
    counted = 0
    for parameter in sharded.parameters():
        held = parts(parameter).values() if is_quantized(parameter) else [parameter]
        counted += sum(part.nbytes for part in held)
    report = placement(sharded)
    return report.weight_bytes, counted, report.weight_bytes_one_process, placement(whole).weight_bytes


def _shown(name: str, folder: Path) -> tuple[list[tuple[int, int]], int]:
    Bar.made.clear()
    with mock.patch.object(diffusers.utils.logging, "tqdm", Bar):
        report = load(name, folder, INT8, sharded=True).load_report
    return [(bar.total, bar.shown) for bar in Bar.made], report.bytes_read


def test_parts_are_shown_as_one_load(two_ranks: Pool, folders: Callable[[str], Path]) -> None:
    (bars, planned), (none, _) = two_ranks.run(_shown, FLUX, folders(FLUX))
    assert bars == [(planned, planned)]
    assert none == []


def test_placement_counts_the_bytes_of_quantized_weights(ranks: Pool, folders: Callable[[str], Path]) -> None:
    for mine, counted, of_all, whole in ranks.run(_bytes_held, FLUX2, folders(FLUX2)):
        assert mine == counted
        assert of_all == whole
        assert mine < whole


# --- groups that a border would cut ----------------------------------------------------------------------------------


def _no_read(self: SliceReader, wanted: object) -> None:
    raise AssertionError("a weight was read")


def _attempt(cls: type[Any], folder: Path, config: Any) -> str:
    with mock.patch.object(SliceReader, "read", _no_read):
        return message(shard, cls, folder, config, dtype=torch.float32)


@pytest.mark.parametrize(
    ("cls", "config", "line"),
    [
        (Mlp, in_groups(16), "down: groups of 16, slices of 8 of 16 input features"),
        (
            Mlp,
            TorchAoConfig(Int4WeightOnlyConfig(16, set_inductor_config=False)),
            "down: groups of 16, slices of 8 of 16 input features",
        ),
        # The width on a rank is 24: it is the border between two blocks that a group would lie across.
        (Parallel, of_proj_out(12), "blocks.0.proj_out: groups of 12, slices of 24 of 48 input features"),
    ],
    ids=["int8", "int4", "packed"],
)
def test_group_that_a_border_would_cut_is_refused_before_reading(
    two_ranks: Pool, tmp_path: Path, cls: type[Any], config: Any, line: str
) -> None:
    randomize(cls()).save_pretrained(tmp_path)
    first, second = two_ranks.run(_attempt, cls, tmp_path, config)
    assert first == second
    assert first.startswith("UnsupportedOption: quantization_config cannot be combined")
    assert line in first
    assert "groups of a divisor of 8" in first  # and of no more


def _cut_groups(folder: Path, size: int) -> bool:
    """Quantize by groups, also where they lie on two ranks, and say whether they are those of one process."""
    with mock.patch.object(quantize, "_cut", return_value=iter(())):
        model = shard(Parallel, folder, of_proj_out(size), dtype=torch.float32)
    whole = Parallel.from_pretrained(folder).blocks[0].proj_out
    quantize_(whole, in_groups(size).quant_type)
    layout = sharding_of(model).plan.layout("blocks.0.proj_out.weight")
    return _is_part(model.blocks[0].proj_out.weight, whole.weight, layout, dist.get_rank(), 2)


@pytest.mark.parametrize(("size", "same"), [(8, True), (12, False)])
def test_groups_that_were_cut_would_be_other_groups(
    two_ranks: Pool, tmp_path: Path, size: int, same: bool
) -> None:
    randomize(Parallel()).save_pretrained(tmp_path)
    assert two_ranks.run(_cut_groups, tmp_path, size) == [same, same]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BitsAndBytesConfig(load_in_8bit=True), "flattened weight"),
        (GGUFQuantizationConfig(torch.float32), "format of their own"),
        ({"quant_method": "quanto"}, "only quantization by torchao"),
        (TorchAoConfig(Float8DynamicActivationFloat8WeightConfig()), "has not been proved on slices"),
    ],
    ids=["bitsandbytes", "gguf", "quanto", "fp8-activations"],
)
def test_other_quantization_is_refused_with_the_reason(
    two_ranks: Pool, tmp_path: Path, config: Any, reason: str
) -> None:
    randomize(Mlp()).save_pretrained(tmp_path)
    first, second = two_ranks.run(_attempt, Mlp, tmp_path, config)
    assert first == second
    assert first.startswith("UnsupportedOption: quantization_config=")
    assert reason in first


@pytest.mark.parametrize("method", ["bitsandbytes", "gguf", "torchao"])
def test_quantized_checkpoint_is_refused_with_the_reason(
    two_ranks: Pool, tmp_path: Path, method: str
) -> None:
    model = randomize(Mlp())
    model.register_to_config(quantization_config={"quant_method": method})
    model.save_pretrained(tmp_path)
    for text in two_ranks.run(_attempt, Mlp, tmp_path, None):
        assert text.startswith("UnsupportedOption")
        assert "quantized storage cannot be sliced" in text
        assert "quantization_config=TorchAoConfig(...)" in text


def _shard_a_quantized_one(folder: Path, by_hand: bool) -> str:
    model = load(FLUX, folder, None if by_hand else INT8)
    if by_hand:
        quantize_(model, KINDS[INT8]())
    return message(enable_parallelism, model, config=TensorParallelConfig(dist.get_world_size()))


@pytest.mark.parametrize("by_hand", [False, True])
def test_quantized_model_is_not_sharded(
    two_ranks: Pool, folders: Callable[[str], Path], by_hand: bool
) -> None:
    for text in two_ranks.run(_shard_a_quantized_one, folders(FLUX), by_hand):
        assert text.startswith("UnsupportedState: FluxTransformer2DModel")
        assert ("Int8Tensor, not a plain parameter" if by_hand else "shard it first") in text


def _save(name: str, folder: Path, target: Path, sharded: bool) -> list[str]:
    """Save a model that was loaded quantized, one that was quantized then, and one that is so no more."""
    loaded, made = load(name, folder, INT8, sharded=True), load(name, folder, sharded=True)
    quantize_(made, KINDS[INT8]())
    texts = [message(model.save_pretrained, target, sharded=sharded) for model in (loaded, made)]
    loaded.dequantize()
    return [*texts, message(loaded.save_pretrained, target, sharded=sharded)]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", [FLUX, FLUX2])
def test_quantized_model_is_not_saved_and_nothing_is_written(
    ranks: Pool, folders: Callable[[str], Path], tmp_path: Path, name: str, sharded: bool
) -> None:
    target = tmp_path / "new" / "folder"
    for texts in ranks.run(_save, name, folders(name), target, sharded):
        for text in texts:
            assert text.startswith("UnsupportedOperation")
            assert "save it before quantizing" in text
    assert list(tmp_path.iterdir()) == []


def _save_before(name: str, folder: Path, target: Path) -> bool:
    """Save, quantize what was saved when it is loaded, and compare with what quantizing here gives."""
    model = load(name, folder, sharded=True)
    model.save_pretrained(target)
    again = load(name, target, INT8, sharded=True)
    quantize_as(model, again, INT8)
    return all(equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


@at_two_ranks_and_once_at_four(FAMILIES, FLUX2)
def test_model_that_was_saved_before_quantizing_is_the_same_when_loaded(
    ranks: Pool, folders: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    assert all(ranks.run(_save_before, name, folders(name), tmp_path / "saved"))
