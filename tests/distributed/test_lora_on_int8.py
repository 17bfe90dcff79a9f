"""LoRA on int8 weights, sharded against one process: errors in both orders, all-reduces, and the base afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft.tuners import lora
from peft.tuners.lora.torchao import TorchaoLoraLinear
from torchao.quantization import quantize_

from shardwise.compose import lora_layers
from tests import quantized, tolerances
from tests.distributed.test_lora import error_of, sums
from tests.helpers import outputs, relative_error, save_tiny, tiny_inputs
from tests.lora import adapter
from tests.pool import Pool, at_two_ranks_and_once_at_four
from tests.quantized import FAMILIES, INT8, KINDS


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


def _on_int8(name: str, folder: Path) -> dict[str, Any]:
    sharded, without = quantized.load(name, folder, INT8, sharded=True), quantized.load(name, folder)
    inputs, state = tiny_inputs(name), adapter(without)
    before, base_sums = outputs(sharded, inputs), sums(sharded, name)
    sharded.load_lora_adapter(state, adapter_name="one")
    result = {
        "share": relative_error(outputs(sharded, inputs), before),
        "more sums": sums(sharded, name) - base_sums,
        "kinds": {type(m) for m in sharded.modules() if isinstance(m, lora.LoraLayer)},
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
        assert result["kinds"] <= {lora_layers.LocalTorchaoLoraLinear, TorchaoLoraLinear}
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
