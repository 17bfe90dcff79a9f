"""The other ways to an adapter: past our entry points, for training, and those that are refused on every rank alike."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoHaConfig, LoraConfig, get_peft_model, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners import lora
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwise import TensorParallelConfig, enable_parallelism
from shardwise.compose import lora as compose
from shardwise.compose import lora_layers
from shardwise.errors import CheckpointError, RankFailure, ShardwiseError, UnsupportedOperation
from shardwise.plan.layout import Layout, Replicated
from shardwise.runtime.shard import local_slice, sharding_of
from tests import tolerances
from tests.distributed.test_lora import FLUX, FLUX2, WAN, error_of, pair, sharded_copy
from tests.distributed.test_refusals import same, state
from tests.gradients import backward
from tests.helpers import outputs, randomize, relative_error, tiny_inputs, tiny_model
from tests.lora import FluxPipeline, adapter, config, randomize_factors
from tests.pool import Pool
from tests.small_models import Convolutions, Mixture, small_input

# --- past our entry points -------------------------------------------------------------------------------------------


def parts(whole: nn.Module, sharded: nn.Module) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return, by parameter of the adapters, what takes a rank's part of a whole tensor."""
    layouts = {
        f"{path}.{name}": layout
        for path, module in sharded.named_modules()
        for name, (layout, _) in getattr(module, "tp_adapters", {}).items()
    }
    group = dist.get_rank(), dist.get_world_size()
    names = [name for name, _ in whole.named_parameters() if ".lora_" in name]
    return {n: partial(_part, layouts.get(n, Replicated()), *group) for n in names}


def _part(layout: Layout, rank: int, degree: int, tensor: Tensor) -> Tensor:
    return local_slice(tensor, layout, rank, degree)


def give(whole: nn.Module, sharded: nn.Module) -> None:
    """Put a rank's part of the whole model's A and B into the sharded one, by hand."""
    for name, part in parts(whole, sharded).items():
        sharded.get_parameter(name).data.copy_(part(whole.get_parameter(name).detach()))


def _injected(name: str, wrap: Callable[[Any, Any], Any]) -> tuple[float, float]:
    whole, sharded = pair(name)
    inputs, options = tiny_inputs(name), config(whole)
    base = outputs(whole, inputs)
    for model in (whole, sharded):
        wrap(options, model)
    randomize_factors(whole)
    give(whole, sharded)
    return error_of(sharded, whole, name), relative_error(outputs(whole, inputs), base)


def _peft_model(options: Any, model: Any) -> Any:
    return get_peft_model(model, options)


@pytest.mark.parametrize("wrap", [inject_adapter_in_model, _peft_model], ids=["inject", "get_peft_model"])
@pytest.mark.parametrize("name", [FLUX, FLUX2])
def test_adapter_that_peft_puts_into_a_sharded_model_is_right(two_ranks: Pool, name: str, wrap: Any) -> None:
    for error, share in two_ranks.run(_injected, name, wrap):
        assert error < tolerances.FP32
        assert share > tolerances.MISTAKE


def _unwatched() -> float:
    with mock.patch.object(compose, "is_adapter_layer", return_value=False):
        whole, sharded = pair(FLUX2)
        targets = ["ff.linear_out"]
        for model in (whole, sharded):
            inject_adapter_in_model(LoraConfig(r=3, target_modules=targets), model)
    randomize_factors(whole)
    for name, parameter in sharded.named_parameters():
        if ".lora_" in name:
            dim = 1 if ".lora_A." in name else 0
            width = parameter.shape[dim]
            own = slice(dist.get_rank() * width, (dist.get_rank() + 1) * width) if dim else slice(None)
            parameter.data.copy_(whole.get_parameter(name)[:, own] if dim else whole.get_parameter(name))
    return error_of(sharded, whole, FLUX2)


def test_without_our_layers_such_an_adapter_is_silently_wrong(two_ranks: Pool) -> None:
    assert min(two_ranks.run(_unwatched)) > tolerances.MISTAKE


