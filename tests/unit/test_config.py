"""TensorParallelConfig: a positive degree, a one-dimensional mesh, and agreement between the two."""

from dataclasses import FrozenInstanceError
from math import prod

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise import ParallelConfig, TensorParallelConfig
from shardwise.errors import ConfigError
from shardwise.models.parallelism import as_config


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


# ---------------------------------------------------------------- all axes


def test_degrees_are_one_by_default_and_their_product_is_the_number_of_ranks() -> None:
    assert ParallelConfig().size == 1
    assert str(ParallelConfig()) == "no degree above 1"
    config = ParallelConfig(tp=4, cfg=2, dp=3)
    assert (config.size, config.shape, str(config)) == (24, (3, 2, 1, 1, 4), "dp=3 x cfg=2 x tp=4")


@pytest.mark.parametrize("axis", ["tp", "cfg", "dp", "ulysses", "ring"])
@pytest.mark.parametrize("degree", [0, -2, True, 2.0, "2", None])
def test_degree_of_an_axis_that_is_no_positive_integer_is_refused(axis: str, degree: object) -> None:
    with pytest.raises(ConfigError, match=f"{axis} must be a positive integer, got"):
        ParallelConfig(**{axis: degree})


@pytest.mark.parametrize("tensor", [TensorParallelConfig(2), TensorParallelConfig(mesh=mesh_of(1))])
def test_degree_of_tensor_parallelism_is_said_once(tensor: TensorParallelConfig) -> None:
    with pytest.raises(ConfigError, match="leave tp_degree and mesh out of it"):
        ParallelConfig(tp=2, tensor=tensor)
    with pytest.raises(ConfigError, match="tensor must be a TensorParallelConfig, got int"):
        ParallelConfig(tensor=2)


def test_tensor_parallel_config_is_that_of_the_axis_with_all_options() -> None:
    config = ParallelConfig(tp=4, tensor=TensorParallelConfig(check=False, uneven=True))
    alone = mesh_of(4, names=("tp",))
    sharded = config.tensor_parallel(alone)
    assert (sharded.tp_degree, sharded.mesh, sharded.check, sharded.uneven) == (4, alone, False, True)
    assert ParallelConfig(cfg=2).tensor_parallel().tp_degree == 1


@pytest.mark.parametrize("mesh", [None, mesh_of(4), mesh_of(2, 2, names=("dp", "cfg"))])
def test_tensor_parallel_config_needs_a_mesh_with_its_axis(mesh: DeviceMesh | None) -> None:
    with pytest.raises(ConfigError, match='tp=4 needs a mesh with an axis "tp"'):
        ParallelConfig(tp=4).tensor_parallel(mesh)


def test_parallel_config_shards_a_model_if_all_ranks_are_for_that() -> None:
    assert as_config(ParallelConfig(tp=4, tensor=TensorParallelConfig(check=False))) == TensorParallelConfig(
        4, check=False
    )
    with pytest.raises(
        ConfigError, match=r"some of the ranks of cfg=2 x tp=2: pass config.tensor_parallel\(mesh\)"
    ):
        as_config(ParallelConfig(tp=2, cfg=2))
