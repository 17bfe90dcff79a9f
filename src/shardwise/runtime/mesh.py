"""The mesh that a `ParallelConfig` means, and the ranks along each of its axes."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.config import PARALLEL_AXES, ParallelConfig, TensorParallelConfig
from shardwise.errors import ConfigError, GroupError
from shardwise.runtime.group import TensorParallelGroup, default_device_type, is_initialized
from shardwise.runtime.hosts import placed

NO_RING_ON_CPUS = (
    "a ring does not work on CPUs: it adds up partial attentions by their log-sum-exp, which none that diffusers has "
    "for CPUs returns; use ulysses= in place of ring="
)


def init_mesh(config: ParallelConfig, device_type: str | None = None) -> DeviceMesh:
    """Return the mesh of all ranks that `config` means, the same one for the same degrees; all of them call it.

    Its axes are "dp", "cfg", "ring", "ulysses" and "tp", of size 1 where there is nothing to share out. Diffusers'
    context parallelism takes it as it is. Ranks along "tp", who send the most, are of one machine wherever there are
    enough, then those along "ulysses" and so on: by where they are, whatever their numbers.

    Args:
        config: The degrees.
        device_type: `"cuda"`, `"cpu"` and so on; by default what the process group's backend connects.

    Raises:
        GroupError: there is no process group, or it has another number of ranks.
        ConfigError: a ring on CPUs.
        RankFailure: a rank did not say in time where it is.
    """
    if not is_initialized():
        raise GroupError(
            f"{config} needs a process group: start the script with `torchrun --nproc-per-node {config.size} "
            "script.py`, or srun, and call `shardwise.init_ranks()` first"
        )
    ranks = dist.get_world_size()
    if config.size != ranks:
        raise GroupError(
            f"there are {ranks} ranks, and the product of the degrees is {config.size} ({config}): "
            f"{_what_fits(config, ranks)}"
        )
    device_type = device_type or default_device_type()
    if config.ring > 1 and device_type == "cpu":
        raise ConfigError(NO_RING_ON_CPUS)
    world = TensorParallelGroup.of(TensorParallelConfig())
    made = _meshes.setdefault(world.process_group, {})
    if (key := (device_type, config.shape)) not in made:
        # torch waits for all ranks when it makes groups, by a time-out of its own.
        with world.agreement(f"making the mesh of {config}") as step:
            step.say(world.node)
        order = _ranks(config, [tuple(host) for host in step.heard])
        made[key] = DeviceMesh(device_type, order, mesh_dim_names=PARALLEL_AXES)
    return made[key]


_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], DeviceMesh]] = (
    WeakKeyDictionary()
)
"""The meshes that were made over each default process group: every one has process groups of its own, which last."""


def _ranks(config: ParallelConfig, hosts: Sequence[tuple[str, ...]]) -> Tensor:
    """Return the global ranks by their place in the mesh, of ranks on these machines."""
    inner = config.tp if config.tp > 1 else config.ulysses * config.ring
    return torch.tensor(placed(hosts, inner), dtype=torch.int, device="cpu").view(config.shape)


def ranks_along(mesh: DeviceMesh, axis: str) -> TensorParallelGroup:
    """Return the ranks that share an axis of a mesh with this process.

    Args:
        mesh: A mesh with that axis, or a mesh of one axis, whatever its name.
        axis: The axis.

    Raises:
        ConfigError: `mesh` is no mesh, or has several axes and not this one.
        GroupError: this process is not in the mesh.
    """
    names = mesh.mesh_dim_names or () if isinstance(mesh, DeviceMesh) else ()
    if axis in names and mesh.ndim > 1:
        mesh = mesh[axis]
    elif not isinstance(mesh, DeviceMesh) or mesh.ndim > 1:
        raise ConfigError(
            f'expected a mesh with an axis "{axis}", or one of its axes, got {mesh}: pass shardwise.init_mesh(config)'
        )
    return TensorParallelGroup.of(TensorParallelConfig(mesh=mesh))


def _what_fits(config: ParallelConfig, ranks: int) -> str:
    """Return what would fit the number of ranks there are."""
    fits = f"start {config.size} process{'es' if config.size > 1 else ''}"
    replicas, left = divmod(ranks * config.dp, config.size)
    if left == 0:
        fits += f", or set dp={replicas}"
    return fits
