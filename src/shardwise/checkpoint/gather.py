"""Short rows of a file that is in memory, a thousand of them by one system call.

A positional read of a few KiB costs as much as its bytes again. So a window of the file is mapped, and the system
copies the rows out of it. No instruction of this process touches the window: where a page cannot be had, because the
file has shrunk or its storage fails, `process_vm_readv` stops short, and a load instruction would be a SIGBUS.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np

from shardwise.checkpoint.read_plan import Read

WINDOW = 4 * 2**20
"""Bytes of the file that are mapped at once. Windows that no longer fit the cache took up to 1.5 times as long."""

SHORT = 64 * 2**10
"""Rows of this many bytes are read as fast one by one."""

_AT_ONCE = 1024
"""Pieces of one call at most: the system's IOV_MAX."""

_Addresses = np.ndarray[Any, np.dtype[np.uint64]]


def pays(read: Read) -> bool:
    """Return whether a read is of rows so short, and so near to each other, that gathering them is faster."""
    return read.rows > 1 and read.nbytes < SHORT * read.rows * len(read.segments) and 2 * read.pitch <= WINDOW


def gather(descriptor: int, read: Read, target: memoryview) -> bool:
    """Copy the rows of a read into `target`, packed; return False if that cannot be done here, or not to the end.

    What has come until then is in `target`. Reading it all in the ordinary way then says what is wrong, if anything is.
    """
    copy = _process_vm_readv()
    if copy is None:
        return False
    pieces = np.array([start for start, _ in read.segments], np.uint64)
    lengths = np.array([length for _, length in read.segments], np.uint64)
    address, width = _address(target), read.nbytes // read.rows
    rows = max(1, min(WINDOW // read.pitch, _AT_ONCE // len(pieces)))
    for first in range(0, read.rows, rows):
        count = min(rows, read.rows - first)
        starts = np.arange(count, dtype=np.uint64)[:, None] * np.uint64(read.pitch) + pieces
        offset = read.offset + first * read.pitch
        nbytes = read.end - offset if first + count == read.rows else count * read.pitch
        sources = np.stack([starts.ravel(), np.tile(lengths, count)], axis=1)
        if not _copy(copy, (descriptor, offset, nbytes), sources, address + first * width, count * width):
            return False
    return True


def _copy(copy: Any, window: tuple[int, int, int], sources: _Addresses, target: int, nbytes: int) -> bool:
    """Map a window of a file (descriptor, offset, bytes), and copy its `sources` (offset, bytes) to an address."""
    descriptor, offset, size = window
    before = offset % mmap.ALLOCATIONGRANULARITY
    try:
        mapped = mmap.mmap(descriptor, before + size, prot=mmap.PROT_READ, offset=offset - before)
    except (OSError, ValueError):  # not a file that can be mapped, or one that has become too short
        return False
    with mapped:
        sources[:, 0] += np.uint64(_address(memoryview(mapped)) + before)
        into = np.array([target, nbytes], np.uint64)
        got = copy(os.getpid(), into.ctypes.data, 1, sources.ctypes.data, len(sources), 0)
    return bool(got == nbytes)


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def _process_vm_readv() -> Any:
    """Return the system's function, or None where there is none."""
    function = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    if function is not None:
        number, pointer = ctypes.c_ulong, ctypes.c_void_p
        function.argtypes = (ctypes.c_int, pointer, number, pointer, number, number)
        function.restype = ctypes.c_ssize_t
    return function
