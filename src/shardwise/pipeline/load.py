"""`DiffusionPipeline.from_pretrained`: a pipeline of diffusers with its large components sharded.

Owns the order of the steps and what the ranks agree on between them. What a component is sharded by is in `components`,
how it is read in `models.parallelism`; all else is diffusers' own load, which is given the sharded components.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.checkpoint.copies import compare_copies, files_of
from shardwise.checkpoint.files import Source
from shardwise.checkpoint.hub import at_commit, commit_of
from shardwise.config import ParallelConfig, TensorParallelConfig
from shardwise.errors import CheckpointError, UnsupportedState
from shardwise.models.context import enable_context_parallel
from shardwise.models.options import HUB_OPTIONS, asked_dtype
from shardwise.models.parallelism import as_config
from shardwise.pipeline.components import check_configurations, check_options, choose, concrete, dtype_of
from shardwise.pipeline.finite import watch_finite
from shardwise.pipeline.report import PipelineReport, component_report, held
from shardwise.pipeline.saving import let_save
from shardwise.pipeline.unloading import unload_after_encoding
from shardwise.runtime.branches import denoisers, spread_guidance
from shardwise.runtime.group import TensorParallelGroup
from shardwise.runtime.mesh import init_mesh
from shardwise.runtime.modes import outside_inference_mode
from shardwise.runtime.shard import digest, sharding_of

logger = logging.getLogger(__name__)

INDEX = "model_index.json"


class DiffusionPipeline:
    """Loads pipelines of diffusers with their large components sharded over the ranks."""

    @classmethod
    @outside_inference_mode()
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *,
        parallel_config: Any = None,
        components: Iterable[str] | None = None,
        unload_text_encoders_after_encoding: bool = False,
        pipeline_class: type[Any] = diffusers.DiffusionPipeline,
        **options: Any,
    ) -> Any:
        """Load a pipeline; its transformers and text encoders are read slice by slice, the rest is whole on each rank.

        The result is diffusers' own pipeline, on the rank's device, to be called on every rank with the same arguments.
        Its `parallel_report` says what each rank holds. With more axes than `tp` it has its `parallel_mesh`, and its
        `guidance_spread` says how the calls of the denoiser were shared out.
        Components are read one after another, so that what one needs on the way does not add to another's. At degree 1
        it is diffusers' own load.

        Args:
            pretrained_model_name_or_path: A folder with a `model_index.json`, or the id of a hub repository.
            parallel_config: A `ParallelConfig`, or a `TensorParallelConfig`; without one, the pipeline is loaded whole.
            components: Names of the components to shard; by default all whose class is in `shardwise.models` or
                `shardwise.encoders`.
            unload_text_encoders_after_encoding: Whether text encoders are freed before the first denoising step. A
                later call needs `prompt_embeds`.
            pipeline_class: Class of diffusers to load, where it is not the one that the folder names.
            options: Those of diffusers: components already made, `dtype` (for all, or by component), `variant`,
                `revision`, `quantization_config`, ...

        Raises:
            ConfigError: `components` names one that cannot be sharded.
            UnsupportedOption: an option that cannot be honoured; before any file is opened.
            PlanError: a plan does not fit its component at this degree; before any weight is read.
            CheckpointError: files that are missing, invalid, or do not fit; on every rank.
            UnsupportedState: the pipeline's class does not take a component that was loaded sharded, or a denoiser
                cannot do what the ranks are for.
            GroupError: there is no process group of this size, or this process is not in it.
            RankFailure: another rank failed.

        Its calls raise `NotFinite` before they decode latents that are not finite.
        """
        location = str(pretrained_model_name_or_path)
        parallel, mesh, config = _configs(parallel_config)
        load = _Load(location, config, components, pipeline_class, options)
        alone = mesh is None and config.tp_degree == 1
        pipeline = load.whole() if alone else load.sharded(everyone=mesh is not None)
        watch_finite(pipeline)
        if unload_text_encoders_after_encoding:
            unload_after_encoding(pipeline)
        if mesh is not None:
            pipeline.parallel_mesh = mesh
            for denoiser in denoisers(pipeline) if parallel.ring * parallel.ulysses > 1 else ():
                enable_context_parallel(denoiser, mesh=mesh)
            pipeline.guidance_spread = spread_guidance(pipeline, mesh=mesh)
        return pipeline


def _configs(config: Any) -> tuple[ParallelConfig, DeviceMesh | None, TensorParallelConfig]:
    """Return how ranks share the work of a pipeline, their mesh if there are several axes, and how it is sharded."""
    if not isinstance(config, ParallelConfig):
        return ParallelConfig(), None, TensorParallelConfig() if config is None else as_config(config)
    if config.size == config.tp:
        return config, None, as_config(config)
    mesh = init_mesh(config)
    return config, mesh, config.tensor_parallel(mesh)


@dataclass(frozen=True)
class _Load:
    """One call of `from_pretrained`."""

    location: str
    config: TensorParallelConfig
    names: Iterable[str] | None
    pipeline_class: Any
    options: Mapping[str, Any]

    @cached_property
    def subject(self) -> str:
        """What is being done, for messages."""
        return f"loading the pipeline {self.location}"

    @property
    def patience(self) -> timedelta:
        """How long to wait for the slowest rank to read."""
        return timedelta(seconds=self.config.load_timeout)

    @property
    def dtype(self) -> Any:
        """The dtype that was asked for, by whichever of its two names."""
        return asked_dtype(dict(self.options))

    def whole(self) -> Any:
        """Return the pipeline that diffusers loads, and let it report as one rank."""
        start = time.perf_counter()
        pipeline = self.pipeline_class.from_pretrained(self.location, **self.options)
        seconds = time.perf_counter() - start
        _report(pipeline, [({name: held(m) for name, m in _modules(pipeline).items()}, {}, seconds)])
        return pipeline

    def sharded(self, everyone: bool) -> Any:
        """Return the pipeline with sharded components.

        Args:
            everyone: Whether there are ranks that do not share weights with this one: all of them agree.
        """
        check_options(self.options)
        group = TensorParallelGroup.of(TensorParallelConfig() if everyone else self.config)
        folder = self._fetched(group)
        compare_copies(group, self.subject, self.patience, files_of(folder))
        with group.agreement(self.subject) as step:
            if not everyone:
                group.check(self.config)
            check_configurations(folder)
            index = self.pipeline_class.load_config(folder)
            options = {**self.options, "dtype": self.dtype}
            names = self.names if self.config.tp_degree > 1 else ()
            chosen = choose(folder, index, names, self.options, options)
            for component in chosen:
                component.check(folder, self.config)
            step.must_equal(
                components=", ".join(f"{c.name} ({c.cls.__name__})" for c in chosen),
                model_index=digest(sorted(map(str, index.items()))),
            )
        parts, seconds = {}, {}
        for component in chosen:
            start = time.perf_counter()
            parts[component.name] = component.load(folder, self.config)
            seconds[component.name] = time.perf_counter() - start
        with group.agreement(self.subject, self.patience) as step:
            start = time.perf_counter()
            pipeline = concrete(index, self.pipeline_class).from_pretrained(
                folder, **{**self.options, **parts}
            )
            _check_taken(pipeline, parts)
            self._place(pipeline, group)
            own = {name: held(module) for name, module in _modules(pipeline).items()}
            step.say([own, seconds, time.perf_counter() - start])
        _report(pipeline, step.heard)
        pipeline.register_to_config(_name_or_path=self.location)
        let_save(pipeline, group, self.patience)
        return pipeline

    def _fetched(self, group: TensorParallelGroup) -> Path:
        """Return the pipeline's folder; one that is on the hub is fetched once for each node, at one commit."""
        if Path(self.location).is_dir():
            return Path(self.location)
        hub = {name: self.options[name] for name in HUB_OPTIONS if self.options.get(name) is not None}
        neighbours = group.meet()
        with group.agreement(self.subject) as step:
            source = Source(self.location, hub=hub)
            step.say(commit_of(source, INDEX) if group.rank == 0 else None)
        hub = dict(at_commit(source, step.heard[0]).hub)
        with group.agreement(self.subject, self.patience):
            if group.rank == neighbours[0]:
                self._download(hub)
        with group.agreement(self.subject):
            hub.pop("force_download", None)
            return self._download({**hub, "local_files_only": True})

    def _download(self, hub: Mapping[str, Any]) -> Path:
        try:
            return Path(self.pipeline_class.download(self.location, **{**self.options, **hub}))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.location} cannot be fetched from the hub: {error}") from error

    def _place(self, pipeline: Any, group: TensorParallelGroup) -> None:
        """Put what is whole on the rank's device, and say which components are of another dtype than was asked for."""
        for name, module in _modules(pipeline).items():
            wanted = dtype_of(name, self.dtype)
            if name in self.options and isinstance(wanted, torch.dtype) and wanted != module.dtype:
                logger.warning(
                    "%s was passed in %s and stays so, dtype=%s is for components that are loaded",
                    name, module.dtype, wanted,
                )  # fmt: skip
            if sharding_of(module) is None:
                module.to(group.device)


def _check_taken(pipeline: Any, parts: Mapping[str, Any]) -> None:
    """Raise if a pipeline does not hold the components that it was given: each rank would have a whole one."""
    other = [name for name, part in parts.items() if getattr(pipeline, name, None) is not part]
    if other:
        raise UnsupportedState(
            f"{type(pipeline).__name__} has loaded {', '.join(other)} by itself, in place of the sharded one: pass "
            "components= without it, or pipeline_class= with a class that takes it"
        )


def _modules(pipeline: Any) -> dict[str, Any]:
    """Return the components that have weights."""
    return {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}


def _report(pipeline: Any, heard: list[Any]) -> None:
    """Leave on a pipeline what the ranks said of it: bytes by component, seconds by component, seconds of the rest."""
    reports = [
        component_report(
            name, module, [own[name] for own, _, _ in heard], [times.get(name, 0.0) for _, times, _ in heard]
        )
        for name, module in _modules(pipeline).items()
    ]
    whole = [seconds for _, _, seconds in heard]
    pipeline.parallel_report = PipelineReport(type(pipeline).__name__, tuple(reports), whole)