def _whole_file_into_slices() -> str:
    whole, sharded = pair(FLUX2)
    inject_adapter_in_model(config(whole), sharded)
    try:
        set_peft_model_state_dict(sharded, adapter(whole, prefix=""))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_whole_factors_that_peft_loads_into_slices_are_refused(two_ranks: Pool) -> None:
    assert all("size mismatch" in message for message in two_ranks.run(_whole_file_into_slices))


def _first_values(after: bool) -> tuple[bool, bool]:
    """Add an adapter with the seed of the whole model on rank 0, and another one elsewhere."""
    whole, sharded = pair(FLUX)
    options = config(whole)
    torch.manual_seed(3)
    inject_adapter_in_model(options, whole)
    torch.manual_seed(3 + dist.get_rank())
    if after:
        sharded.add_adapter(options)
    else:
        inject_adapter_in_model(options, sharded)
    cut = {name: part for name, part in parts(whole, sharded).items() if _is_sharded(sharded, name)}
    equal = [
        torch.equal(sharded.get_parameter(n), part(whole.get_parameter(n).detach()))
        for n, part in cut.items()
    ]
    return all(equal), any(whole.get_parameter(n).any() for n in cut)


def _is_sharded(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name.partition(".lora_")[0]), lora_layers.LocalLoraLinear)


@pytest.mark.parametrize("after", [True, False], ids=["add_adapter", "inject"])
def test_new_adapter_starts_from_the_values_of_rank_zero(two_ranks: Pool, after: bool) -> None:
    for equal, something in two_ranks.run(_first_values, after):
        assert equal
        assert something


# --- gradients -------------------------------------------------------------------------------------------------------


def compare(whole: Any, sharded: Any, inputs: dict[str, Any], options: Any) -> dict[str, float]:
    """Return the errors of output and gradients with an adapter in training, and how far it moves the output."""
    base = outputs(whole, inputs)
    for model in (whole, sharded):
        inject_adapter_in_model(options, model)
    randomize_factors(whole)
    give(whole, sharded)
    traffic, results = sharding_of(sharded).group.traffic, outputs(whole, inputs)
    before = traffic.all_reduces
    error = relative_error(outputs(sharded, inputs), results)
    wanted_inputs, wanted = backward(whole, inputs)
    got_inputs, got = backward(sharded, inputs)
    assert wanted.keys() == got.keys()
    own = parts(whole, sharded)
    scale = max(grad.abs().max() for name, grad in wanted.items() if name in own)
    errors = [
        ((got[n] - part(wanted[n])).abs().max() / scale).item() for n, part in own.items() if n in wanted
    ]
    assert errors
    return {
        "output": error,
        "inputs": relative_error(got_inputs, wanted_inputs),
        "factors": max(errors),
        "share": relative_error(results, base),
        "sums": traffic.all_reduces - before,
    }


def _gradients(name: str, options: dict[str, Any]) -> dict[str, float]:
    whole = tiny_model(name, **options)
    return compare(whole, sharded_copy(whole), tiny_inputs(name), config(whole))


@pytest.mark.parametrize(
    ("name", "options"),
    [(FLUX2, {}), (WAN, {}), ("Lumina2Transformer2DModel", {"num_kv_heads": 1})],
    ids=["flux2", "wan", "one_key_head"],
)
def test_gradients_of_a_and_b_equal_one_process(two_ranks: Pool, name: str, options: dict[str, Any]) -> None:
    for errors in two_ranks.run(_gradients, name, options):
        for what in ("output", "inputs", "factors"):
            assert errors[what] < tolerances.FP32, what
        assert errors["share"] > tolerances.MISTAKE


def _whole_factor_unsummed() -> float:
    with mock.patch.object(lora_layers, "enter_shard", lambda tensor, group: tensor):
        return _gradients(FLUX2, {})["factors"]


def _copies_unsummed() -> float:
    with mock.patch.object(lora_layers, "enter_copies", lambda tensor, shard, group: tensor):
        return _gradients("Lumina2Transformer2DModel", {"num_kv_heads": 1})["factors"]


