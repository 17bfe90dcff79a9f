"""The memory of the devices, and pinned memory of the host.

A block is ordinary memory. Torch is told that it belongs to a device by DLPack, the one way from Python to a tensor
with memory on a device of one's choice. It is free again when torch's storage is gone.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import UUID

import torch
from torch import Tensor

from tests.accelerator.faults import faults

TYPE = "sim"
_DLPACK_CPU, _DLPACK_PRIVATE = 1, 12


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Device:
    """One simulated device.

    Attributes:
        uuid: What tells it from all others, whatever number it goes by.
        capacity: Its bytes; an allocation beyond them is out of memory.
        allocated, peak: Bytes that tensors have now, and the most they had.
    """

    def __init__(self, index: int, number: int) -> None:
        self.index = index
        self.uuid = UUID(int=0x51D0_0000 + number)
        self.capacity = 2**30
        self.allocated = self.peak = 0

    @contextmanager
    def room_for(self, nbytes: int) -> Iterator[None]:
        """Let no more than `nbytes` be allocated beside what is allocated already."""
        before, self.capacity = self.capacity, self.allocated + nbytes
        try:
            yield
        finally:
            self.capacity = before


@dataclass
class Block:
    """Memory that a tensor has been given.

    Attributes:
        bytes: The same memory, as a tensor of the CPU: what kernels of the simulator work on.
        owner: The device, or None for pinned memory of the host.
        size: How many bytes of the device it takes.
        streams: The streams that use it in order: the one it was allocated for, and those that were recorded.
        on_its_way: The streams of copies from it or into it that have not been done.
    """

    bytes: Tensor
    owner: Device | None
    size: int
    streams: set[int] = field(default_factory=set)
    on_its_way: list[int] = field(default_factory=list)


devices: list[Device] = []
blocks: dict[int, Block] = {}
"""By address."""
empty_cpu = torch.empty
"""As it was before `module.install` changed it."""


def allocate(nbytes: int, owner: Device | None, stream: int = 0) -> Tensor:
    """Return fresh bytes in the memory of a device, or pinned ones of the host, each of them 0xFF: floats are NaN.

    Raises:
        torch.OutOfMemoryError: the device has no room for so many.
    """
    if owner is not None:
        if owner.allocated + nbytes > owner.capacity:
            free = owner.capacity - owner.allocated
            raise torch.OutOfMemoryError(
                f"{TYPE}:{owner.index} out of memory: {nbytes} bytes asked for, {free} of {owner.capacity} are free"
            )
        owner.allocated += nbytes
        owner.peak = max(owner.peak, owner.allocated)
    block = Block(empty_cpu(max(nbytes, 1), dtype=torch.uint8, device="cpu").fill_(0xFF), owner, nbytes)
    block.streams.add(stream)
    address = block.bytes.data_ptr()
    one, size = (ctypes.c_int64 * 1)(1), (ctypes.c_int64 * 1)(nbytes or 1)
    kind, index = (_DLPACK_CPU, 0) if owner is None else (_DLPACK_PRIVATE, owner.index)
    described = _DLTensor(address, kind, index, 1, 1, 8, 1, size, one, 0)
    managed = _Managed(described, None, None)
    tensor = torch._C._from_dlpack(_capsule(ctypes.addressof(managed), b"dltensor", None))
    blocks[address] = block
    weakref.finalize(tensor.untyped_storage(), _free, address, managed).atexit = False
    return tensor


def _free(address: int, managed: _Managed) -> None:
    block = blocks.pop(address)
    if block.owner is None:
        return
    block.owner.allocated -= block.size
    if not block.streams.issuperset(block.on_its_way):
        faults.append(
            f"memory of {TYPE}:{block.owner.index} was freed with a copy of another stream on its way"
        )


def block_of(tensor: Tensor) -> Block:
    """Return the memory of a tensor of a device."""
    return blocks[tensor.untyped_storage().data_ptr()]


def host_view(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor of a device as a tensor of the CPU, of the same shape and strides."""
    storage = block_of(tensor).bytes.untyped_storage()
    view = empty_cpu(0, dtype=tensor.dtype, device="cpu")
    return view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def is_pinned(tensor: Tensor) -> bool:
    """Return whether a tensor of the CPU lies in pinned memory."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in blocks


def pinned(tensor: Tensor) -> Tensor:
    """Return a tensor of the CPU in pinned memory."""
    if is_pinned(tensor):
        return tensor
    room = allocate(tensor.nbytes, None)[: tensor.nbytes].view(tensor.dtype)
    return room.as_strided(tensor.shape, tensor.contiguous().stride()).copy_(tensor)
