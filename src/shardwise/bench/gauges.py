"""What a process uses, as the system counts it: memory, bytes of files, and whether files are in memory. Linux only."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from shardwise.errors import UnsupportedOption

_BLOCK = 16 * 2**20


def require_linux() -> None:
    """Raise where the system does not count what is measured.

    Raises:
        UnsupportedOption: there is no /proc with figures of this process.
    """
    if not all(Path("/proc/self", name).exists() for name in ("io", "status", "clear_refs")):
        raise UnsupportedOption("the benchmark reads memory and bytes from /proc/self, which only Linux has")


def memory(pid: int | str = "self") -> dict[str, int]:
    """Return bytes of a process by the names of /proc/PID/status: RssAnon, RssFile, VmRSS, VmHWM, ..."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(kib) * 1024 for name, kib, _ in fields}


def file_bytes() -> dict[str, int]:
    """Return what this process has asked of files (`rchar`) and had from storage (`read_bytes`) so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    fields = (line.split(": ") for line in lines)
    return {name: int(value) for name, value in fields if name in ("rchar", "read_bytes")}


def settle() -> None:
    """Give back free memory and forget the highest so far, so that new memory shows and nothing older does."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def drop_from_memory(files: Iterable[Path]) -> bool:
    """Drop files from the system's cache; return False if some of them stays there."""
    gone = True
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            gone = gone and not any(_in_memory(descriptor, os.fstat(descriptor).st_size))
        finally:
            os.close(descriptor)
    return gone


def _in_memory(descriptor: int, size: int) -> Iterator[bool]:
    """Yield for some bytes of a file whether they can be had without waiting."""
    for offset in range(0, size, max(1, size // 16)):
        try:
            os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            yield False
        except OSError:  # this file system cannot tell
            yield True
        else:
            yield True


@dataclass
class SequentialRead:
    """The physical floor: seconds in which one process reads files from end to end."""

    files: Sequence[Path]

    def seconds(self) -> float:
        """Read all files into one buffer that is in memory, and return how long that took."""
        room = memoryview(bytearray(_BLOCK))
        start = time.perf_counter()
        for file in self.files:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                while os.readv(descriptor, [room]):
                    pass
            finally:
                os.close(descriptor)
        return time.perf_counter() - start


def require_devices(device: str) -> None:
    """Raise where torch does not have what is to be measured.

    Raises:
        UnsupportedOption: there is no device of this type.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if device != "cpu" and (found is None or found.type != device):
        raise UnsupportedOption(
            f"torch {torch.__version__} finds no {device} device on this machine: its driver, or a build of torch for "
            "it, is missing; leave --device out to measure on CPUs"
        )


def conditions(device: str = "cpu") -> dict[str, Any]:
    """Return when, on what and with what something is measured."""
    names = ("shardwise", "torch", "diffusers", "safetensors")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "load_average": round(os.getloadavg()[0], 2),
            **({} if device == "cpu" else {"devices": _devices(device)}),
        },
        "versions": {
            "python": platform.python_version(),
            "linux": platform.release().partition("-")[0],
            **{name: version(name) for name in names},
        },
    }


def _devices(device: str) -> list[dict[str, Any]]:
    module = torch.get_device_module(device)
    found = [module.get_device_properties(index) for index in range(module.device_count())]
    return [{"name": each.name, "memory_bytes": each.total_memory} for each in found]


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def middle(values: Iterable[float]) -> float:
    """Return the median, with as many digits as a measurement has."""
    return float(f"{median(values):.4g}")


def turns(names: Sequence[str], turn: int) -> list[str]:
    """Return the order in which variants are measured in a turn: each begins, and neighbours change."""
    start = turn % len(names)
    first, *others = [*names[start:], *names[:start]]
    return [first, *(others if turn % 2 == 0 else others[::-1])]
