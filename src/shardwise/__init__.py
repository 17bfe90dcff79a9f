"""Tensor parallelism for any diffusers pipeline: loaded slice by slice, proved against one process."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise.config import ParallelConfig, TensorParallelConfig
from shardwise.demo import demo_model_path
from shardwise.errors import ShardwiseError
from shardwise.plan.styles import (
    DivideAttributes,
    IfPresent,
    PackedColwiseParallel,
    PackedDepthwiseParallel,
    PackedRowwiseParallel,
    SliceExperts,
    SliceInput,
    SliceOutput,
    SliceParameter,
    SumOnce,
)
from shardwise.runtime.branches import spread_guidance
from shardwise.runtime.mesh import init_mesh
from shardwise.runtime.placement import placement

if TYPE_CHECKING:
    from shardwise.models.checking import check
    from shardwise.models.inference import infer
    from shardwise.models.mixin import TensorParallelMixin
    from shardwise.models.parallelism import enable_parallelism
    from shardwise.models.planning import estimate
    from shardwise.verification import verify

__version__ = "0.1.0"

__all__ = [
    "DivideAttributes",
    "IfPresent",
    "PackedColwiseParallel",
    "PackedDepthwiseParallel",
    "PackedRowwiseParallel",
    "ParallelConfig",
    "ShardwiseError",
    "SliceExperts",
    "SliceInput",
    "SliceOutput",
    "SliceParameter",
    "SumOnce",
    "TensorParallelConfig",
    "TensorParallelMixin",
    "__version__",
    "check",
    "demo_model_path",
    "enable_parallelism",
    "estimate",
    "infer",
    "init_mesh",
    "placement",
    "spread_guidance",
    "verify",
]


_ON_DEMAND = {
    "TensorParallelMixin": "shardwise.models.mixin",
    "check": "shardwise.models.checking",
    "enable_parallelism": "shardwise.models.parallelism",
    "estimate": "shardwise.models.planning",
    "infer": "shardwise.models.inference",
    "verify": "shardwise.verification",
}
"""What belongs to the diffusers side, whose import takes seconds -> where it is."""


def __getattr__(name: str) -> Any:
    """Import what belongs to the diffusers side when it is first asked for."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    return getattr(import_module(_ON_DEMAND[name]), name)
