"""Whole pipelines: the large components sharded, the others whole on each rank, one report of both.

`load` says what is loaded how, `report` what each rank holds of it; `saving` and `unloading` are what a pipeline of
several ranks does otherwise than one of diffusers.
"""

from shardwise.pipeline.load import DiffusionPipeline
from shardwise.pipeline.report import ComponentReport, PipelineReport

__all__ = ["ComponentReport", "DiffusionPipeline", "PipelineReport"]
