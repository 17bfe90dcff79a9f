"""Norms over all heads and sliced outputs, each alone: N ranks against the original module on one process."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm
from torch import Tensor, nn

from shardwise import SliceOutput, TensorParallelConfig, enable_parallelism
from shardwise.errors import PlanError
from shardwise.plan.layout import Shard
from shardwise.runtime import norms
from shardwise.runtime.modules import OutputSlice
from shardwise.runtime.shard import local_slice, sharding_of
from tests import tolerances
from tests.helpers import randomize, relative_error
from tests.pool import Pool

WIDTH = 24
LAST = Shard(2, (WIDTH,))
"""How the features of an input (batch, tokens, WIDTH) lie on the ranks."""

NORMS: dict[str, Any] = {
    "torch": lambda: nn.RMSNorm(WIDTH, eps=1e-5),
    "torch_without_eps": lambda: nn.RMSNorm(WIDTH),
    "torch_without_weight": lambda: nn.RMSNorm(WIDTH, eps=1e-6, elementwise_affine=False),
    "torch_layer": lambda: nn.LayerNorm(WIDTH, eps=1e-5),
    "torch_layer_without_bias": lambda: nn.LayerNorm(WIDTH, eps=1e-5, bias=False),
    "torch_layer_without_weight": lambda: nn.LayerNorm(WIDTH, eps=1e-5, elementwise_affine=False),
    "diffusers": lambda: DiffusersRMSNorm(WIDTH, eps=1e-5),
    "diffusers_with_bias": lambda: DiffusersRMSNorm(WIDTH, eps=1e-5, bias=True),
    "diffusers_without_weight": lambda: DiffusersRMSNorm(WIDTH, eps=1e-6, elementwise_affine=False),
}


HALF = {torch.float16, torch.bfloat16}


class Normed(nn.Module):
    """A norm beside a Linear, for a plan to shard a weight also where the norm has none."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = NORMS[kind]()
        self.linear = nn.Linear(WIDTH, WIDTH)


PLAN = {"norm": "across_head_norm", "linear": "colwise"}


def _pair(kind: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module, Any]:
    """Return a norm, its slice on this rank, and the group."""
    whole = randomize(Normed(kind)).to(dtype)
    config = TensorParallelConfig(tp_degree=dist.get_world_size(), check=False)
    sharded = enable_parallelism(copy.deepcopy(whole), config=config, plan=PLAN)
    return whole.norm, sharded.norm, sharding_of(sharded).group


def _features(dtype: torch.dtype, scale: float = 3.0) -> Tensor:
    """Return an input whose features differ in size from rank to rank."""
    x = torch.randn(3, 7, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return (x * torch.linspace(0.1, scale, WIDTH, dtype=torch.float64)).to(dtype)


def _own(tensor: Tensor, group: Any) -> Tensor:
    return local_slice(tensor, LAST, group.rank, group.degree)


def _norm(kind: str, dtype: torch.dtype) -> tuple[float, bool, int]:
    whole, own, group = _pair(kind, dtype)
    x = _features(dtype)
    with torch.no_grad():
        expected, actual = _own(whole(x), group), own(_own(x, group))
    return relative_error(actual, expected), actual.dtype == expected.dtype, group.traffic.all_reduces


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_norm_over_all_heads_equals_the_original_with_one_all_reduce(
    ranks: Pool, kind: str, dtype: torch.dtype
) -> None:
    # diffusers' class takes the mean of squares in fp32, whatever its input is.
    in_fp64 = dtype == torch.float64 and kind.startswith("torch")
    bound = tolerances.FP64 if in_fp64 else tolerances.FP32
    for error, same_dtype, all_reduces in ranks.run(_norm, kind, dtype):
        assert error < bound
        assert same_dtype
        assert all_reduces == (2 if "layer" in kind else 1)


def _mixed(kind: str, x_dtype: torch.dtype, weight_dtype: torch.dtype) -> tuple[float, float, bool, bool]:
    """Return the error, also in steps of the original's dtype, whether that is half, and whether it is ours too."""
    whole, own, group = _pair(kind, weight_dtype)
    x = _features(x_dtype)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Mismatch dtype")  # that torch's own norm has no fast form
        expected, actual = _own(whole(x), group), own(_own(x, group))
    spacing = torch.finfo(expected.dtype).eps * expected.abs().double()
    steps = ((actual.double() - expected.double()).abs() / spacing).max().item()
    return relative_error(actual, expected), steps, expected.dtype in HALF, actual.dtype == expected.dtype


DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32_weight": (torch.bfloat16, torch.float32),
    "bf16_weight": (torch.float32, torch.bfloat16),
}
"""Of the input, and of the weight."""
TAKEN = [
    pytest.param(kind, *DTYPES[dtypes], id=f"{kind}-{dtypes}")
    for kind in NORMS
    for dtypes in DTYPES
    if not (kind.startswith("torch_layer") and dtypes == "bf16_weight")  # torch's own refuses these dtypes
]


