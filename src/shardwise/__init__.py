"""Tensor parallelism for any diffusers pipeline: loaded slice by slice, proved against one process."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise.demo import demo_model_path
from shardwise.errors import ShardwiseError

if TYPE_CHECKING:
    from shardwise.config import ParallelConfig, TensorParallelConfig
    from shardwise.launch import init_ranks
    from shardwise.models.checking import check
    from shardwise.models.context import enable_context_parallel
    from shardwise.models.decode import spread_decode
    from shardwise.models.inference import infer
    from shardwise.models.mixin import TensorParallelMixin
    from shardwise.models.parallelism import enable_parallelism
    from shardwise.models.planning import estimate
    from shardwise.pipeline import DiffusionPipeline
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
    from shardwise.runtime.replicas import split_prompts, spread_prompts
    from shardwise.verification import verify

__version__ = "0.1.0"

__all__ = [
    "DiffusionPipeline",
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
    "enable_context_parallel",
    "enable_parallelism",
    "estimate",
    "infer",
    "init_mesh",
    "init_ranks",
    "placement",
    "split_prompts",
    "spread_decode",
    "spread_guidance",
    "spread_prompts",
    "verify",
]


_ON_DEMAND = {
    "DiffusionPipeline": "shardwise.pipeline",
    "DivideAttributes": "shardwise.plan.styles",
    "IfPresent": "shardwise.plan.styles",
    "PackedColwiseParallel": "shardwise.plan.styles",
    "PackedDepthwiseParallel": "shardwise.plan.styles",
    "PackedRowwiseParallel": "shardwise.plan.styles",
    "ParallelConfig": "shardwise.config",
    "SliceExperts": "shardwise.plan.styles",
    "SliceInput": "shardwise.plan.styles",
    "SliceOutput": "shardwise.plan.styles",
    "SliceParameter": "shardwise.plan.styles",
    "SumOnce": "shardwise.plan.styles",
    "TensorParallelConfig": "shardwise.config",
    "TensorParallelMixin": "shardwise.models.mixin",
    "check": "shardwise.models.checking",
    "enable_context_parallel": "shardwise.models.context",
    "enable_parallelism": "shardwise.models.parallelism",
    "estimate": "shardwise.models.planning",
    "infer": "shardwise.models.inference",
    "init_mesh": "shardwise.runtime.mesh",
    "init_ranks": "shardwise.launch",
    "placement": "shardwise.runtime.placement",
    "split_prompts": "shardwise.runtime.replicas",
    "spread_decode": "shardwise.models.decode",
    "spread_guidance": "shardwise.runtime.branches",
    "spread_prompts": "shardwise.runtime.replicas",
    "verify": "shardwise.verification",
}
"""Public name -> where it is. Importing torch takes seconds, and a launcher of ranks needs none of it."""


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is first asked for."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    return getattr(import_module(_ON_DEMAND[name]), name)
