"""Which components of a pipeline are sharded, by which class, and whether all of it fits, before a weight is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers

from shardwise import encoders, models
from shardwise.checkpoint.configuration import read_object
from shardwise.config import TensorParallelConfig
from shardwise.errors import CheckpointError, ConfigError, UnsupportedOption
from shardwise.models.options import NONE, Refused, library_of, without_refused
from shardwise.models.parallelism import prepare


@dataclass(frozen=True)
class Component:
    """A component that is loaded sharded: its name in the pipeline, its class here, the options of its load."""

    name: str
    cls: Any
    options: Mapping[str, Any]

    def check(self, folder: Path, config: TensorParallelConfig) -> None:
        """Check what can be checked without reading a weight.

        Raises:
            CheckpointError, PlanError, UnsupportedOption: as `from_pretrained` of the class.
        """
        prepare(self.cls, folder, config, library_of(self.cls).parse(self.options))

    def load(self, folder: Path, config: TensorParallelConfig) -> Any:
        """Return the component, of which this rank holds its slices."""
        return self.cls.from_pretrained(folder, parallel_config=config, **self.options)


def shardable(index: Mapping[str, Any], names: Iterable[str] | None = None) -> dict[str, type[Any]]:
    """Return the class of each component that is sharded, by its name in the pipeline.

    Args:
        index: What the pipeline's `model_index.json` says.
        names: Components to shard; by default all whose class has a plan.

    Raises:
        ConfigError: `names` has one that the pipeline lacks, or that cannot be sharded.
    """
    listed = dict(entries(index))
    known = {name: cls for name, entry in listed.items() if (cls := _class_with_a_plan(*entry)) is not None}
    if names is None:
        return known
    chosen = list(names) if not isinstance(names, str) else [names]
    return {name: known.get(name) or _class_without_a_plan(name, listed, known) for name in chosen}


def entries(index: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield name, library and class of each component that a `model_index.json` lists and the pipeline has."""
    for name, entry in index.items():
        if not name.startswith("_") and isinstance(entry, (list, tuple)) and len(entry) == 2 and entry[0]:
            yield name, (entry[0], entry[1])


def concrete(index: Mapping[str, Any], pipeline_class: Any) -> Any:
    """Return the class that loads a pipeline: the one that its folder names, if the caller has named none.

    diffusers 0.42.1 passes over a component that is given to the base class and that is optional in the concrete one,
    such as the transformers of Wan, and loads it once more.
    """
    named = index.get("_class_name")
    found = getattr(diffusers, named, None) if isinstance(named, str) else None
    return found if pipeline_class is diffusers.DiffusionPipeline and found is not None else pipeline_class


def _class_with_a_plan(library: str, class_name: str) -> type[Any] | None:
    ours = {"diffusers": models, "transformers": encoders}.get(library)
    return getattr(ours, class_name) if ours is not None and class_name in ours.FAMILIES else None


def _class_without_a_plan(
    name: str, listed: Mapping[str, tuple[str, str]], known: Mapping[str, object]
) -> type[Any]:
    """Return a class of diffusers whose plan is derived from names, as it was asked for by name."""
    library, class_name = listed.get(name, ("", ""))
    cls = getattr(diffusers, class_name, None) if library == "diffusers" else None
    if not (isinstance(cls, type) and issubclass(cls, diffusers.ModelMixin)):
        what = (
            f"{class_name} of {library}, which has no plan" if class_name else "no component of this pipeline"
        )
        raise ConfigError(f"components: {name} is {what}; those that can be sharded: {', '.join(known)}")
    return getattr(models, class_name)  # type: ignore[no-any-return]


