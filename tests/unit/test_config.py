"""TensorParallelConfig: a positive degree, a one-dimensional mesh, and agreement between the two."""

from dataclasses import FrozenInstanceError
from math import prod

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise import TensorParallelConfig
from shardwise.errors import ConfigError


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return a mesh as rank 0 sees it, without the process groups that a live one has."""
    ranks = torch.arange(prod(shape)).reshape(shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=0)


def test_L2_degree_is_one_by_default() -> None:
    assert TensorParallelConfig().tp_degree == 1
    assert TensorParallelConfig().mesh is None


@pytest.mark.parametrize("degree", [1, 2, 3, 8])
def test_L2_degree_is_kept_as_given(degree: int) -> None:
    assert TensorParallelConfig(tp_degree=degree).tp_degree == degree


@pytest.mark.parametrize("degree", [0, -1, True, False, 2.0, "2", None, (2,)])
def test_L2_degree_that_is_no_positive_integer_is_refused(degree: object) -> None:
    with pytest.raises(ConfigError) as caught:
        TensorParallelConfig(tp_degree=degree)
    assert str(caught.value) == f"tp_degree must be a positive integer, got {degree!r}"


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan"), True])
def test_load_timeout_that_is_no_time_is_refused(seconds: float) -> None:
    assert TensorParallelConfig(load_timeout=0.5).load_timeout == 0.5
    with pytest.raises(ConfigError, match="load_timeout must be a positive number of seconds"):
        TensorParallelConfig(load_timeout=seconds)


@pytest.mark.parametrize("given", [{}, {"tp_degree": 4}])
def test_L1_mesh_decides_the_degree(given: dict[str, int]) -> None:
    mesh = mesh_of(4)
    config = TensorParallelConfig(mesh=mesh, **given)
    assert config.tp_degree == 4
    assert config.mesh is mesh


@pytest.mark.parametrize("degree", [2, 8])
def test_L1_degree_that_contradicts_the_mesh_is_refused(degree: int) -> None:
    with pytest.raises(ConfigError, match=f"tp_degree is {degree} but the mesh has 4 ranks"):
        TensorParallelConfig(tp_degree=degree, mesh=mesh_of(4))


@pytest.mark.parametrize(
    ("mesh", "hint"),
    [
        (mesh_of(2, 4, names=("dp", "tp")), 'mesh has 2 axes, .* pass mesh\\["tp"\\]'),
        (mesh_of(2, 4), "mesh has 2 axes, .* a one-dimensional slice of it"),
        (mesh_of(), "mesh has 0 axes"),
    ],
)
def test_L1_mesh_of_other_than_one_axis_is_refused_with_the_slice_to_take(
    mesh: DeviceMesh, hint: str
) -> None:
    with pytest.raises(ConfigError, match=hint):
        TensorParallelConfig(mesh=mesh)


@pytest.mark.parametrize("mesh", ["tp", 4, (0, 1)])
def test_L1_what_is_no_mesh_is_refused(mesh: object) -> None:
    with pytest.raises(ConfigError, match="mesh"):
        TensorParallelConfig(mesh=mesh)


@pytest.mark.parametrize("field", ["tp_degree", "mesh"])
def test_config_is_frozen(field: str) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(TensorParallelConfig(2), field, None)


def test_equal_configs_are_equal_and_hash_alike() -> None:
    assert TensorParallelConfig(2) == TensorParallelConfig(tp_degree=2)
    assert len({TensorParallelConfig(2), TensorParallelConfig(2), TensorParallelConfig(4)}) == 2
