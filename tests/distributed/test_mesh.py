"""Sub-meshes of a larger world: the slice follows the mesh coordinate, and outsiders get a clear error."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise import ParallelConfig, TensorParallelConfig, enable_parallelism, init_mesh
from shardwise.errors import ConfigError, GroupError, RankFailure
from shardwise.runtime import hosts as runtime_hosts
from shardwise.runtime import mesh as runtime_mesh
from shardwise.runtime.agreement import waiting_at_most
from shardwise.runtime.group import TensorParallelGroup
from shardwise.runtime.mesh import ranks_along
from tests import tolerances
from tests.helpers import outputs, randomize, relative_error
from tests.pool import Pool
from tests.small_models import Mlp, Transformer, small_input


def _strided_meshes() -> tuple[int, int, float]:
    """Shard over the ranks [0, 2] and [1, 3]; return which half of `up` is here, and the error."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))["tp"]
    whole = randomize(Mlp())
    sharded = enable_parallelism(copy.deepcopy(whole), config=TensorParallelConfig(mesh=mesh))
    halves = whole.up.weight.chunk(2)
    mine = next(i for i in range(2) if torch.equal(halves[i], sharded.up.weight))
    return (
        mesh.size(),
        mine,
        relative_error(outputs(sharded, small_input(Mlp)), outputs(whole, small_input(Mlp))),
    )


def test_L1_slice_follows_the_mesh_coordinate_and_not_the_global_rank(four_ranks: Pool) -> None:
    results = four_ranks.run(_strided_meshes)
    assert [mine for _, mine, _ in results] == [0, 0, 1, 1]
    assert max(error for _, _, error in results) < tolerances.FP32


def _outsider() -> str:
    mesh = DeviceMesh("cpu", [1, 2])
    whole = randomize(Transformer())
    try:
        sharded = enable_parallelism(copy.deepcopy(whole), config=TensorParallelConfig(mesh=mesh))
    except GroupError as error:
        return str(error)
    inputs = small_input(Transformer)
    assert relative_error(outputs(sharded, inputs), outputs(whole, inputs)) < tolerances.FP32
    return f"member {mesh.get_local_rank()}"


def test_rank_outside_of_the_mesh_gets_a_clear_error_while_the_members_work(four_ranks: Pool) -> None:
    first, second, third, fourth = four_ranks.run(_outsider)
    assert (second, third) == ("member 0", "member 1")
    assert "rank 0 is not in the mesh [1, 2]" in first
    assert "rank 3 is not in the mesh [1, 2]" in fourth


