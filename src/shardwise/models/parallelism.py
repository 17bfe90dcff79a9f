"""The calls that make a diffusers model tensor parallel: sharded while it is read, or in memory.

Owns the order of the steps, and what the ranks agree on between them. What is a library's own is left to `options`,
everything about slices to `plan`, `runtime` and `checkpoint`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from shardwise.checkpoint.agree import describe, stamps_of
from shardwise.checkpoint.copies import compare_copies
from shardwise.checkpoint.files import Source, has_manifest, locate
from shardwise.checkpoint.hub import already_here, at_commit, commit_of
from shardwise.checkpoint.index import TensorEntry, read_index
from shardwise.checkpoint.load import KeyReport, load_tensors, match_keys
from shardwise.checkpoint.read import SliceReader
from shardwise.compose import lora
from shardwise.config import ParallelConfig, TensorParallelConfig
from shardwise.errors import ConfigError
from shardwise.models.checking import StaticCheck
from shardwise.models.options import LoadOptions, library_of
from shardwise.models.planning import choose_plan
from shardwise.models.progress import progress_bar
from shardwise.plan.resolve import Plan, ResolvedPlan, resolve
from shardwise.runtime.group import TensorParallelGroup, is_initialized
from shardwise.runtime.modes import in_the_mode_of
from shardwise.runtime.shard import (
    assign,
    fingerprint,
    global_shapes,
    localize,
    shard_in_memory,
)

logger = logging.getLogger(__name__)

_M = TypeVar("_M", bound=nn.Module)


def enable_parallelism(model: _M, *, config: TensorParallelConfig, plan: Plan | None = None) -> _M:
    """Shard a model that is in memory, in place, and return it.

    Each rank holds the full checkpoint in memory until this returns; `from_pretrained(parallel_config=...)`
    of a class of `shardwise.models` reads only the rank's own slices and is the better way to load. Where the
    ranks' values differ, rank 0's win, for whole parameters and buffers as well.

    Args:
        model: Any `nn.Module` with plain parameters; unchanged when the call raises.
        config: The degree, and the ranks. At degree 1 the model is returned as it is.
        plan: Module patterns and styles; by default the config's, or the plan declared for the model's class, or
            one derived from the names of its modules, with a warning.

    Raises:
        ConfigError: `config` is not a tensor parallel configuration.
        PlanError: there is no plan, or it does not fit the model at this degree.
        UnsupportedState: the model is quantized, offloaded, has adapters other than LoRA on Linears, or is sharded
            already.
        GroupError: there is no process group of this size, or this process is not in it.
        RankFailure: another rank failed.
    """
    config = as_config(config)
    if config.tp_degree > 1:
        static = StaticCheck(config)
        with in_the_mode_of(model), lora.set_aside(model) as layers:
            plan = choose_plan(model, config, plan)
            validate = partial(static.before, model)
            group = shard_in_memory(model, config, plan, validate, lora.describe(layers))
            static.after(model)
        lora.shard_layers(layers, group)
        library_of(type(model)).allow(model)
    return model


def as_config(config: Any) -> TensorParallelConfig:
    """Return `config` as a `TensorParallelConfig`; one of diffusers, or one of `tp` alone, means the same.

    Raises:
        ConfigError: it is something else, or its ranks are not all for tensor parallelism.
    """
    if isinstance(config, TensorParallelConfig):
        return config
    if isinstance(config, ParallelConfig):
        if config.size == config.tp:
            return replace(config.tensor, tp_degree=config.tp)
        raise ConfigError(
            f"a model is sharded over some of the ranks of {config}: pass config.tensor_parallel(mesh), "
            "where mesh is that of shardwise.init_mesh(config)"
        )
    config = getattr(config, "tensor_parallel_config", config)
    if type(config).__name__ == "TensorParallelConfig":
        return TensorParallelConfig(config.tp_degree, config.mesh)
    raise ConfigError(f"expected a shardwise.TensorParallelConfig, got {type(config).__name__}")


def is_context_parallel(config: Any) -> bool:
    """Return whether `config` is one of diffusers that asks for context parallelism only."""
    config = getattr(config, "context_parallel_config", None) or config
    return type(config).__name__ == "ContextParallelConfig"


@dataclass(frozen=True)
class Prepared:
    """A model without weights, and what the plan means for it: all that can be checked before reading."""

    model: Any
    plan: ResolvedPlan


def load_sharded(cls: Any, location: Any, config: TensorParallelConfig, kwargs: Mapping[str, Any]) -> Any:
    """Return `cls.from_pretrained(location, **kwargs)` with each rank holding its slices only.

    The ranks agree before the first weight is read: on one commit of a hub repository; that the call, the plan and
    the configuration are sound; that they see the same files. Then each reads at its own speed, and they agree
    that all have. Nothing of it is a collective, so the process group's time-out does not count.

    The class says which library's the options are.

    Raises:
        UnsupportedOption: an option that cannot be honoured; before any file is opened.
        PlanError: the plan does not fit the model at this degree; before any weight is read.
        CheckpointError: files that are missing, invalid, or do not fit the model.
        GroupError, RankFailure: as `enable_parallelism`.
    """
    where = "/".join(str(part) for part in (location, kwargs.get("subfolder")) if part)
    subject, library = f"loading {cls.__name__} from {where}", library_of(cls)
    if not is_initialized():
        prepare(cls, location, config, library.parse(kwargs))  # what is wrong with the call comes first
    group = TensorParallelGroup.of(config)
    patience = timedelta(seconds=config.load_timeout)
    options = _agree_on_options(subject, location, library, kwargs, group)
    with group.agreement(subject) as step:
        ready = prepare(cls, location, config, options)
        model = ready.model
        group.check(config)
        if options.quantization is not None:
            options.quantization.check_device(group.device)
        static = StaticCheck(config, options.example_inputs)
        step.say(static.look(model, ready.plan, mine=group.rank == 0))
        step.must_equal(
            dtype=options.dtype, quantization=options.quantization, **fingerprint(model, ready.plan)
        )
    static.judge(model, step.heard[0])
    neighbours = group.meet("tp")
    source = options.source(location)
    with group.agreement(subject, patience):
        if group.rank == neighbours[0]:
            locate(source)  # downloads what is missing, once for each node
    with group.agreement(subject, patience) as step:
        shapes = global_shapes(model)
        stamps = stamps_of(files := locate(already_here(source)))
        index, keys = match(model, source, files, options)
        step.must_equal(**describe(index, stamps))
    compare_copies(group, subject, patience, {file.name: file for file in (*files, *_configurations(source))})
    with group.agreement(subject, patience), progress_bar(subject, group) as progress:
        reader = SliceReader(group.rank, group.degree, group.device, neighbours, stamps, progress)
        dtype = options.dtype_rule(model)
        tensors, report = load_tensors(model, index, keys, ready.plan, reader, dtype, options.arrival)
    assign(model, tensors)
    localize(model, config, ready.plan, group, shapes)
    static.after(model)
    options.allow(model)
    options.finish(model, location, report)
    _report_keys(subject, keys, group)
    return (model, _loading_info(keys)) if options.output_loading_info else model


def _configurations(source: Source) -> list[Path]:
    """Return the configuration of a model in a local folder; on the hub, one commit is of one."""
    found = Path(source.location, source.subfolder or "", "config.json")
    return [found] if found.is_file() else []


def is_sharded_folder(location: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a location is a local folder with a file for each rank; with the options of `from_pretrained`."""
    return has_manifest(Source(str(location), kwargs.get("subfolder"), kwargs.get("variant")))


