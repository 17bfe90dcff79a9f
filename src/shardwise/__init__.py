"""Tensor parallelism for any diffusers pipeline: loaded slice by slice, proved against one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.config import TensorParallelConfig
from shardwise.demo import demo_model_path
from shardwise.errors import ShardwiseError
from shardwise.plan.styles import DivideAttributes, PackedColwiseParallel, PackedRowwiseParallel
from shardwise.runtime.placement import placement

if TYPE_CHECKING:
    from shardwise.models.mixin import TensorParallelMixin
    from shardwise.models.parallelism import enable_parallelism

__version__ = "0.1.0"

__all__ = [
    "DivideAttributes",
    "PackedColwiseParallel",
    "PackedRowwiseParallel",
    "ShardwiseError",
    "TensorParallelConfig",
    "TensorParallelMixin",
    "__version__",
    "demo_model_path",
    "enable_parallelism",
    "placement",
]


def __getattr__(name: str) -> Any:
    """Import what belongs to the diffusers side when it is first asked for."""
    if name == "TensorParallelMixin":
        from shardwise.models.mixin import TensorParallelMixin

        return TensorParallelMixin
    if name == "enable_parallelism":
        from shardwise.models.parallelism import enable_parallelism

        return enable_parallelism
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