@pytest.mark.parametrize("broken", [_whole_factor_unsummed, _copies_unsummed])
def test_the_comparison_sees_gradients_of_a_factor_that_are_not_summed(two_ranks: Pool, broken: Any) -> None:
    assert min(two_ranks.run(broken)) > tolerances.MISTAKE


def _uneven() -> float:
    """Three heads on two ranks: their slices of A and B are not of one size."""
    name = "SD3Transformer2DModel"
    whole = tiny_model(name, num_attention_heads=3, caption_projection_dim=36)
    sharded = sharded_copy(whole, uneven=True)
    for model in (whole, sharded):
        model.load_lora_adapter(adapter(tiny_model(name, num_attention_heads=3, caption_projection_dim=36)))
    return error_of(sharded, whole, name)


def test_adapter_of_uneven_heads_equals_one_process(two_ranks: Pool) -> None:
    assert max(two_ranks.run(_uneven)) < tolerances.FP32


def _inside() -> dict[str, float]:
    """Experts, around which one sum is made for all that is inside."""
    whole = randomize(Mixture())
    sharded = sharded_copy(whole)
    targets = [path for path, m in whole.named_modules() if isinstance(m, nn.Linear) and "experts" in path]
    options = LoraConfig(r=3, target_modules=targets)
    return compare(whole, sharded, small_input(Mixture), options)


def test_adapter_inside_of_one_sum_equals_one_process_gradients_included(ranks: Pool) -> None:
    for errors in ranks.run(_inside):
        for what in ("output", "inputs", "factors"):
            assert errors[what] < tolerances.FP32, what
        assert errors["share"] > tolerances.MISTAKE


# --- refused, on every rank alike, with the model as it was ----------------------------------------------------------


def _dora(model: Any, folder: Path) -> None:
    key = "transformer.transformer_blocks.0.attn.to_q.lora_magnitude_vector.weight"
    model.load_lora_adapter({**adapter(tiny_model(FLUX)), key: torch.ones(48)})


def _lokr(model: Any, folder: Path) -> None:
    model.load_lora_adapter({"transformer.transformer_blocks.0.attn.to_q.lokr_w1": torch.ones(2, 2)})


def _too_wide(model: Any, folder: Path) -> None:
    wide = adapter(tiny_model(FLUX))
    key = "transformer.transformer_blocks.0.attn.to_q.lora_B.weight"
    model.load_lora_adapter({**wide, key: torch.ones(50, 3)})


def _too_wide_for_the_pipeline(model: Any, folder: Path) -> None:
    wide = adapter(tiny_model(FLUX))
    key = "transformer.context_embedder.lora_A.weight"
    FluxPipeline(model).load_lora_weights({**wide, key: torch.ones(3, 40)})


def _wrong_whole_layer(model: Any, folder: Path) -> None:
    wrong = adapter(tiny_model(FLUX))
    key = "transformer.proj_out.lora_A.weight"  # whole on every rank: diffusers finds it out half way
    model.load_lora_adapter({**wrong, key: torch.ones(3, 50)})


def _no_file(model: Any, folder: Path) -> None:
    model.load_lora_adapter(str(folder), weight_name="nothing.safetensors")


def _file_on_rank_zero(model: Any, folder: Path) -> None:
    if dist.get_rank() == 0:
        save_file(adapter(tiny_model(FLUX)), folder / "one.safetensors")
    own = folder if dist.get_rank() == 0 else folder / "elsewhere"
    model.load_lora_adapter(str(own), weight_name="one.safetensors")


def _ranks_differ(model: Any, folder: Path) -> None:
    model.load_lora_adapter(adapter(tiny_model(FLUX), rank=3 + dist.get_rank()))


def _fails_on_one_rank(model: Any, folder: Path) -> None:
    failing = mock.patch.object(torch.nn.Module, "load_state_dict", side_effect=MemoryError("no room"))
    if dist.get_rank() == 1:
        with failing:
            model.load_lora_adapter(adapter(tiny_model(FLUX)))
    model.load_lora_adapter(adapter(tiny_model(FLUX)))


