"""Which device a process group is for, and what tells that device from others. Asks torch for any accelerator alike."""

from __future__ import annotations

import torch
import torch.distributed as dist


def accelerator() -> torch.device | None:
    """Return the accelerator that ranks of this machine may compute on: one with a way of its own to connect them.

    That of a Mac has none, and is not taken.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return None
    try:
        backend = dist.get_default_backend_for_device(found)
    except ValueError:  # torch knows of none
        return None
    return None if backend == "gloo" else found


def device_type_of(group: dist.ProcessGroup) -> str:
    """Return the accelerator of this process, if `group` has a backend of its own for it, or connects nothing but it.

    Gloo alone says nothing: torch takes it for CPUs and for CUDA devices. `init_process_group("cuda:gloo")` is clear.
    """
    found, backends = accelerator(), _backends(group)
    backend = backends.get(found.type) if found is not None else None
    if found is None or backend is None or (backend == "gloo" and "cpu" in backends):
        return "cpu"
    return found.type


def take_device(device_type: str, rank: int, ranks: int) -> str:
    """Make `rank`'s device of a type the current one, and return the backend by which the ranks of a machine meet.

    They share devices, and meet by gloo, where there are fewer than ranks.
    """
    if device_type == "cpu":
        return "gloo"
    there = torch.accelerator.device_count()
    torch.accelerator.set_device_index(rank % there)
    if there < ranks:
        return f"{device_type}:gloo"
    return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"


def synchronize(device: torch.device) -> None:
    """Wait for all work of an accelerator; of a CPU there is none to wait for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def may_share(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Return whether several ranks of a group may use one accelerator: where gloo connects it, and nothing else."""
    return _backends(group) == {device.type: "gloo"}


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend by which a process group connects devices of each type, e.g. `{"cuda": "nccl"}`."""
    pairs = str(dist.get_backend_config(group)).split(",")
    return dict(pair.split(":") for pair in pairs)


def current_device(device_type: str) -> torch.device:
    """Return the device of a type that this thread uses now."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


def identity(device: torch.device) -> str:
    """Return what tells a device from others of its machine.

    Where a launcher shows each rank one device alone, as Ray and `srun --gpus-per-task=1` do, each calls its own
    cuda:0.
    """
    if device.type == "cpu":
        return str(device)
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(getattr(properties, "uuid", device))
