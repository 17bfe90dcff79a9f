"""Operations of torch on tensors of a device: torch's own kernels for CPUs, on the device's memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.accelerator import memory
from tests.accelerator.faults import faults, waits
from tests.accelerator.memory import TYPE, allocate, block_of, devices, host_view
from tests.accelerator.streams import Stream, current_device, current_stream, index_of, lock

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_registered: list[torch.library.Library] = []

VIEWS = (
    "as_strided view _reshape_alias unfold view_as_real view_as_complex "
    "set_.source_Storage set_.source_Storage_storage_offset set_.source_Tensor set_"
)
"""What touches no memory: the kernels of the CPU do for tensors of any device."""

INDEXED = {"index", "index_put_", "_index_put_impl_", "_unsafe_index", "index_put"}
"""What takes indices of the CPU as well, on real devices too."""


def register() -> None:
    """Have torch find the kernels."""
    aten, others = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    _registered.extend((aten, others))
    for name in VIEWS.split():
        aten.impl(name, _on_shapes(getattr(torch.ops.aten, name.split(".")[0]), name), TYPE_KEY)
    for name, kernel in KERNELS.items():
        aten.impl(name, _quietly(kernel), TYPE_KEY)
    others.fallback(_quietly(run), TYPE_KEY)


TYPE_KEY = "PrivateUse1"


def _quietly(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that nothing watches which watches calls of torch, such as a default device."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction(), lock:
            return kernel(*args, **kwargs)

    return call


def _on_shapes(packet: Any, name: str) -> Callable[..., Any]:
    overload = getattr(packet, name.split(".")[1] if "." in name else "default")
    return lambda *args, **kwargs: overload.redispatch(_CPU, *args, **kwargs)


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Do any operation, at once, behind what waits in the device's current stream.

    Raises:
        RuntimeError: its tensors are not all on one device.
    """
    device = device_of(op, args, kwargs)
    current_stream(device).queue.run()
    originals: dict[int, Tensor] = {}

    def to_host(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if value.device.type != TYPE:
            return value
        view = host_view(value)
        originals[id(view)] = value
        held.append(view)
        return view

    held: list[Tensor] = []
    result = op(*_map(to_host, args), **{name: _map(to_host, value) for name, value in kwargs.items()})
    for view in held:
        if view.shape != originals[id(view)].shape:  # an output that was given too small
            resize(originals[id(view)], view.shape)
            host_view(originals[id(view)]).copy_(view)
    by_memory = {view.untyped_storage()._cdata: originals[id(view)] for view in held}

    def from_host(value: Tensor) -> Tensor:
        if id(value) in originals:
            return originals[id(value)]
        same = by_memory.get(value.untyped_storage()._cdata)
        return same if same is not None and same.shape == value.shape else to_device(value, device)

    return _map(from_host, result)


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """Return what an operation is given or gives, with each tensor and device changed."""
    if isinstance(value, Tensor | torch.device):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(_map(change, item) for item in value)
    return value


def device_of(op: Any, args: Any, kwargs: Any) -> int:
    """Return the index of the device that an operation's tensors are on.

    Raises:
        RuntimeError: there are several, or some are on the CPU and are not mere numbers.
    """
    values: list[Any] = []
    _map(values.append, (*args, *kwargs.values()))
    tensors = [value for value in values if isinstance(value, Tensor)]
    if op._schema.name.split("::")[1] in INDEXED:
        tensors = [t for t in tensors if t.device.type == TYPE]
    found = {t.device for t in tensors if t.device.type == TYPE or t.dim() > 0}
    if len(found) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(sorted(map(str, found)))}! (in {op._schema.name})"
        )
    named = [v for v in values if isinstance(v, torch.device) and v.type == TYPE]
    return next((d.index for d in (*found, *named) if d.index is not None), current_device())


def to_device(value: Tensor, index: int) -> Tensor:
    """Return a copy of a tensor of the CPU in new memory of a device, with its strides."""
    extent = (
        0
        if value.numel() == 0
        else 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    )
    result = _new(value.shape, value.stride(), extent, value.dtype, index)
    host_view(result).copy_(value)
    return result


def _new(size: Any, stride: Any, extent: int, dtype: torch.dtype, index: int) -> Tensor:
    flat = allocate(extent * dtype.itemsize, devices[index], current_stream(index).stream_id)
    typed = torch.ops.aten.view.dtype(flat[: extent * dtype.itemsize], dtype)
    return torch.ops.aten.set_.source_Storage_storage_offset(typed, flat.untyped_storage(), 0, size, stride)


def _contiguous(size: Any) -> list[int]:
    strides, step = [0] * len(size), 1
    for dim in reversed(range(len(size))):
        strides[dim], step = step, step * max(size[dim], 1)
    return strides


