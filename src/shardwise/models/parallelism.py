"""The calls that make a diffusers model tensor parallel: sharded while it is read, or in memory.

Owns what is diffusers' own: configs, loading options, legacy keys, dtype rules. Everything about slices and
ranks is left to `plan`, `runtime` and `checkpoint`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from shardwise.checkpoint.agree import describe, stamps_of
from shardwise.checkpoint.files import Source, has_manifest, locate
from shardwise.checkpoint.hub import already_here, at_commit, commit_of
from shardwise.checkpoint.index import TensorEntry, read_index
from shardwise.checkpoint.load import Arrival, DtypeRule, KeyReport, load_tensors, match_keys
from shardwise.checkpoint.read import SliceReader
from shardwise.checkpoint.report import LoadReport
from shardwise.compose import lora
from shardwise.config import ParallelConfig, TensorParallelConfig
from shardwise.errors import CheckpointError, ConfigError, UnsupportedOption
from shardwise.models.checking import StaticCheck
from shardwise.models.lora import allow as allow_lora
from shardwise.models.offload import allow as allow_offload
from shardwise.models.planning import choose_plan
from shardwise.models.progress import progress_bar
from shardwise.models.quantization import Quantization, refusal
from shardwise.models.saving import let_save
from shardwise.plan.meta import meta_parameters
from shardwise.plan.resolve import Plan, ResolvedPlan, resolve
from shardwise.runtime.group import TensorParallelGroup, is_initialized
from shardwise.runtime.shard import (
    assign,
    fingerprint,
    global_shapes,
    localize,
    shard_in_memory,
)

logger = logging.getLogger(__name__)

_M = TypeVar("_M", bound=nn.Module)

_HUB_OPTIONS = ("revision", "cache_dir", "token", "local_files_only", "force_download")


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
        with lora.set_aside(model) as layers:
            plan = choose_plan(model, config, plan)
            validate = partial(static.before, model)
            group = shard_in_memory(model, config, plan, validate, lora.describe(layers))
            static.after(model)
        lora.shard_layers(layers, group)
        let_save(model)
        allow_lora(model)
        allow_offload(model)
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
class LoadOptions:
    """The keyword arguments of diffusers' `from_pretrained`, sorted by what they mean here."""

    dtype: torch.dtype | None = None
    subfolder: str | None = None
    variant: str | None = None
    output_loading_info: bool = False
    quantization: Quantization | None = None
    hub: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of the model's config."""

    @property
    def arrival(self) -> Arrival | None:
        """What is done with slices as they arrive."""
        return self.quantization.arrival if self.quantization is not None else None

    def source(self, location: Any) -> Source:
        """Return the checkpoint that these options mean."""
        return Source(str(location), self.subfolder, self.variant, hub=self.hub)

    @classmethod
    def parse(cls, kwargs: Mapping[str, Any]) -> LoadOptions:
        """Return the options, or refuse those that tensor parallelism cannot honour.

        Raises:
            UnsupportedOption: naming the option and what to do instead.
        """
        rest = dict(kwargs)
        for name, (harmless, reason) in _REFUSED.items():
            value = rest.pop(name, harmless[0])
            if not any(value is allowed for allowed in harmless):
                raise UnsupportedOption(
                    f"{name}={value!r} cannot be combined with tensor parallelism: {reason}"
                )
        old_dtype, dtype = rest.pop("torch_dtype", None), rest.pop("dtype", None)
        dtype = dtype if dtype is not None else old_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise UnsupportedOption(
                f"dtype must be a floating torch.dtype such as torch.bfloat16, got {dtype!r}"
            )
        for name in _WITHOUT_EFFECT:
            rest.pop(name, None)
        wanted = rest.pop("quantization_config", None)
        quantization = Quantization(wanted) if wanted is not None else None
        return cls(
            dtype=quantization.dtype_for(dtype) if quantization is not None else dtype,
            subfolder=rest.pop("subfolder", None),
            variant=rest.pop("variant", None),
            output_loading_info=rest.pop("output_loading_info", False),
            quantization=quantization,
            hub={name: rest.pop(name) for name in _HUB_OPTIONS if rest.get(name) is not None},
            model={name: value for name, value in rest.items() if name not in _HUB_OPTIONS},
        )