@pytest.mark.parametrize(("kind", "x_dtype", "weight_dtype"), TAKEN)
def test_norm_in_half_precision_rounds_as_the_original_does(
    two_ranks: Pool, kind: str, x_dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    for error, steps, in_half, same_dtype in two_ranks.run(_mixed, kind, x_dtype, weight_dtype):
        assert same_dtype
        assert steps <= tolerances.HALF_STEPS if in_half else error < tolerances.FP32


def _gradients(kind: str) -> list[float]:
    whole, own, group = _pair(kind, torch.float64)
    x = _features(torch.float64)
    weight = torch.linspace(-1, 2, x.numel(), dtype=torch.float64).view(x.shape)
    whole_x, own_x = x.clone().requires_grad_(), _own(x, group).clone().requires_grad_()
    (whole(whole_x) * weight).sum().backward()
    (own(own_x) * _own(weight, group)).sum().backward()
    errors = [relative_error(own_x.grad, _own(whole_x.grad, group))]
    for name, parameter in whole.named_parameters():
        part = local_slice(parameter.grad, Shard(0, (WIDTH,)), group.rank, group.degree)
        errors.append(relative_error(own.get_parameter(name).grad, part))
    return errors


@pytest.mark.parametrize("kind", NORMS)
def test_gradients_of_a_norm_over_all_heads_equal_the_original(ranks: Pool, kind: str) -> None:
    bound = tolerances.FP64 if kind.startswith("torch") else tolerances.FP32
    assert max(max(errors) for errors in ranks.run(_gradients, kind)) < bound


def _second_order() -> float:
    whole, own, group = _pair("torch", torch.float64)
    results = []
    for norm, x in ((own, _own(_features(torch.float64), group)), (whole, _features(torch.float64))):
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(norm(x).pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.pow(2).sum(), x)
        results.append(second)
    return relative_error(results[0], _own(results[1], group))


def test_second_order_gradients_of_a_norm_over_all_heads_equal_the_original(ranks: Pool) -> None:
    assert max(ranks.run(_second_order)) < tolerances.FP64


def _not_summed(kind: str, backward_only: bool) -> float:
    if backward_only:
        with mock.patch.object(norms, "enter_shard", lambda tensor, group: tensor):
            return _gradients(kind)[0]
    with mock.patch.object(norms, "reduce_partial", lambda tensor, group: tensor * group.degree):
        return _norm(kind, torch.float64)[0]


@pytest.mark.parametrize("kind", ["torch", "torch_layer", "diffusers"])
@pytest.mark.parametrize("backward_only", [False, True], ids=["forward", "backward"])
def test_the_comparison_sees_a_statistic_of_one_rank(two_ranks: Pool, kind: str, backward_only: bool) -> None:
    assert min(two_ranks.run(_not_summed, kind, backward_only)) > tolerances.MISTAKE


def _looks(kind: str) -> tuple[bool, bool, str, list[str], tuple[int, ...]]:
    whole, own, _ = _pair(kind, torch.float32)
    copied = pickle.loads(pickle.dumps(own))
    shape = own.normalized_shape if hasattr(whole, "normalized_shape") else own.dim
    same_class = all(isinstance(own, c) == isinstance(whole, c) for c in (nn.RMSNorm, nn.LayerNorm))
    return same_class, type(copied) is type(own), repr(own), list(own.state_dict()), tuple(shape)


@pytest.mark.parametrize("kind", NORMS)
def test_norm_keeps_its_keys_shows_its_slice_and_can_be_pickled(two_ranks: Pool, kind: str) -> None:
    for rank, (same_class, pickled, text, keys, shape) in enumerate(two_ranks.run(_looks, kind)):
        assert same_class
        assert pickled
        assert "Norm(12 of 24" in text
        assert f"rank {rank} of 2" in text
        assert keys == list(NORMS[kind]().state_dict())
        assert shape == (12,)


# ---------------------------------------------------------------- sliced outputs


class Tables(nn.Module):
    """Returns tables over all features, one of them learned, with a colwise Linear beside them."""

    def __init__(self, size: int = WIDTH, single: bool = False, extra: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table = Table(size, single, extra)

    def forward(self, x: Tensor) -> Any:
        return self.table(x)


class Table(nn.Module):
    def __init__(self, size: int, single: bool, extra: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1.0, 2.0, size))
        self.single, self.extra = single, extra

    def forward(self, x: Tensor) -> Any:
        table = x * self.scale
        if self.extra is not None:
            return table, self.extra
        return table if self.single else (table.cos(), [table.sin()])


def _sliced(model: nn.Module, dim: int) -> tuple[nn.Module, Any]:
    config = TensorParallelConfig(tp_degree=dist.get_world_size(), check=False)
    plan = {"linear": "colwise", "table": SliceOutput(dim)}
    sharded = enable_parallelism(copy.deepcopy(model), config=config, plan=plan)
    return sharded, sharding_of(sharded).group


def _slices(single: bool, dim: int) -> tuple[float, float]:
    whole = Tables(single=single).double()
    sharded, group = _sliced(whole, dim)
    x = torch.randn(3, 8, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    outputs, gradients = [], []
    for model in (sharded, whole):
        own_x = x.clone().requires_grad_()
        out = model(own_x)
        parts = [out] if single else [out[0], out[1][0]]
        if model is whole:
            size = parts[0].shape[dim]
            parts = [local_slice(p, Shard(dim % 3, (size,)), group.rank, group.degree) for p in parts]
        # On one process the loss uses all of the table; each rank uses its slice.
        sum(p.pow(3).sum() for p in ([out] if single else [out[0], out[1][0]])).backward()
        outputs.append(parts)
        gradients.append([own_x.grad, model.table.scale.grad])
    return relative_error(outputs[0], outputs[1]), relative_error(gradients[0], gradients[1])


@pytest.mark.parametrize(("single", "dim"), [(True, -1), (False, -1), (True, 1)])
def test_sliced_output_is_this_ranks_part_and_its_gradient_is_summed(
    ranks: Pool, single: bool, dim: int
) -> None:
    assert max(max(errors) for errors in ranks.run(_slices, single, dim)) < tolerances.FP64


def _refused(size: int, dim: int, extra: Any) -> str:
    sharded, _ = _sliced(Tables(size, single=True, extra=extra), dim)
    try:
        sharded(torch.ones(3, 7, size))
    except PlanError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("size", "dim", "extra", "kind"),
    [(25, -1, None, "IndivisibleSlice"), (24, 3, None, "NoSuchDim"), (24, -1, 5, "NotATensor")],
)
def test_output_that_cannot_be_sliced_is_refused_in_the_forward(
    two_ranks: Pool, size: int, dim: int, extra: Any, kind: str
) -> None:
    for message in two_ranks.run(_refused, size, dim, extra):
        assert f"{kind}: table" in message
        assert f"SliceOutput({dim})" in message


def _pickled() -> tuple[bool, bool]:
    sharded, _ = _sliced(Tables(), -1)
    (hook,) = pickle.loads(pickle.dumps(sharded.table))._forward_hooks.values()
    return isinstance(hook, OutputSlice), list(sharded.state_dict()) == list(Tables().state_dict())


def test_module_whose_output_is_sliced_keeps_its_keys_and_can_be_pickled(two_ranks: Pool) -> None:
    assert all(all(answers) for answers in two_ranks.run(_pickled))
