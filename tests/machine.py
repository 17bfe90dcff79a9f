"""Machines that this one is not: other numbers of cores, in this process and in processes that are started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch

CORES = (1, 2, 8, 64)

MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "neither": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}
"""What a caller of ours may be in."""


@contextmanager
def cores(count: int) -> Iterator[None]:
    """Let this process believe that it may run on so many cores."""
    with (
        mock.patch.object(os, "sched_getaffinity", return_value=set(range(count))),
        mock.patch.object(os, "cpu_count", return_value=count),
    ):
        yield


_SITE = """\
import os
os.sched_getaffinity = lambda pid: set(range({count}))
os.cpu_count = lambda: {count}
"""


def with_cores(folder: Path, count: int) -> dict[str, str]:
    """Return the variables by which a process believes so, and all that it starts; writes to `folder`."""
    (folder / "sitecustomize.py").write_text(_SITE.format(count=count))
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}
