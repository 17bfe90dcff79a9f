"""A backend of `torch.distributed` for the device: gloo, on the memory of the device."""

from __future__ import annotations

import warnings
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from tests.accelerator import kernels
from tests.accelerator.memory import TYPE

BACKEND = "simccl"

SENDING = (
    "all_reduce",
    "broadcast",
    "send",
    "recv",
    "all_gather_single",
    "all_gather",
    "reduce",
    "isend",
    "irecv",
)


def register() -> None:
    """Have torch know the backend."""

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    # For the CPU as well, but only for what this module sends: tensors of the CPU are refused, as NCCL does.
    dist.Backend.register_backend(BACKEND, create, devices=["cpu", TYPE])
    for name in SENDING:
        setattr(dist, name, _of_the_device(getattr(dist, name)))
    library = torch.library.Library("c10d", "IMPL")
    kernels._registered.append(library)
    warnings.filterwarnings(
        "ignore", message="Warning only once for all operators"
    )  # those of C++ are replaced
    for name in (n for n in torch._C._dispatch_get_all_op_names() if n.startswith("c10d::")):
        op = getattr(torch.ops.c10d, name.removeprefix("c10d::")).default
        kernel = kernels._quietly(lambda *args, op=op, **kwargs: kernels.run(op, *args, **kwargs))
        library.impl(name.removeprefix("c10d::"), kernel, kernels.TYPE_KEY, allow_override=True)


def _of_the_device(send: Any) -> Any:
    @wraps(send)
    def checked(tensor: Any, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        given = [value for value in (tensor, *args) if isinstance(value, torch.Tensor)]
        if dist.get_backend(group) == BACKEND and any(t.device.type != TYPE for t in given):
            raise RuntimeError(f"{send.__name__}: {BACKEND} connects no tensors of {given[0].device}")
        return send(tensor, *args, group=group, **kwargs)

    return checked