def _add_dora(model: Any, folder: Path) -> None:
    model.add_adapter(config(tiny_model(FLUX), use_dora=True))


def _add_pissa(model: Any, folder: Path) -> None:
    model.add_adapter(config(tiny_model(FLUX), init_lora_weights="pissa"))


def _add_loha(model: Any, folder: Path) -> None:
    model.add_adapter(LoHaConfig(r=2, target_modules=["to_q"]))


def _add_another(model: Any, folder: Path) -> None:
    model.add_adapter(config(tiny_model(FLUX), r=2 + dist.get_rank()))


REFUSED: dict[str, tuple[Any, tuple[type[Exception], ...], str]] = {
    "dora": (_dora, (UnsupportedOperation,), "lora_magnitude_vector"),
    "lokr": (_lokr, (UnsupportedOperation,), "lokr"),
    "too_wide": (_too_wide, (CheckpointError,), "48 output features"),
    "too_wide_for_the_pipeline": (_too_wide_for_the_pipeline, (CheckpointError,), "20 input features"),
    "wrong_whole_layer": (_wrong_whole_layer, (RuntimeError,), "size mismatch"),
    "no_file": (_no_file, (CheckpointError,), "cannot be read"),
    "file_on_rank_zero": (_file_on_rank_zero, (CheckpointError,), "cannot be read"),
    "ranks_differ": (_ranks_differ, (RankFailure,), "differ in adapter"),
    "fails_on_one_rank": (_fails_on_one_rank, (RankFailure, MemoryError), "no room"),
    "add_dora": (_add_dora, (UnsupportedOperation,), "DoRA"),
    "add_pissa": (_add_pissa, (UnsupportedOperation,), "pissa"),
    "add_loha": (_add_loha, (UnsupportedOperation,), "loha"),
    "add_another": (_add_another, (RankFailure,), "differ in adapter"),
}


def _refused(case: str, folder: Path, with_another: bool) -> tuple[str, str, bool, bool]:
    call, kinds, _ = REFUSED[case]
    whole, sharded = pair(FLUX)
    inputs = tiny_inputs(FLUX)
    if with_another:
        sharded.load_lora_adapter(adapter(whole, seed=11), adapter_name="before")
    before, its_outputs = state(sharded), outputs(sharded, inputs)
    configs = dict(getattr(sharded, "peft_config", {}))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="Adapter default_1 was active"
            )  # of diffusers' clearing up
            call(sharded, folder)
        kind, message = "", "no error"
    except (ShardwiseError, *kinds) as error:
        kind, message = type(error).__name__ if isinstance(error, kinds) else "", str(error)
    again = zip(outputs(sharded, inputs), its_outputs, strict=True)
    kept = same(before, state(sharded)) and getattr(sharded, "peft_config", {}) == configs
    sharded.load_lora_adapter(adapter(whole), adapter_name="after")  # and it still takes one
    return kind, message, kept, all(torch.equal(a, b) for a, b in again)


