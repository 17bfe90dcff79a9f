"""What the caller of `from_pretrained` asks for, and what the library that has the model class does about it.

The options of a load know what is diffusers' own: configurations, legacy keys, dtype rules. Those of another library
are a subclass (`shardwise.encoders.options`); the load itself is the same (`models.parallelism`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch

from shardwise.checkpoint.files import Source
from shardwise.checkpoint.index import TensorEntry
from shardwise.checkpoint.load import Arrival, DtypeRule
from shardwise.checkpoint.report import LoadReport
from shardwise.errors import CheckpointError, UnsupportedOption
from shardwise.models.lookup import example_inputs as known_inputs
from shardwise.models.lora import allow as allow_lora
from shardwise.models.offload import allow as allow_offload
from shardwise.models.quantization import Quantization, refusal
from shardwise.models.saving import STEM, let_save
from shardwise.plan.meta import meta_parameters

HUB_OPTIONS = ("revision", "cache_dir", "token", "local_files_only", "force_download")

Refused = Mapping[str, tuple[tuple[Any, ...], str]]
"""Option -> values that ask for nothing, the default first; and the reason why others cannot be honoured."""


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

    stem: ClassVar[str] = STEM
    """Name of the weight files without suffixes."""

    @property
    def arrival(self) -> Arrival | None:
        """What is done with slices as they arrive."""
        return self.quantization.arrival if self.quantization is not None else None

    def source(self, location: Any) -> Source:
        """Return the checkpoint that these options mean."""
        return Source(str(location), self.subfolder, self.variant, self.stem, self.hub)

    @classmethod
    def parse(cls, kwargs: Mapping[str, Any]) -> Self:
        """Return the options, or refuse those that tensor parallelism cannot honour.

        Raises:
            UnsupportedOption: naming the option and what to do instead.
        """
        rest = without_refused(kwargs, _REFUSED)
        dtype = asked_dtype(rest)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise UnsupportedOption(
                f"dtype must be a floating torch.dtype such as torch.bfloat16, got {dtype!r}"
            )
        for name in _WITHOUT_EFFECT:
            rest.pop(name, None)
        wanted = rest.pop("quantization_config", None)
        quantization = Quantization(wanted) if wanted is not None else None
        dtype = quantization.dtype_for(dtype) if quantization is not None else dtype
        return cls.sorted(dtype, rest, quantization)

    @classmethod
    def sorted(
        cls, dtype: torch.dtype | None, rest: dict[str, Any], quantization: Quantization | None = None
    ) -> Self:
        """Return the options that both libraries have, and those that are left."""
        return cls(
            dtype=dtype,
            subfolder=rest.pop("subfolder", None),
            variant=rest.pop("variant", None),
            output_loading_info=rest.pop("output_loading_info", False),
            quantization=quantization,
            hub={name: rest.pop(name) for name in HUB_OPTIONS if rest.get(name) is not None},
            model={name: value for name, value in rest.items() if name not in HUB_OPTIONS},
        )

    def build(self, cls: Any, location: Any) -> Any:
        """Return a model without weights.

        Raises:
            CheckpointError: there is no configuration.
            UnsupportedOption: the checkpoint is quantized.
        """
        try:
            model_config, unused = cls.load_config(
                location, subfolder=self.subfolder, return_unused_kwargs=True, **self.hub, **self.model
            )
        except OSError as error:
            raise CheckpointError(f"the configuration of {location} cannot be read: {error}") from error
        refuse_quantized(location, model_config.get("quantization_config"))
        with meta_parameters(), default_dtype(self.dtype):
            model = cls.from_config(copy.deepcopy(model_config), **unused)
        if self.quantization is not None:
            self.quantization.prepare(model)
        return model

    def example_inputs(self, model: Any) -> dict[str, Any] | None:
        """Return inputs to check a plan with, or None if there are none for a model's class."""
        return known_inputs(model)

    def rename(self, model: Any, index: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
        """Return a checkpoint's tensors under the names that the model has for them."""
        if hasattr(model, "_fix_state_dict_keys_on_load"):
            model._fix_state_dict_keys_on_load(index)  # diffusers' renames of old attention keys
        return index

    def dtype_rule(self, model: Any) -> DtypeRule:
        """Return diffusers' dtype rule: the requested one, fp32 for modules to be kept so, integers as they are."""
        requested, keep = self.dtype, getattr(model, "_keep_in_fp32_modules", None) or ()
        keep_in_fp32 = {keep} if isinstance(keep, str) else set(keep)

        def rule(name: str, stored: torch.dtype, built: torch.dtype) -> torch.dtype:
            if requested is None or not stored.is_floating_point:
                return built
            return torch.float32 if keep_in_fp32 & set(name.split(".")) else requested

        return rule

    @classmethod
    def allow(cls, model: Any) -> None:
        """Give a sharded model the calls of diffusers that work on its slices."""
        let_save(model)
        allow_lora(model)
        allow_offload(model)

    def finish(self, model: Any, location: Any, report: LoadReport) -> None:
        """Leave on a model what `from_pretrained` does."""
        vars(model)["load_report"] = report
        model.register_to_config(_name_or_path=str(location))
        if self.quantization is not None:
            self.quantization.finish(model)
        model.eval()


def library_of(cls: type) -> type[LoadOptions]:
    """Return what is a library's own about the models of a class, which says so if it is not diffusers."""
    return getattr(cls, "library", LoadOptions)


def without_refused(kwargs: Mapping[str, Any], refused: Refused) -> dict[str, Any]:
    """Return the options without those that may only have values that ask for nothing.

    Raises:
        UnsupportedOption: naming the option and what to do instead.
    """
    rest = dict(kwargs)
    for name, (harmless, reason) in refused.items():
        value = rest.pop(name, harmless[0])
        if not any(value is allowed for allowed in harmless):
            raise UnsupportedOption(f"{name}={value!r} cannot be combined with tensor parallelism: {reason}")
    return rest


def asked_dtype(rest: dict[str, Any]) -> Any:
    """Take `dtype`, or what it was called before, out of the options."""
    old_dtype, dtype = rest.pop("torch_dtype", None), rest.pop("dtype", None)
    return dtype if dtype is not None else old_dtype


def refuse_quantized(location: Any, stored: Any) -> None:
    """Refuse a checkpoint whose configuration says that its weights are quantized.

    Raises:
        UnsupportedOption: it does.
    """
    if stored is not None:
        reason = refusal(stored) or "use the unquantized weights, and quantization_config=TorchAoConfig(...)"
        raise UnsupportedOption(
            f"{location} is a quantized checkpoint (quantization_config in its config): "
            f"quantized storage cannot be sliced; {reason}"
        )


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Build with `dtype` as torch's default, as diffusers does: buffers are computed in it."""
    before = torch.get_default_dtype()
    if dtype is not None and dtype.is_floating_point and dtype.itemsize > 1:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


NONE: tuple[Any, ...] = (None,)
PLACED: Refused = {
    "device_map": (NONE, "each rank's slices go to that rank's own device; leave it out"),
    "max_memory": (NONE, "it belongs to device_map; leave it out"),
    "offload_folder": (NONE, "it belongs to device_map; leave it out"),
    "offload_state_dict": ((None, False), "it belongs to device_map; leave it out"),
    "low_cpu_mem_usage": ((True, None), "each rank builds the model without weights; leave it out"),
    "use_safetensors": ((None, True), "each rank reads slices, which needs safetensors; leave it out"),
    "proxies": (NONE, "set HTTPS_PROXY in the environment instead"),
    "ignore_mismatched_sizes": (
        (False, None),
        "a weight of another shape would stay uninitialised; use a checkpoint of this configuration",
    ),
}
"""What both libraries know and no rank can do."""
_REFUSED: Refused = {
    **PLACED,
    "use_flashpack": ((False, None), "a FlashPack file cannot be read in slices; use the safetensors files"),
}
_WITHOUT_EFFECT = ("disable_mmap", "flashpack_kwargs")  # no file is mapped, and FlashPack is refused