_NONE: tuple[Any, ...] = (None,)
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    # option -> (values that ask for nothing, the default first; reason)
    "device_map": (_NONE, "each rank's slices go to that rank's own device; leave it out"),
    "max_memory": (_NONE, "it belongs to device_map; leave it out"),
    "offload_folder": (_NONE, "it belongs to device_map; leave it out"),
    "offload_state_dict": ((None, False), "it belongs to device_map; leave it out"),
    "low_cpu_mem_usage": ((True, None), "each rank builds the model without weights; leave it out"),
    "use_flashpack": ((False, None), "a FlashPack file cannot be read in slices; use the safetensors files"),
    "use_safetensors": ((None, True), "each rank reads slices, which needs safetensors; leave it out"),
    "proxies": (_NONE, "set HTTPS_PROXY in the environment instead"),
    "ignore_mismatched_sizes": (
        (False, None),
        "a weight of another shape would stay uninitialised; use a checkpoint of this configuration",
    ),
}
_WITHOUT_EFFECT = ("disable_mmap", "flashpack_kwargs")  # no file is mapped, and FlashPack is refused


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

    Raises:
        UnsupportedOption: an option that cannot be honoured; before any file is opened.
        PlanError: the plan does not fit the model at this degree; before any weight is read.
        CheckpointError: files that are missing, invalid, or do not fit the model.
        GroupError, RankFailure: as `enable_parallelism`.
    """
    subject = f"loading {cls.__name__} from {location}"
    if not is_initialized():
        prepare(cls, location, config, LoadOptions.parse(kwargs))  # what is wrong with the call comes first
    group = TensorParallelGroup.of(config)
    patience = timedelta(seconds=config.load_timeout)
    options = _agree_on_options(subject, location, kwargs, group)
    with group.agreement(subject) as step:
        ready = prepare(cls, location, config, options)
        model = ready.model
        group.check(config)
        static = StaticCheck(config)
        step.say(static.look(model, ready.plan, mine=group.rank == 0))
        step.must_equal(
            dtype=options.dtype, quantization=options.quantization, **fingerprint(model, ready.plan)
        )
    static.judge(model, step.heard[0])
    neighbours = group.meet()
    source = options.source(location)
    with group.agreement(subject, patience):
        if group.rank == neighbours[0]:
            locate(source)  # downloads what is missing, once for each node
    with group.agreement(subject, patience) as step:
        shapes = global_shapes(model)
        stamps = stamps_of(files := locate(already_here(source)))
        index, keys = match(model, source, files)
        step.must_equal(**describe(index, stamps))
    with group.agreement(subject, patience), progress_bar(subject, group) as progress:
        reader = SliceReader(group.rank, group.degree, group.device, neighbours, stamps, progress)
        dtype = _dtype_rule(model, options.dtype)
        tensors, report = load_tensors(model, index, keys, ready.plan, reader, dtype, options.arrival)
    assign(model, tensors)
    localize(model, config, ready.plan, group, shapes)
    let_save(model)
    static.after(model)
    allow_lora(model)
    allow_offload(model)
    _finish(model, location, options, report)
    _report_keys(subject, keys, group)
    return (model, _loading_info(keys)) if options.output_loading_info else model


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
    model, source = _without_weights(cls, location, options), options.source(location)
    stamps = stamps_of(files := locate(source))
    index, keys = match(model, source, files)
    reader = SliceReader(0, 1, torch.device("cpu"), (0,), stamps)
    dtype = _dtype_rule(model, options.dtype)
    plan = ResolvedPlan(1, (), {})
    tensors, report = load_tensors(model, index, keys, plan, reader, dtype, options.arrival)
    assign(model, tensors)
    _finish(model, location, options, report)
    return (model, _loading_info(keys)) if options.output_loading_info else model


def _finish(model: Any, location: Any, options: LoadOptions, report: LoadReport) -> None:
    """Leave on a model what `from_pretrained` does."""
    vars(model)["load_report"] = report
    model.register_to_config(_name_or_path=str(location))
    if options.quantization is not None:
        options.quantization.finish(model)
    model.eval()


def _agree_on_options(
    subject: str, location: Any, kwargs: Mapping[str, Any], group: TensorParallelGroup
) -> LoadOptions:
    """Return the options, their revision pinned to the commit that rank 0 sees: a branch may move at any time."""
    with group.agreement(subject) as step:
        options = LoadOptions.parse(kwargs)
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
    model = _without_weights(cls, location, options)
    resolved = resolve(model, choose_plan(model, config), config.tp_degree, uneven=config.uneven)
    if options.quantization is not None:
        options.quantization.check(resolved)
    return Prepared(model, resolved)


def _without_weights(cls: Any, location: Any, options: LoadOptions) -> Any:
    try:
        model_config, unused = cls.load_config(
            location, subfolder=options.subfolder, return_unused_kwargs=True, **options.hub, **options.model
        )
    except OSError as error:
        raise CheckpointError(f"the configuration of {location} cannot be read: {error}") from error
    stored = model_config.get("quantization_config")
    if stored is not None:
        reason = refusal(stored) or "use the unquantized weights, and quantization_config=TorchAoConfig(...)"
        raise UnsupportedOption(
            f"{location} is a quantized checkpoint (quantization_config in its config): "
            f"quantized storage cannot be sliced; {reason}"
        )
    with meta_parameters(), _default_dtype(options.dtype):
        model = cls.from_config(copy.deepcopy(model_config), **unused)
    if options.quantization is not None:
        options.quantization.prepare(model)
    return model


def match(model: Any, source: Source, files: Iterable[Path]) -> tuple[dict[str, TensorEntry], KeyReport]:
    """Return the tensors of a checkpoint, and how they meet those of a model.

    Raises:
        CheckpointError: a file is invalid, or weights are missing or do not fit.
    """
    index = read_index(files)
    if hasattr(model, "_fix_state_dict_keys_on_load"):
        model._fix_state_dict_keys_on_load(index)  # diffusers' renames of old attention keys
    keys = match_keys(model, index, getattr(model, "_keys_to_ignore_on_load_unexpected", None))
    keys.raise_for_errors(str(source))
    return index, keys


def _dtype_rule(model: Any, requested: torch.dtype | None) -> DtypeRule:
    """Return diffusers' dtype rule: the requested one, fp32 for modules to be kept so, integers as they are."""
    keep = getattr(model, "_keep_in_fp32_modules", None) or ()
    keep_in_fp32 = {keep} if isinstance(keep, str) else set(keep)

    def rule(name: str, stored: torch.dtype, built: torch.dtype) -> torch.dtype:
        if requested is None or not stored.is_floating_point:
            return built
        return torch.float32 if keep_in_fp32 & set(name.split(".")) else requested

    return rule


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Build with `dtype` as torch's default, as diffusers does: buffers are computed in it."""
    before = torch.get_default_dtype()
    if dtype is not None and dtype.is_floating_point and dtype.itemsize > 1:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


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
