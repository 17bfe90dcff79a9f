"""Plans that were found, on two ranks: equal to one process, also where they are not the declared ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import AuraFlowTransformer2DModel, PRXTransformer2DModel
from tools.mutation.cases import case
from torch import Tensor, nn

from shardwise import PackedRowwiseParallel, TensorParallelConfig, enable_parallelism
from shardwise.errors import PlanError
from shardwise.plan.candidate import candidate
from tests import tolerances
from tests.found_plans import THIRTEEN, Difference, difference, inferred_for
from tests.helpers import outputs, randomize, relative_error
from tests.pool import Pool

# --- by dataflow -------------------------------------------------------------------------------------------------


def _errors(name: str, *plans: Mapping[str, object] | None) -> list[float]:
    """Return the error of a case with each plan; None is the declared one."""
    whole, config = case(name), TensorParallelConfig(tp_degree=dist.get_world_size(), check=False)
    expected = outputs(whole.model, whole.inputs)
    sharded = [
        enable_parallelism(case(name).model, config=config, plan=whole.plan if plan is None else plan)
        for plan in plans
    ]
    return [relative_error(outputs(model, whole.inputs), expected) for model in sharded]


@pytest.mark.parametrize("name", THIRTEEN)
def test_inferred_plan_equals_one_process_and_so_does_a_declared_one_that_differs(
    two_ranks: Pool, name: str
) -> None:
    plan = inferred_for(name).plan
    plans = [plan, *([None] if difference(name, plan) != Difference() else [])]
    errors = two_ranks.run(_errors, name, *plans)
    assert all(len(of_a_rank) == len(plans) for of_a_rank in errors)
    assert max(max(of_a_rank) for of_a_rank in errors) < tolerances.FP32


def test_inferred_plan_with_its_blocks_in_the_wrong_order_does_not(two_ranks: Pool) -> None:
    name, key = "HunyuanVideoTransformer3DModel", "single_transformer_blocks.*.proj_out"
    plan = inferred_for(name).plan
    style = plan[key]
    assert isinstance(style, PackedRowwiseParallel)
    assert isinstance(style.blocks, tuple)
    wrong = {**plan, key: PackedRowwiseParallel(style.blocks[::-1])}
    assert min(error for (error,) in two_ranks.run(_errors, name, wrong)) > 1000 * tolerances.FP32


# --- from names --------------------------------------------------------------------------------------------------


def _numbers(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _prx() -> tuple[nn.Module, dict[str, Any]]:
    """Fused q, k and v, of which the text has none but keys and values; a feed-forward in the block itself."""
    config = {
        "in_channels": 3,
        "context_in_dim": 20,
        "hidden_size": 48,
        "mlp_ratio": 2.5,
        "num_heads": 4,
        "depth": 2,
        "axes_dim": [4, 8],
    }
    return PRXTransformer2DModel(**config), {
        "hidden_states": torch.randn(3, 3, 10, 6, generator=_numbers()),
        "encoder_hidden_states": torch.randn(3, 7, 20, generator=_numbers(1)),
        "timestep": torch.rand(3, generator=_numbers(2)),
    }


def _aura_flow() -> tuple[nn.Module, dict[str, Any]]:
    """Two streams, and names of a feed-forward that a timestep embedder has too."""
    config = {
        "sample_size": 16,
        "in_channels": 3,
        "num_mmdit_layers": 1,
        "num_single_dit_layers": 2,
        "attention_head_dim": 12,
        "num_attention_heads": 4,
        "joint_attention_dim": 20,
        "caption_projection_dim": 48,
        "out_channels": 5,
        "pos_embed_max_size": 64,
    }
    return AuraFlowTransformer2DModel(**config), {
        "hidden_states": torch.randn(3, 3, 10, 6, generator=_numbers()),
        "encoder_hidden_states": torch.randn(3, 7, 20, generator=_numbers(1)),
        "timestep": torch.rand(3, generator=_numbers(2)),
    }


class Spanning(nn.Module):
    """An attention that reshapes by a width which it keeps under a name like any other."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(24, 24) for _ in range(4))
        self.heads, self.span = 4, 24

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            to(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for to in (self.to_q, self.to_k, self.to_v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.to_out(mixed.reshape(*x.shape[:2], self.span))


class Blocks(nn.Module):
    """What looks right by its names, and is not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"attn": Spanning()}) for _ in range(2))

    def forward(self, hidden_states: Tensor, return_dict: bool = False) -> Tensor:
        for block in self.blocks:
            hidden_states = hidden_states + block["attn"](hidden_states)
        return hidden_states


def _spanning() -> tuple[nn.Module, dict[str, Any]]:
    return Blocks(), {"hidden_states": torch.randn(3, 7, 24, generator=_numbers())}


def _from_names(make: Any) -> tuple[float, bool]:
    """Return the error of a model with the plan of its names, and whether the check has proved it."""
    model, inputs = make()
    found = candidate(randomize(model), dist.get_world_size())
    expected: list[Tensor] = outputs(model, inputs)
    config = TensorParallelConfig(tp_degree=dist.get_world_size())
    enable_parallelism(model, config=config, plan=found.plan)
    return relative_error(outputs(model, inputs), expected), model.check_report.ok


@pytest.mark.parametrize("make", [_prx, _aura_flow])
def test_candidate_of_a_class_without_a_plan_is_proved_by_the_check_and_equals_one_process(
    two_ranks: Pool, make: Any
) -> None:
    errors, proved = zip(*two_ranks.run(_from_names, make), strict=True)
    assert max(errors) < tolerances.FP32
    assert all(proved)


def _refusal(make: Any) -> str:
    with pytest.raises(PlanError) as caught:
        _from_names(make)
    return str(caught.value)


def test_candidate_that_is_wrong_is_refused_on_every_rank_at_its_first_forward(two_ranks: Pool) -> None:
    for message in two_ranks.run(_refusal, _spanning):
        assert "LocalForwardFailed: blocks.0.attn" in message
