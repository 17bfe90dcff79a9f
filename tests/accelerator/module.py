"""`install()`: the device's name, its module `torch.sim`, and what torch has for accelerators in general."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # looks at what is replaced here, so before it is
from torch.utils import backend_registration

from tests.accelerator import collectives, kernels, memory, streams
from tests.accelerator.memory import TYPE, Device, devices


def install(count: int = 2, first: int = 0) -> None:
    """Make the simulated device the accelerator of this process.

    Args:
        count: How many devices it sees.
        first: Which device of the machine is its number 0: where each process is shown one, all call it 0.
    """
    if devices:
        return
    devices.extend(Device(index, first + index) for index in range(count))
    backend_registration._setup_privateuseone_for_python_backend(TYPE, _module())
    kernels.register()
    pins = torch.library.Library("aten", "IMPL")
    kernels._registered.append(pins)
    pins.impl("is_pinned", lambda tensor, device=None: memory.is_pinned(tensor), "CPU")
    pins.impl("_pin_memory", lambda tensor, device=None: memory.pinned(tensor), "CPU")
    torch.empty = _empty
    torch.Tensor.to = _to_device
    torch.Tensor.data = property(_DATA.__get__, _set_data)
    torch._has_compatible_shallow_copy_type = lambda old, new: True
    torch.storage._StorageBase.clone, torch.storage._StorageBase.to = _clone, _to
    torch.Stream, torch.Event, torch.Generator = streams.Stream, streams.Event, Generator
    for name, function in _OF_ACCELERATORS.items():
        setattr(torch._C, f"_accelerator_{name}", function)
    collectives.register()


@wraps(torch.empty)
def _empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
    room = memory.empty_cpu(*size, **options)
    return memory.pinned(room) if pin_memory else room


_TO, _DATA = torch.Tensor.to, torch.Tensor.data


@wraps(_TO)
def _to_device(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Take a device without a number for the current one; torch itself takes one made in Python for the first."""
    args = tuple(_numbered(value) for value in args)
    return _TO(tensor, *args, **{name: _numbered(value) for name, value in options.items()})


def _numbered(value: Any) -> Any:
    unclear = value in (TYPE, torch.device(TYPE)) if isinstance(value, str | torch.device) else False
    return torch.device(TYPE, streams.current_device()) if unclear else value


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor, which stays the same object, memory of another device: torch does so among those that it knows."""
    if tensor.device.type == value.device.type:
        _DATA.__set__(tensor, value)
    else:
        torch._C._swap_tensor_impl(tensor, value.detach().requires_grad_(tensor.requires_grad))


_OF_STORAGES = {name: getattr(torch.storage._StorageBase, name) for name in ("clone", "to")}


def _clone(storage: Any) -> Any:
    """Return a copy of a tensor's memory, for `deepcopy`."""
    return _copied(storage, storage.device) if storage.device.type == TYPE else _OF_STORAGES["clone"](storage)


def _to(storage: Any, *, device: Any, non_blocking: bool = False) -> Any:
    """Return a copy of a tensor's memory on a device, for `torch.load`."""
    if TYPE in (storage.device.type, torch.device(device).type):
        return _copied(storage, device)
    return _OF_STORAGES["to"](storage, device=device, non_blocking=non_blocking)


def _copied(storage: Any, device: Any) -> Any:
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return flat.to(device, copy=True).untyped_storage()


class _KindOfGenerator(type(torch.Generator)):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _CPUGenerator)


_CPUGenerator = torch.Generator


class Generator(_CPUGenerator, metaclass=_KindOfGenerator):
    """Torch's generator, also for a device: it draws as that of the CPU does, and is not of the CPU."""

    def __new__(cls, device: Any = "cpu") -> Any:
        asked = torch.device(device)
        generator = super().__new__(cls, "cpu" if asked.type == TYPE else asked)
        if asked.type == TYPE:
            generator._device = torch.device(TYPE, streams.index_of(asked))
        return generator

    def __init__(self, device: Any = "cpu") -> None:
        pass

    @property
    def device(self) -> torch.device:
        """Where it draws."""
        return getattr(self, "_device", None) or torch.device("cpu")


def _of(device: Any) -> Device:
    return devices[streams.index_of(device)]


def _free_and_total(device: Any = None) -> tuple[int, int]:
    return _of(device).capacity - _of(device).allocated, _of(device).capacity


def _reset_peak(device: Any = None) -> None:
    _of(device).peak = _of(device).allocated


def _stats(device: Any = None) -> dict[str, Any]:
    bytes_ = {"current": _of(device).allocated, "peak": _of(device).peak, "allocated": 0, "freed": 0}
    return {"allocated_bytes": {"all": bytes_}, "reserved_bytes": {"all": bytes_}}


def _exchange(device: int) -> int:
    before = streams.current_device()
    if device >= 0:
        streams.set_device(device)
    return before


def _in_stream(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else stream


_OF_ACCELERATORS = {
    "getDeviceIndex": streams.current_device,
    "setDeviceIndex": streams.set_device,
    "exchangeDevice": _exchange,
    "maybeExchangeDevice": _exchange,
    "getStream": streams.current_stream,
    "setStream": streams.set_stream,
    "synchronizeDevice": streams.synchronize,
    "isAllocatorInitialized": lambda: True,
    "emptyCache": lambda: None,
    "emptyHostCache": lambda: None,
    "getDeviceStats": _stats,
    "getMemoryInfo": _free_and_total,
    "resetPeakStats": _reset_peak,
    "resetAccumulatedStats": lambda device: None,
}
"""What `torch.accelerator` asks of C++, which can do nothing for a device made in Python."""


def _module() -> ModuleType:
    """Return `torch.sim`, as `torch.cuda` and `torch.xpu` are."""
    module = ModuleType(f"torch.{TYPE}")
    vars(module).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: len(devices),
        current_device=streams.current_device,
        set_device=streams.set_device,
        get_device_properties=lambda device=None: SimpleNamespace(
            name="simulated", uuid=_of(device).uuid, total_memory=_of(device).capacity
        ),
        get_device_name=lambda device=None: "simulated",
        synchronize=streams.synchronize,
        device=lambda device: torch.accelerator.device_index(streams.index_of(device)),
        Stream=streams.Stream,
        Event=streams.Event,
        stream=_in_stream,
        current_stream=streams.current_stream,
        set_stream=streams.set_stream,
        empty_cache=lambda: None,
        mem_get_info=_free_and_total,
        memory_allocated=lambda device=None: _of(device).allocated,
        max_memory_allocated=lambda device=None: _of(device).peak,
        reset_peak_memory_stats=_reset_peak,
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )
    return module
