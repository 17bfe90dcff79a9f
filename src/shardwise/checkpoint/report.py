"""What a load did: how much it read, how long that took, and what it needed beside the tensors themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LoadReport:
    """What one rank read to load its part of a model."""

    bytes_read: int
    """Bytes of tensor data, as planned: each byte of the rank's slices once."""
    file_bytes: int
    """Bytes of tensor data in the whole checkpoint."""
    seconds: float
    """From planning the reads to the last byte in its place."""
    read_seconds: float = 0.0
    """In reads, added up over the threads."""
    convert_seconds: float = 0.0
    """In casts and in copies to the device, or waiting for them, added up over the threads."""
    threads: int = 1
    staging_bytes: int = 0
    """Bytes of the buffers through which casts and copies to a device go; 0 where files are read into the tensors."""
    cold: bool = False
    """Whether some of it was not in the system's cache, or could not be known to be."""

    @property
    def gb_per_s(self) -> float:
        """Bytes read over seconds, in 1e9 bytes per second."""
        return self.bytes_read / self.seconds / 1e9 if self.seconds else 0.0

    def __str__(self) -> str:
        """Return e.g. `1.24 of 3.62 GB in 0.40 s (3.10 GB/s, warm, 2 threads, 2.1 MB of staging)`."""
        state = "cold" if self.cold else "warm"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return (
            f"{self.bytes_read / 1e9:.2f} of {self.file_bytes / 1e9:.2f} GB in {self.seconds:.2f} s "
            f"({self.gb_per_s:.2f} GB/s, {state}, {threads}, {self.staging_bytes / 1e6:.1f} MB of staging)"
        )


def total(reports: Sequence[LoadReport]) -> LoadReport:
    """Return what several loads did, one after another."""
    return LoadReport(
        bytes_read=sum(report.bytes_read for report in reports),
        file_bytes=sum(report.file_bytes for report in reports),
        seconds=sum(report.seconds for report in reports),
        read_seconds=sum(report.read_seconds for report in reports),
        convert_seconds=sum(report.convert_seconds for report in reports),
        threads=max(report.threads for report in reports),
        staging_bytes=max(report.staging_bytes for report in reports),
        cold=any(report.cold for report in reports),
    )