def _started_differently(sub_mesh: bool) -> tuple[float, bool]:
    """Seed the model by rank, change a buffer on one, shard; compare with the group's first rank."""
    config = TensorParallelConfig(tp_degree=dist.get_world_size())
    first = 0
    if sub_mesh:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
        config, first = TensorParallelConfig(mesh=mesh), 2 * (dist.get_rank() // 2)
    model = randomize(Transformer(), seed=100 + dist.get_rank())
    model.table *= 1 + dist.get_rank()
    enable_parallelism(model, config=config)
    reference = randomize(Transformer(), seed=100 + first)
    reference.table *= 1 + first
    inputs = small_input(Transformer)
    error = relative_error(outputs(model, inputs), outputs(reference, inputs))
    whole_bias = torch.equal(model.blocks[0].to_out[0].bias, reference.blocks[0].to_out[0].bias)
    return error, whole_bias and torch.equal(model.table, reference.table)


def test_models_seeded_differently_end_with_the_first_ranks_values_everywhere(four_ranks: Pool) -> None:
    for sub_mesh in (False, True):
        for error, whole_tensors_equal in four_ranks.run(_started_differently, sub_mesh):
            assert error < tolerances.FP32
            assert whole_tensors_equal


def _reversed_mesh() -> tuple[int, bool, float]:
    """Return this rank's coordinate, whether it holds that slice, and the error, in a mesh in falling order."""
    mesh = DeviceMesh("cpu", [1, 0])
    whole = randomize(
        Mlp(), seed=1 if dist.get_rank() == 1 else 2
    )  # global rank 1 is coordinate 0: its values win
    reference = randomize(Mlp(), seed=1)
    sharded = enable_parallelism(whole, config=TensorParallelConfig(mesh=mesh))
    mine = torch.equal(sharded.up.weight, reference.up.weight.chunk(2)[mesh.get_coordinate()[0]])
    error = relative_error(outputs(sharded, small_input(Mlp)), outputs(reference, small_input(Mlp)))
    return mesh.get_coordinate()[0], mine, error


def test_L1_coordinate_decides_also_where_the_mesh_is_not_in_ascending_order(two_ranks: Pool) -> None:
    results = two_ranks.run(_reversed_mesh)
    assert [coordinate for coordinate, _, _ in results] == [1, 0]
    assert all(mine for _, mine, _ in results)
    assert max(error for _, _, error in results) < tolerances.FP32


# ---------------------------------------------------------------- the mesh of a ParallelConfig


def _members(config: ParallelConfig) -> dict[str, list[int]]:
    mesh = init_mesh(config)
    return {axis: ranks_along(mesh, axis).members for axis in ("dp", "cfg", "ulysses", "tp")}


def test_axes_of_a_parallel_config_have_the_ranks_that_share_them(four_ranks: Pool) -> None:
    found = four_ranks.run(_members, ParallelConfig(tp=2, cfg=2))
    assert [members["tp"] for members in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [members["cfg"] for members in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [members["dp"] for members in found] == [[0], [1], [2], [3]]
    found = four_ranks.run(_members, ParallelConfig(ulysses=2, dp=2))
    assert [members["ulysses"] for members in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [members["dp"] for members in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]


@contextmanager
def _on(hosts: str) -> Iterator[None]:
    """Let the ranks of a pool be on machines of these names, by rank."""
    node = property(lambda group: [hosts[dist.get_rank()], ""])
    with (
        mock.patch.object(TensorParallelGroup, "node", node),
        mock.patch.object(runtime_mesh, "_meshes", WeakKeyDictionary()),
        mock.patch.object(runtime_hosts, "_told", set()),
    ):
        yield


def _placed(hosts: str, config: ParallelConfig) -> tuple[dict[str, list[int]], float, list[str]]:
    """Return the ranks along each axis, the error of a model that is sharded along one, and what was warned of."""
    log: list[str] = []
    with (
        _on(hosts),
        mock.patch.object(runtime_hosts.logger, "warning", lambda line, *values: log.append(line % values)),
    ):
        whole = randomize(Transformer())
        sharded = enable_parallelism(copy.deepcopy(whole), config=config.tensor_parallel(init_mesh(config)))
        inputs = small_input(Transformer)
        return _members(config), relative_error(outputs(sharded, inputs), outputs(whole, inputs)), log


@pytest.mark.parametrize(
    ("hosts", "tp", "lines"),
    [
        ("aabb", [[0, 1], [0, 1], [2, 3], [2, 3]], 0),
        ("abab", [[0, 2], [1, 3], [0, 2], [1, 3]], 0),
        ("abbb", [[0, 3], [1, 2], [1, 2], [0, 3]], 1),
    ],
)
def test_ranks_that_share_weights_are_of_one_machine_whatever_their_numbers(
    four_ranks: Pool, hosts: str, tp: list[list[int]], lines: int
) -> None:
    results = four_ranks.run(_placed, hosts, ParallelConfig(tp=2, cfg=2))
    assert [members["tp"] for members, _, _ in results] == tp
    assert max(error for _, error, _ in results) < tolerances.FP32
    said = [line for _, _, log in results for line in log]
    assert len(said) == lines
    assert all(line.startswith("tp=2 lies across 2 machines (a, b)") for line in said)


def _refused(config: ParallelConfig, axis: str | None) -> str:
    try:
        mesh = init_mesh(config)
        ranks_along(mesh["dp", "cfg"], axis) if axis else None
    except (ConfigError, GroupError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("config", "axis", "text"),
    [
        (
            ParallelConfig(tp=4),
            None,
            r"there are 2 ranks, and the product of the degrees is 4 \(tp=4\): start 4 processes$",
        ),
        (ParallelConfig(), None, r"is 1 \(no degree above 1\): start 1 process, or set dp=2"),
        (ParallelConfig(dp=4), None, r"is 4 \(dp=4\): start 4 processes, or set dp=2"),
        (ParallelConfig(ring=2), None, "a ring does not work on CPUs: .* use ulysses= in place of ring="),
        (ParallelConfig(cfg=2), "tp", 'expected a mesh with an axis "tp"'),
    ],
)
def test_mesh_that_cannot_be_is_refused_with_what_fits(
    two_ranks: Pool, config: ParallelConfig, axis: str | None, text: str
) -> None:
    for answer in two_ranks.run(_refused, config, axis):
        assert re.search(text, answer)


def test_mesh_without_a_process_group_says_how_to_start_one() -> None:
    with pytest.raises(GroupError, match="tp=2 needs a process group: start the script with `torchrun"):
        init_mesh(ParallelConfig(tp=2))


# --- meshes that are made again and again --------------------------------------------------------------------------


def _made_again(times: int, kept: bool) -> tuple[int, int, bool]:
    """Make the meshes of some degrees again and again; return how many descriptors and groups came after the first."""

    def make() -> list[DeviceMesh]:
        degrees = ({"cfg": 2}, {"dp": 2}, {"ulysses": 2}, {"tp": 2})
        return [init_mesh(ParallelConfig(**each)) for each in degrees]

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(dist.distributed_c10d._world.pg_map)

    first, before, same = make(), held(), True
    for _ in range(times):
        if not kept:
            runtime_mesh._meshes.clear()
        same = same and all(a is b for a, b in zip(first, make(), strict=True))
    descriptors, groups = held()
    return descriptors - before[0], groups - before[1], same


def test_mesh_of_the_same_degrees_is_made_once(two_ranks: Pool) -> None:
    assert two_ranks.run(_made_again, 3, kept=True) == [(0, 0, True)] * 2


def test_mesh_that_is_not_kept_leaves_groups_behind(two_ranks: Pool) -> None:
    for descriptors, groups, same in two_ranks.run(_made_again, 1, kept=False):
        assert descriptors > 0
        assert groups > 4
        assert not same


def _mesh_that_one_rank_does_not_make() -> str:
    if dist.get_rank() == 1:
        return "not asked"
    try:
        with waiting_at_most(timedelta(seconds=0.5)):
            init_mesh(ParallelConfig(cfg=2))
    except RankFailure as error:
        return str(error)
    return "made"


def test_mesh_that_one_rank_does_not_make_ends_by_an_agreement() -> None:
    ranks = Pool(2)  # of its own: the ranks are out of step afterwards
    try:
        first, _ = ranks.run(_mesh_that_one_rank_does_not_make)
    finally:
        ranks.stop()
    assert "rank 1 of 2 (global rank 1) did not answer within 0:00:00.500000" in first