def empty_strided(
    size: Any,
    stride: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Tensor:
    """Return memory that has not been written to."""
    extent = 0 if math.prod(size) == 0 else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return _new(size, stride, extent, dtype or torch.get_default_dtype(), index_of(device))


def empty(size: Any, *, memory_format: Any = None, **options: Any) -> Tensor:
    """Return memory that has not been written to."""
    if memory_format in (None, torch.contiguous_format, torch.preserve_format):
        return empty_strided(size, _contiguous(size), **options)
    like = memory.empty_cpu(size, device="meta", memory_format=memory_format)
    return empty_strided(size, like.stride(), **options)


def to_copy(
    tensor: Tensor,
    *,
    dtype: Any = None,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
    **options: Any,
) -> Tensor:
    """Copy to another device or dtype; to the host, if it need not be waited for, into pinned memory, as torch does."""
    meta = memory.empty_cpu(0, dtype=dtype or tensor.dtype, device="meta").as_strided(
        tensor.shape, tensor.stride()
    )
    like = torch.empty_like(meta, memory_format=memory_format)
    device = torch.device(device or tensor.device)
    if device.type == "meta":
        return like
    room = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    if device.type == "cpu" and non_blocking:
        room = memory.pinned(room)
    return room.copy_(tensor, non_blocking)


def resize(tensor: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    """Give a tensor another shape, and more memory if it has too little."""
    storage, offset, dtype = tensor.untyped_storage(), tensor.storage_offset(), tensor.dtype
    needed = (offset + math.prod(size)) * dtype.itemsize
    if needed > storage.nbytes():
        more = allocate(needed, devices[tensor.device.index])
        old = block_of(tensor).bytes
        block_of(more).bytes[: len(old)].copy_(old)
        storage = more.untyped_storage()
    return torch.ops.aten.set_.source_Storage_storage_offset(tensor, storage, offset, size, _contiguous(size))


def copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy between devices, or the host and a device: at once, or when the stream comes to it."""
    ends = [tensor for tensor in (target, source) if tensor.device.type == TYPE]
    queue = current_stream(ends[0].device.index).queue
    if len(ends) == 2:
        current_stream(source.device.index).queue.run()
        queue.run()
        host_view(target).copy_(host_view(source))
        return target
    on_host = source if ends[0] is target else target
    if non_blocking and memory.is_pinned(on_host) and on_host.is_contiguous():
        queue.put(_later(source, target, current_stream(ends[0].device.index)))
        return target
    if non_blocking:
        faults.append(
            f"a copy from {source.device} to {target.device} of shape {tuple(source.shape)} was to run beside other "
            "work, and blocks: its memory on the host is not pinned, or not contiguous"
        )
    waits.copies += 1
    queue.run()
    ours = [host_view(tensor) if tensor.device.type == TYPE else tensor for tensor in (target, source)]
    ours[0].copy_(ours[1])
    return target


def _later(source: Tensor, target: Tensor, stream: Stream) -> Callable[[], None]:
    """Return a copy for the queue of a stream. Until it is done the target's bytes are 0xFF, wherever the target is."""
    if target.device.type == TYPE:
        block, to, origin = block_of(target), host_view(target), source
        # A cast is done on the device, which needs memory for it.
        owner = devices[stream.device_index]
        room = [allocate(source.nbytes, owner)] if source.dtype != target.dtype else []
    else:
        block, to, origin, room = block_of(source), target, host_view(source), []
    to.view(-1).view(torch.uint8).fill_(0xFF) if to.is_contiguous() else to.fill_(math.nan)
    block.on_its_way.append(stream.stream_id)

    def work() -> None:
        to.copy_(origin)
        block.on_its_way.remove(stream.stream_id)
        room.clear()

    return work


def value_of(tensor: Tensor) -> Any:
    """Return the number in a tensor, for which the host waits."""
    waits.values += 1
    current_stream(tensor.device.index).queue.run()
    return host_view(tensor).item()


def record_stream(tensor: Tensor, stream: Any) -> None:
    """Let a stream use memory that was allocated for another: it is not used anew before the stream is done."""
    block_of(tensor).streams.add(stream.stream_id)


def _convolution(*args: Any) -> Tensor:
    return run(torch.ops.aten.convolution.default, *args)


def _convolution_backward(gradient: Tensor, source: Tensor, weight: Tensor, *args: Any) -> Any:
    *options, mask = args
    return run(torch.ops.aten.convolution_backward.default, gradient, source, weight, None, *options, mask)


KERNELS: dict[str, Callable[..., Any]] = {
    "empty.memory_format": empty,
    "empty_strided": empty_strided,
    "_to_copy": to_copy,
    "resize_": resize,
    "_copy_from": copy,
    "_local_scalar_dense": value_of,
    "record_stream": record_stream,
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
    # Plain mathematics, of the ways to compute attention.
    "_fused_sdp_choice": lambda *args, **kwargs: 0,
}