@pytest.mark.parametrize("with_another", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("case", REFUSED)
def test_E2_adapter_is_refused_on_every_rank_and_leaves_the_model_as_it_was(
    two_ranks: Pool, tmp_path: Path, case: str, with_another: bool
) -> None:
    for kind, message, kept, equal in two_ranks.run(_refused, case, tmp_path, with_another):
        assert kind, message
        assert REFUSED[case][2] in message
        assert kept
        assert equal


def _swap_fails() -> tuple[str, bool]:
    whole, sharded = pair(FLUX)
    sharded.load_lora_adapter(adapter(whole), adapter_name="one")
    before = outputs(sharded, tiny_inputs(FLUX))
    new = adapter(whole, seed=12)
    new["transformer.proj_out.lora_B.weight"] = torch.ones(50, 3)  # of a whole layer, and reached last
    new |= {f"transformer.nothing.lora_{factor}.weight": torch.ones(3, 3) for factor in "AB"}
    try:
        sharded.load_lora_adapter(new, adapter_name="one", hotswap=True)
        message = "no error"
    except RuntimeError as error:
        message = str(error)
    again = zip(outputs(sharded, tiny_inputs(FLUX)), before, strict=True)
    return message, all(torch.equal(a, b) for a, b in again)


def test_swap_that_fails_leaves_the_old_adapter(two_ranks: Pool) -> None:
    for message, equal in two_ranks.run(_swap_fails):
        assert "unexpected keys" in message
        assert equal


def _not_finite() -> tuple[str, str]:
    """Have a number that is not finite in the rows of rank 1 only."""
    whole, sharded = pair(FLUX)
    broken = adapter(whole)
    broken["transformer.transformer_blocks.0.attn.to_q.lora_B.weight"][-1] = float("nan")
    sharded.load_lora_adapter(broken)
    try:
        sharded.fuse_lora(safe_fusing=True)
    except (RankFailure, ValueError) as error:
        return type(error).__name__, str(error)
    return "no error", ""


def test_fusing_that_fails_on_one_rank_is_an_error_on_all(two_ranks: Pool) -> None:
    (first, message), (second, _) = two_ranks.run(_not_finite)
    assert (first, second) == ("RankFailure", "ValueError")
    assert "transformer_blocks.0.attn.to_q failed on rank 1" in message


def _bias_inside() -> str:
    sharded = sharded_copy(randomize(Mixture()))
    targets = ["experts.listed.0.2"]
    try:
        inject_adapter_in_model(LoraConfig(r=2, target_modules=targets, lora_bias=True), sharded)
    except UnsupportedOperation as error:
        return str(error)
    return "no error"


def test_E2_bias_inside_of_one_sum_is_refused(two_ranks: Pool) -> None:
    assert all("lora_bias" in message for message in two_ranks.run(_bias_inside))


def _saved(folder: Path) -> tuple[str, bool]:
    whole, sharded = pair(FLUX)
    sharded.load_lora_adapter(adapter(whole))
    try:
        sharded.save_pretrained(folder / "model")
    except UnsupportedOperation as error:
        return str(error), (folder / "model").exists()
    return "no error", True


def test_E3_model_with_an_adapter_is_not_saved(two_ranks: Pool, tmp_path: Path) -> None:
    for message, written in two_ranks.run(_saved, tmp_path):
        assert "adapter" in message
        assert not written


def _convolution() -> str:
    sharded = sharded_copy(randomize(Convolutions()))
    try:
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["up"]), sharded)
    except UnsupportedOperation as error:
        return str(error)
    return "no error"


def test_E2_adapter_of_a_sharded_convolution_is_refused(two_ranks: Pool) -> None:
    assert all("Conv2d is not supported on up" in message for message in two_ranks.run(_convolution))


def _differing_before() -> str:
    model = tiny_model(FLUX2)
    if dist.get_rank() == 1:
        model.load_lora_adapter(adapter(tiny_model(FLUX2)))
    before = {n: type(m) for n, m in model.named_modules()}
    try:
        enable_parallelism(model, config=TensorParallelConfig(dist.get_world_size()))
    except RankFailure as error:
        assert {n: type(m) for n, m in model.named_modules()} == before
        assert sharding_of(model) is None
        return str(error)
    return "no error"


def test_E2_adapter_on_one_rank_only_is_an_error_on_all_before_sharding(two_ranks: Pool) -> None:
    assert all("differ in adapters" in message for message in two_ranks.run(_differing_before))


def _copied() -> float:
    whole, sharded = pair(FLUX2)
    twin = copy.deepcopy(sharded)
    twin.load_lora_adapter(adapter(whole))
    whole.load_lora_adapter(adapter(tiny_model(FLUX2)))
    assert not any(isinstance(m, lora.LoraLayer) for m in sharded.modules())
    return error_of(twin, whole, FLUX2)


def test_copy_of_a_sharded_model_takes_adapters_of_its_own(two_ranks: Pool) -> None:
    assert max(two_ranks.run(_copied)) < tolerances.FP32
