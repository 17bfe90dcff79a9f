"""Debug mode: ranks that call a model with different inputs are told so, on every rank, naming the argument."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwise import TensorParallelConfig, enable_parallelism, models
from shardwise.errors import UnequalInputs
from shardwise.runtime.debug import VARIABLE, EqualInputs, describe
from shardwise.runtime.shard import sharding_of
from tests.helpers import outputs, save_tiny, tiny_inputs, tiny_model
from tests.pool import Pool
from tests.small_models import Mlp, small_input

FLUX2, QWEN = "Flux2Transformer2DModel", "QwenImageTransformer2DModel"


def config(debug: bool = True) -> TensorParallelConfig:
    return TensorParallelConfig(tp_degree=dist.get_world_size(), debug=debug)


def sharded(name: str, debug: bool = True) -> Any:
    return enable_parallelism(tiny_model(name), config=config(debug))


def attempt(model: Any, inputs: dict[str, Any]) -> str:
    try:
        outputs(model, inputs)
    except UnequalInputs as error:
        return str(error)
    return ""


def _other_seed(inputs: dict[str, Any]) -> None:
    inputs["hidden_states"] = torch.randn(3, 15, 8, generator=torch.Generator().manual_seed(7))


def _other_prompt(inputs: dict[str, Any]) -> None:
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"] + 1e-6


def _other_length(inputs: dict[str, Any]) -> None:
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:, :6]
    inputs["txt_ids"] = inputs["txt_ids"][:6]


def _other_dtype(inputs: dict[str, Any]) -> None:
    inputs["timestep"] = inputs["timestep"].double()


def _nothing(inputs: dict[str, Any]) -> None:
    inputs["guidance"] = None


def _left_out(inputs: dict[str, Any]) -> None:
    del inputs["guidance"]


def _more_of_it(inputs: dict[str, Any]) -> None:
    inputs["joint_attention_kwargs"] = {"scale": 0.5}


def _same(inputs: dict[str, Any]) -> None:
    inputs["hidden_states"] = inputs["hidden_states"].clone(memory_format=torch.contiguous_format)


CHANGES = {
    _other_seed: ["hidden_states"],
    _other_prompt: ["encoder_hidden_states"],
    _other_length: ["encoder_hidden_states", "txt_ids"],
    _other_dtype: ["timestep"],
    _nothing: ["guidance"],
    _left_out: ["guidance"],
    _more_of_it: ["joint_attention_kwargs['scale']"],
    _same: [],
}


def _changed_on_the_last_rank(change: Any) -> str:
    model, inputs = sharded(FLUX2), tiny_inputs(FLUX2)
    if dist.get_rank() == dist.get_world_size() - 1:
        change(inputs)
    return attempt(model, inputs)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_differing_inputs_are_reported_on_every_rank_by_argument(ranks: Pool, change: Any) -> None:
    messages = ranks.run(_changed_on_the_last_rank, change)
    assert len(set(messages)) == 1
    named = [line.strip() for line in messages[0].splitlines()[1:] if not line.startswith("    ")]
    assert named == CHANGES[change]
    if named:
        assert "Flux2Transformer2DModel" in messages[0]
        assert f"rank {ranks.size - 1}: " in messages[0]


def _nested() -> str:
    model, inputs = sharded(QWEN), tiny_inputs(QWEN)
    if dist.get_rank() == 0:
        inputs["img_shapes"][1] = (1, 3, 5)
    return attempt(model, inputs)


def test_value_inside_a_list_is_named_by_its_place(two_ranks: Pool) -> None:
    for message in two_ranks.run(_nested):
        assert "  img_shapes[1][1]\n    rank 0: 3\n    rank 1: 5" in message
        assert "img_shapes[0]" not in message


def _equal_ones() -> bool:
    inputs = tiny_inputs(FLUX2)
    checked, unchecked = sharded(FLUX2), sharded(FLUX2, debug=False)
    runs = [outputs(model, inputs) for model in (checked, checked, unchecked)]
    return all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))


def test_equal_inputs_pass_and_change_nothing(two_ranks: Pool) -> None:
    assert two_ranks.run(_equal_ones) == [True, True]


def _off() -> tuple[str, int, bool]:
    model, inputs = sharded(FLUX2, debug=False), tiny_inputs(FLUX2)
    if dist.get_rank() == 1:
        _other_seed(inputs)
    return attempt(model, inputs), len(model._forward_pre_hooks), TensorParallelConfig().debug


def test_off_by_default(two_ranks: Pool) -> None:
    assert two_ranks.run(_off) == [("", 0, False)] * 2


def _asked_by_variable(value: str, rank: int) -> str:
    changed = {VARIABLE: value} if dist.get_rank() == rank else {}
    with mock.patch.dict(os.environ, changed):
        model, inputs = sharded(FLUX2, debug=False), tiny_inputs(FLUX2)
    if dist.get_rank() == 1:
        _other_seed(inputs)
    return attempt(model, inputs)


@pytest.mark.parametrize("rank", [0, 1])
def test_environment_variable_of_one_rank_is_enough(two_ranks: Pool, rank: int) -> None:
    assert all("hidden_states" in message for message in two_ranks.run(_asked_by_variable, "1", rank))


def test_environment_variable_of_another_value_asks_for_nothing(two_ranks: Pool) -> None:
    assert two_ranks.run(_asked_by_variable, "0", 0) == ["", ""]


def _loaded(folder: Path) -> str:
    model = getattr(models, FLUX2).from_pretrained(folder, parallel_config=config())
    inputs = tiny_inputs(FLUX2)
    if dist.get_rank() == 1:
        _other_prompt(inputs)
    return attempt(model, inputs)


def test_model_that_was_loaded_sharded_is_checked_as_well(two_ranks: Pool, tmp_path: Path) -> None:
    save_tiny(FLUX2, tmp_path)
    assert all("encoder_hidden_states" in message for message in two_ranks.run(_loaded, tmp_path))


def _copies_and_compiles() -> tuple[str, bool, bool]:
    """A copy is checked, too; a pickle holds the hook; a compiled forward, in which no hash can be, still compiles."""
    model = enable_parallelism(Mlp(), config=config())
    inputs = small_input(Mlp)
    hooks = pickle.loads(pickle.dumps(model))._forward_pre_hooks.values()
    pickled = any(isinstance(hook, EqualInputs) for hook in hooks)
    outputs(model, inputs)  # the static check of the first forward removes its own hook
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    same = torch.equal(outputs(compiled, inputs)[0], outputs(model, inputs)[0])
    inputs["x"] = inputs["x"] + dist.get_rank()
    assert sharding_of(model).config.debug
    return attempt(copy.deepcopy(model), inputs), pickled, same


def test_hook_is_copied_pickled_and_left_out_of_compiled_code(two_ranks: Pool) -> None:
    for message, pickled, same in two_ranks.run(_copies_and_compiles):
        assert "  x\n" in message
        assert pickled
        assert same


def test_description_names_positions_by_the_signature() -> None:
    described = describe(Mlp(), (torch.zeros(2),), {"return_dict": False})
    assert described == {"x": "float32 [2] af5570f5a181", "return_dict": "False"}
    assert describe(Mlp(), (1, 2, 3, 4), {}) == {f"argument {i}": str(i + 1) for i in range(4)}
