"""LoRA on int8 weights, sharded against one process: errors in both orders, all-reduces, and the base afterwards."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig
from peft.tuners import lora
from torchao.quantization import quantize_

from shardwise.compose import lora_layers
from shardwise.runtime.modules import LocalLayer
from tests import quantized, tolerances
from tests.distributed.test_lora import error_of, sharded_copy, sums
from tests.distributed.test_lora_paths import compare
from tests.helpers import outputs, randomize, relative_error, save_tiny, tiny_inputs
from tests.lora import adapter
from tests.pool import Pool, at_two_ranks_and_once_at_four
from tests.quantized import FAMILIES, INT8, KINDS
from tests.small_models import Mixture, small_input


def lora_errors(name: str, folder: Path) -> dict[str, tuple[float, float]]:
    """Return the distances to fp32 of int8 with an adapter, sharded and in one process, by what was done first."""
    exact, (sharded, whole) = quantized.load(name, folder), quantized.pair(name, folder, INT8)
    state = adapter(exact)
    models = (exact, sharded, whole)
    for model in models:
        model.load_lora_adapter(state, adapter_name="one")
    first = quantized.mean_distance(name, sharded, exact), quantized.mean_distance(name, whole, exact)
    for model in models:
        model.fuse_lora()
    fused = quantized.mean_distance(name, sharded, exact), quantized.mean_distance(name, whole, exact)
    sharded, whole = quantized.load(name, folder, sharded=True), quantized.load(name, folder)
    for model in (sharded, whole):
        model.load_lora_adapter(state, adapter_name="one")
        quantize_(model, KINDS[INT8](), _is_base)
    then = quantized.mean_distance(name, sharded, exact), quantized.mean_distance(name, whole, exact)
    return {"loaded on int8": first, "fused into int8": fused, "quantized with it": then}


def _is_base(module: torch.nn.Module, path: str) -> bool:
    return isinstance(module, torch.nn.Linear) and ".lora_" not in path


def lora_base(module: torch.nn.Module) -> torch.nn.Module | None:
    return module.base_layer if isinstance(module, lora.LoraLayer) else None


def _on_int8(name: str, folder: Path) -> dict[str, Any]:
    sharded, without = quantized.load(name, folder, INT8, sharded=True), quantized.load(name, folder)
    inputs, state = tiny_inputs(name), adapter(without)
    before, base_sums = outputs(sharded, inputs), sums(sharded, name)
    sharded.load_lora_adapter(state, adapter_name="one")
    result = {
        "share": relative_error(outputs(sharded, inputs), before),
        "more sums": sums(sharded, name) - base_sums,
        "kinds": {type(m) for m in sharded.modules() if isinstance(lora_base(m), LocalLayer)},
    }
    sharded.unload_lora()
    again = zip(outputs(sharded, inputs), before, strict=True)
    return {**result, "unloaded": all(torch.equal(a, b) for a, b in again)}


@at_two_ranks_and_once_at_four(FAMILIES, FAMILIES[1])
def test_adapter_and_int8_are_as_exact_as_in_one_process(ranks: Pool, tmp_path: Path, name: str) -> None:
    save_tiny(name, tmp_path)
    for result in ranks.run(lora_errors, name, tmp_path):
        for order, (sharded, whole) in result.items():
            assert 0 < sharded < tolerances.QUANTIZED_RATIO * whole, order


@pytest.mark.parametrize("name", FAMILIES)
def test_adapter_on_int8_costs_no_all_reduce_and_leaves_the_base(
    two_ranks: Pool, tmp_path: Path, name: str
) -> None:
    save_tiny(name, tmp_path)
    for result in two_ranks.run(_on_int8, name, tmp_path):
        assert result["share"] > tolerances.MISTAKE
        assert result["more sums"] == 0
        assert lora_layers.LocalTorchaoLoraLinear in result["kinds"]
        assert result["kinds"] <= set(lora_layers._LOCAL.values())
        assert result["unloaded"]  # the base, to the last bit


def _unaware(name: str, folder: Path) -> dict[str, Any]:
    """Let PEFT's layers be as they are: each would add its part behind the sum, or of another width."""
    with mock.patch.object(lora_layers, "adopt"):
        sharded, exact = quantized.load(name, folder, INT8, sharded=True), quantized.load(name, folder)
        state = adapter(exact)
        exact.load_lora_adapter(state)
        try:
            sharded.load_lora_adapter(state)
            return {"error": error_of(sharded, exact, name)}
        except (RuntimeError, ValueError) as error:
            return {"raised": str(error)}


def test_adapter_on_int8_by_peft_alone_would_be_seen(two_ranks: Pool, tmp_path: Path) -> None:
    save_tiny(FAMILIES[0], tmp_path)
    for result in two_ranks.run(_unaware, FAMILIES[0], tmp_path):
        assert result.get("raised") or result["error"] > 10 * tolerances.MISTAKE


def _router() -> dict[str, float]:
    """Adapt a quantized Linear that is whole and of whose gradient each rank knows a part."""
    whole = randomize(Mixture())
    sharded = sharded_copy(whole)
    for model in (whole, sharded):
        quantize_(model, KINDS[INT8](), lambda module, path: path == "experts.router")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*get_apply_tensor_subclass")  # PEFT cannot fuse it
        errors = compare(whole, sharded, small_input(Mixture), LoraConfig(r=3, target_modules=["router"]))
    assert type(sharded.experts.router) is lora_layers.SummedTorchaoLoraLinear
    return errors


def test_adapter_on_a_quantized_router_equals_one_process_gradients_included(two_ranks: Pool) -> None:
    for errors in two_ranks.run(_router):
        for what in ("output", "inputs", "factors"):
            assert errors[what] < tolerances.FP32, what
        assert errors["share"] > tolerances.MISTAKE