def choose(
    folder: Path,
    index: Mapping[str, Any],
    names: Iterable[str] | None,
    passed: Mapping[str, Any],
    options: Mapping[str, Any],
) -> list[Component]:
    """Return the components that are to be loaded sharded, in the pipeline's order.

    Args:
        folder: The pipeline's folder.
        index: What its `model_index.json` says.
        names: Components to shard; by default all whose class has a plan.
        passed: Arguments of the caller that may be components already made.
        options: Those of `from_pretrained`: `dtype`, `variant` and `quantization_config`.

    Raises:
        CheckpointError: a component is not in the folder, or nothing there is of the variant.
        ConfigError: `names` cannot be honoured.
    """
    variant = options.get("variant")
    if variant and not any(_has_variant(place, variant) for place in (folder, *folder.glob("*/"))):
        raise CheckpointError(f"{folder} has no weights of variant {variant!r}; leave it out for the others")
    for name, entry in entries(index):
        if name not in passed and not _is_there(folder, name):
            raise CheckpointError(
                f"{folder} has no {name}: its model_index.json names a {entry[1]} there; fetch it again or pass {name}="
            )
    classes = {name: cls for name, cls in shardable(index, names).items() if name not in passed}
    return [Component(name, cls, _options(folder, name, cls, options)) for name, cls in classes.items()]


def check_configurations(folder: Path) -> None:
    """Refuse a folder of which the index or a configuration is not what it should be, in words of our own.

    Raises:
        CheckpointError: naming the file.
    """
    for pattern in ("model_index.json", "*/config.json", "*/scheduler_config.json"):
        for file in folder.glob(pattern):
            read_object(file)


def _is_there(folder: Path, name: str) -> bool:
    return (folder / name).is_dir() or (folder / "config.json").exists()  # some keep one component at the top


def _options(folder: Path, name: str, cls: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of one component."""
    subfolder = name if (folder / name).is_dir() else None
    found = {"subfolder": subfolder, "dtype": dtype_of(name, options.get("dtype"))}
    if (variant := options.get("variant")) and _has_variant(folder / (subfolder or ""), variant):
        found["variant"] = variant
    if (quantization := options.get("quantization_config")) is not None:
        is_diffusers = issubclass(cls, diffusers.ModelMixin)
        wanted = quantization._resolve_quant_config(is_diffusers=is_diffusers, module_name=name)
        found |= {"quantization_config": wanted} if wanted is not None else {}
    return found


def dtype_of(name: str, dtype: Any) -> Any:
    """Return the dtype of a component: diffusers takes one for all, or a mapping with `"default"`."""
    return dtype.get(name, dtype.get("default")) if isinstance(dtype, Mapping) else dtype


def _has_variant(folder: Path, variant: str) -> bool:
    """Return whether a component has files of a variant; diffusers takes the others where it has none."""
    return any(True for _ in folder.glob(f"*.{variant}[.-]*"))


REFUSED: Refused = {
    "device_map": (NONE, "each rank has its own device; leave it out"),
    "max_memory": (NONE, "it belongs to device_map; leave it out"),
    "offload_folder": (NONE, "it belongs to device_map; leave it out"),
    "low_cpu_mem_usage": ((True, None), "sharded components are built without weights; leave it out"),
    "use_safetensors": ((True, None), "slices are read from safetensors files; leave it out"),
    "use_flashpack": ((False, None), "a FlashPack file cannot be read in slices; use the safetensors files"),
    "use_onnx": ((False, None), "an ONNX model cannot be sharded; leave it out"),
    "load_connected_pipeline": ((False, None), "load each pipeline with a call of its own"),
}
"""Options of diffusers -> values that ask for nothing, and the reason why others cannot be honoured."""


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options of diffusers that cannot be honoured.

    Raises:
        UnsupportedOption: naming the option and what to do instead.
    """
    quantization = without_refused(options, REFUSED).get("quantization_config")
    if quantization is not None and not hasattr(quantization, "_resolve_quant_config"):
        raise UnsupportedOption(
            f"quantization_config must be a diffusers.PipelineQuantizationConfig, got {type(quantization).__name__}"
        )
