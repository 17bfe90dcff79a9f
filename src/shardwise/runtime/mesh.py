"""The mesh that a `ParallelConfig` means, and the ranks along each of its axes."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.config import PARALLEL_AXES, ParallelConfig, TensorParallelConfig
from shardwise.errors import ConfigError, GroupError
from shardwise.runtime.group import TensorParallelGroup, default_device_type, is_initialized

NO_RING_ON_CPUS = (
    "a ring does not work on CPUs: it adds up partial attentions by their log-sum-exp, which none that diffusers has "
    "for CPUs returns; use ulysses= in place of ring="
)


def init_mesh(config: ParallelConfig, device_type: str | None = None) -> DeviceMesh:
    """Return the mesh of all ranks that `config` means; all of them call it.

    Its axes are "dp", "cfg", "ring", "ulysses" and "tp", of size 1 where there is nothing to share out. Diffusers'
    context parallelism takes it as it is.

    Args:
        config: The degrees.
        device_type: `"cuda"`, `"cpu"` and so on; by default what the process group's backend connects.

    Raises:
        GroupError: there is no process group, or it has another number of ranks.
        ConfigError: a ring on CPUs.
    """
    if not is_initialized():
        raise GroupError(
            f"{config} needs a process group: start the script with `torchrun --nproc-per-node {config.size} "
            "script.py` and call `torch.distributed.init_process_group()` first"
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
    return init_device_mesh(device_type, config.shape, mesh_dim_names=PARALLEL_AXES)


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
