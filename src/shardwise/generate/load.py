"""The pipeline that a request means, on this rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import diffusers
import torch
import transformers

from shardwise.config import ParallelConfig, TensorParallelConfig
from shardwise.errors import CheckpointError, UnsupportedOption
from shardwise.generate.request import Request
from shardwise.models.decode import spread_decode
from shardwise.pipeline import DiffusionPipeline
from shardwise.pipeline.components import shardable
from shardwise.runtime.group import TensorParallelGroup


def pipeline_class(location: str) -> tuple[type[Any], dict[str, Any]]:
    """Return the class of diffusers that a pipeline's folder or repository names, and what its index says.

    Raises:
        CheckpointError: there is no such folder, or it is no pipeline's.
    """
    try:
        index = diffusers.DiffusionPipeline.load_config(location)
        name = index["_class_name"]
    except (OSError, ValueError, KeyError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(
            f"{location} is no pipeline of diffusers, or cannot be read: {reason}"
        ) from error
    cls = getattr(diffusers, name, None)
    if cls is None:
        raise CheckpointError(
            f"{location} is a {name}, which diffusers {diffusers.__version__} does not have"
        )
    return cls, index


def load(request: Request, group: TensorParallelGroup) -> Any:
    """Return the pipeline, on this rank's device, with all that the request wants of it.

    Raises:
        CheckpointError: files are missing, invalid, or do not fit; on every rank.
        ShardwiseError: it cannot be sharded, or quantized, or adapted, as was asked.
    """
    parallel = ParallelConfig(
        tp=request.tp,
        cfg=request.cfg,
        dp=request.dp,
        ulysses=request.ulysses,
        tensor=TensorParallelConfig(load_timeout=request.load_timeout),
    )
    with _without_bars():
        pipeline = DiffusionPipeline.from_pretrained(
            request.location,
            parallel_config=parallel,
            components=request.components,
            unload_text_encoders_after_encoding=request.unload_text_encoders,
            dtype=getattr(torch, request.dtype or ("float32" if group.device.type == "cpu" else "bfloat16")),
            **_quantization(request),
        )
    if group.degree == 1:
        pipeline.to(group.device)
    if request.lora is not None:
        pipeline.load_lora_weights(request.lora)
    if request.spread_decode:
        pipeline.vae.enable_tiling()
        alone = request.dp == 1  # replicas decode pictures of their own
        config = (
            TensorParallelConfig(group.degree) if alone else parallel.tensor_parallel(pipeline.parallel_mesh)
        )
        spread_decode(pipeline.vae, config=config, timeout=request.timeout)
    return pipeline


def _quantization(request: Request) -> dict[str, Any]:
    """Return the option that quantizes the pipeline's transformers, if that was asked for.

    Raises:
        UnsupportedOption: torchao is not installed.
    """
    if request.quantize is None:
        return {}
    try:
        from torchao.quantization import Int8WeightOnlyConfig
    except ImportError as error:
        raise UnsupportedOption("--quantize int8 needs torchao: pip install 'shardwise[quantize]'") from error
    _, index = pipeline_class(request.location)
    names = [name for name, cls in shardable(index).items() if issubclass(cls, diffusers.ModelMixin)]
    mapping = {name: diffusers.TorchAoConfig(Int8WeightOnlyConfig()) for name in names}
    return {"quantization_config": diffusers.PipelineQuantizationConfig(quant_mapping=mapping)}


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep diffusers and transformers from showing bars of their own beside the one display."""
    libraries = (diffusers.utils.logging, transformers.utils.logging)
    for library in libraries:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in libraries:
            library.enable_progress_bar()
