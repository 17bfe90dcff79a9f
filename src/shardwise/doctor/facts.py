"""What a rank finds out about itself and its machine: plain data, for the others to compare."""

from __future__ import annotations

import platform
import shutil
import tempfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from huggingface_hub.constants import HF_HUB_CACHE
from torch.cuda import nccl

from shardwise.checkpoint.copies import files_of
from shardwise.doctor.network import network
from shardwise.launch.machine import cores
from shardwise.runtime.group import TensorParallelGroup

PACKAGES = ("torch", "diffusers", "transformers", "shardwise")
_CGROUP = Path("/sys/fs/cgroup")


def facts(group: TensorParallelGroup, model: str | None) -> dict[str, Any]:
    """Return what this rank has to say of itself; sizes are in bytes.

    Args:
        group: All ranks.
        model: A folder that all ranks should have.
    """
    return {
        **network(group.rank, group.node),
        "versions": versions(),
        "device": device(group.device),
        "memory": {"available": available(), "total": psutil.virtual_memory().total},
        "disk": {name: free(path) for name, path in _places().items()},
        "cores": cores(),
        "files": sorted(files_of(Path(model))) if model is not None and Path(model).is_dir() else None,
    }


def versions() -> dict[str, str]:
    """Return the versions of what ranks run."""
    found = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
    with suppress(AttributeError, RuntimeError):  # a torch without it
        if dist.is_nccl_available():
            found["NCCL"] = ".".join(map(str, nccl.version()))  # type: ignore[no-untyped-call]
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def device(device: torch.device) -> dict[str, Any]:
    """Return the rank's device, and what tells it from others."""
    if device.type == "cpu":
        return {"name": str(device), "model": platform.machine(), "uuid": None, "free": None, "total": None}
    module = torch.get_device_module(device)
    properties, (free_bytes, total) = module.get_device_properties(device), module.mem_get_info(device)
    uuid = str(getattr(properties, "uuid", "")) or None
    return {"name": str(device), "model": properties.name, "uuid": uuid, "free": free_bytes, "total": total}


def available() -> int:
    """Return the memory that can still be had: of the machine, or of the container that this is."""
    machine: int = psutil.virtual_memory().available
    try:
        most, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # not Linux, or no limit
        return machine
    return max(0, min(machine, most - used))


def _places() -> dict[str, Path]:
    return {
        "temporary folder": Path(tempfile.gettempdir()),
        "hub cache": Path(HF_HUB_CACHE),
        "/dev/shm": Path("/dev/shm"),
    }


def free(path: Path) -> int | None:
    """Return the free bytes of a folder's file system, or of that which it would be made in; None without either."""
    there = next((place for place in (path, *path.parents) if place.is_dir()), None)
    if there is None or (path.parts[:2] == ("/", "dev") and there != path):
        return None
    return shutil.disk_usage(there).free