def load_whole(cls: Any, location: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the whole model of a folder with a file for each rank, on the CPU; no process group is needed.

    Raises:
        UnsupportedOption: an option that cannot be honoured; before any file is opened.
        CheckpointError: files that are missing, invalid, or do not fit the model.
    """
    options = LoadOptions.parse(kwargs)
    model, source = options.build(cls, location), options.source(location)
    stamps = stamps_of(files := locate(source))
    index, keys = match(model, source, files, options)
    reader = SliceReader(0, 1, torch.device("cpu"), (0,), stamps)
    dtype = options.dtype_rule(model)
    plan = ResolvedPlan(1, (), {})
    tensors, report = load_tensors(model, index, keys, plan, reader, dtype, options.arrival)
    assign(model, tensors)
    options.finish(model, location, report)
    return (model, _loading_info(keys)) if options.output_loading_info else model


def _agree_on_options(
    subject: str,
    location: Any,
    library: type[LoadOptions],
    kwargs: Mapping[str, Any],
    group: TensorParallelGroup,
) -> LoadOptions:
    """Return the options, their revision pinned to the commit that rank 0 sees: a branch may move at any time."""
    with group.agreement(subject) as step:
        options = library.parse(kwargs)
        step.say(commit_of(options.source(location)) if group.rank == 0 else None)
    source = at_commit(options.source(location), step.heard[0])
    return replace(options, hub=source.hub)


def prepare(cls: Any, location: Any, config: TensorParallelConfig, options: LoadOptions) -> Prepared:
    """Return a model without weights and its resolved plan; no weight file is opened.

    Raises:
        CheckpointError: there is no configuration.
        UnsupportedOption: the checkpoint is quantized, or its weights cannot be as asked.
        PlanError: the plan does not fit the model at this degree.
    """
    model = options.build(cls, location)
    resolved = resolve(model, choose_plan(model, config), config.tp_degree, uneven=config.uneven)
    if options.quantization is not None:
        options.quantization.check(resolved)
    return Prepared(model, resolved)


def match(
    model: Any, source: Source, files: Iterable[Path], options: LoadOptions
) -> tuple[dict[str, TensorEntry], KeyReport]:
    """Return the tensors of a checkpoint, and how they meet those of a model.

    Raises:
        CheckpointError: a file is invalid, or weights are missing or do not fit.
    """
    index = options.rename(model, read_index(files))
    keys = match_keys(model, index, getattr(model, "_keys_to_ignore_on_load_unexpected", None))
    keys.raise_for_errors(str(source))
    return index, keys


def _report_keys(subject: str, keys: KeyReport, group: TensorParallelGroup) -> None:
    if group.rank == 0 and keys.unexpected:
        logger.warning(
            "%s: %d keys were not used: %s", subject, len(keys.unexpected), ", ".join(keys.unexpected)
        )
    if group.rank == 0 and keys.computed:
        logger.warning("%s: buffers not in the checkpoint: %s", subject, ", ".join(keys.computed))


def _loading_info(keys: KeyReport) -> dict[str, list[Any]]:
    return {
        "missing_keys": list(keys.computed),
        "unexpected_keys": list(keys.unexpected),
        "mismatched_keys": [],
        "error_msgs": [],
    }
