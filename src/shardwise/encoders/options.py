"""What is transformers' own of a load: its options, its configurations, its dtypes, tied weights.

A model is built without weights and without drawing any, its buffers are computed in the dtype that it will have, and
every number that it ends with is the one that `from_pretrained` of the whole model gives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers.initialization import no_init_weights

from shardwise.checkpoint.index import TensorEntry
from shardwise.checkpoint.load import DtypeRule
from shardwise.checkpoint.report import LoadReport
from shardwise.encoders.inputs import example_inputs
from shardwise.encoders.keys import model_names
from shardwise.encoders.saving import let_save
from shardwise.errors import CheckpointError, ConfigError, UnsupportedOption
from shardwise.models.options import (
    NONE,
    PLACED,
    LoadOptions,
    Refused,
    asked_dtype,
    default_dtype,
    refuse_quantized,
    without_refused,
)
from shardwise.plan.meta import meta_parameters
from shardwise.runtime.shard import assign


@dataclass(frozen=True)
class EncoderOptions(LoadOptions):
    """The keyword arguments of transformers' `from_pretrained`, sorted by what they mean here."""

    stem: ClassVar[str] = "model"

    @classmethod
    def parse(cls, kwargs: Mapping[str, Any]) -> Self:
        """Return the options, or refuse those that tensor parallelism cannot honour.

        Raises:
            UnsupportedOption: naming the option and what to do instead.
        """
        rest = without_refused(kwargs, _REFUSED)
        for name in _WITHOUT_EFFECT:
            rest.pop(name, None)
        dtype = asked_dtype(rest)
        dtype = None if dtype == "auto" else getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise UnsupportedOption(
                f"dtype must be 'auto' or a floating torch.dtype such as torch.bfloat16, got {dtype!r}"
            )
        return cls.sorted(dtype, rest)

    def build(self, cls: Any, location: Any) -> Any:
        """Return a model without weights, its configuration saying the dtype that it will have.

        Raises:
            CheckpointError: there is no configuration.
            ConfigError: nothing says which dtype is wanted.
            UnsupportedOption: the checkpoint is quantized, or an option is unknown.
        """
        config, unknown = self._read_config(cls, location)
        refuse_quantized(location, getattr(config, "quantization_config", None))
        if unknown:
            raise UnsupportedOption(f"{cls.__name__} knows no option {', '.join(unknown)}; leave it out")
        _set_dtype(config, self.dtype or config.dtype, location)
        with meta_parameters(), default_dtype(config.dtype), no_init_weights():
            model = cls(config)
        model.tie_weights(recompute_mapping=False)
        if model.can_generate():
            model.generation_config = self._generation_config(location, model.generation_config)
        return model

    def _read_config(self, cls: Any, location: Any) -> tuple[Any, dict[str, Any]]:
        try:
            config, unknown = cls.config_class.from_pretrained(
                location,
                return_unused_kwargs=True,
                subfolder=self.subfolder or "",
                **self.hub,
                **self.model,
            )
        except OSError as error:
            raise CheckpointError(f"the configuration of {location} cannot be read: {error}") from error
        return config, unknown

    def _generation_config(self, location: Any, own: Any) -> Any:
        try:
            return type(own).from_pretrained(location, subfolder=self.subfolder or "", **self.hub)
        except OSError:  # there is none, and the model has made one of its configuration
            return own

    def example_inputs(self, model: Any) -> dict[str, Any]:
        """Return tokens and a mask."""
        return example_inputs(model)

    def rename(self, model: Any, index: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
        """Return a checkpoint's tensors under the names that the model has for them.

        Tied weights of which the checkpoint holds each are loaded as they are there; `finish` ties those again that
        turn out to be equal.
        """
        names = model_names(model, index)
        renamed = {names[key]: entry for key, entry in index.items()}
        for target, source in _tied(model):
            if target in renamed and source in renamed:
                assign(model, {target: nn.Parameter(torch.empty_like(model.get_parameter(target)))})
        return renamed

    def dtype_rule(self, model: Any) -> DtypeRule:
        """Return transformers' rule: the dtype of the configuration, but for what is kept in fp32."""
        wanted: torch.dtype = model.config.dtype
        plan: dict[str, torch.dtype] = model._get_dtype_plan(wanted)
        kept = {re.compile(rf"(^|\.){re.escape(name)}(\.|$)"): dtype for name, dtype in plan.items()}

        def rule(name: str, stored: torch.dtype, built: torch.dtype) -> torch.dtype:
            if not stored.is_floating_point:
                return stored
            return next((dtype for pattern, dtype in kept.items() if pattern.search(name)), wanted)

        return rule

    @classmethod
    def allow(cls, model: Any) -> None:
        """Give a sharded model its way to be saved; adapters and what moves weights are watched as everywhere."""
        super().allow(model)
        let_save(model)

    def finish(self, model: Any, location: Any, report: LoadReport) -> None:
        """Leave on a model what `from_pretrained` does."""
        for target, source in list(_tied(model)):
            held, other = model.get_parameter(target), model.get_parameter(source)
            if held is not other and torch.equal(held, other):
                assign(model, {target: other})
            elif held is not other:
                model.all_tied_weights_keys.pop(target)  # or a later tie_weights() would
        vars(model)["load_report"] = report
        model.config._name_or_path = str(location)
        model.eval()


def _tied(model: Any) -> Iterator[tuple[str, str]]:
    """Yield the names of each pair of parameters that the configuration ties."""
    yield from model.all_tied_weights_keys.items()


def _set_dtype(config: Any, dtype: torch.dtype | str | None, location: Any) -> None:
    """Set the dtype of a configuration and of those inside of it, as transformers does.

    Raises:
        ConfigError: there is none.
    """
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if dtype is None:
        raise ConfigError(f"the configuration of {location} does not say its dtype: pass dtype=...")
    config.dtype = dtype
    for name in config.sub_configs:
        if (inner := getattr(config, name, None)) is not None:
            inner.dtype = dtype


_OTHER_MEANS = "it is transformers' own way to spread a model; parallelism is that of parallel_config here"
_REFUSED: Refused = {
    **PLACED,
    "quantization_config": (NONE, "no quantization of text encoders has been proved on slices; leave it out"),
    "tp_plan": (NONE, _OTHER_MEANS),
    "tp_size": (NONE, _OTHER_MEANS),
    "device_mesh": (NONE, _OTHER_MEANS),
    "distributed_config": (NONE, _OTHER_MEANS),
    "state_dict": (NONE, "slices are read from files; leave it out"),
    "key_mapping": (NONE, "rename the keys of the checkpoint instead"),
    "gguf_file": (NONE, "a GGUF file cannot be read in slices; use the safetensors files"),
    "from_tf": ((False, None), "slices are read from safetensors files; leave it out"),
    "from_flax": ((False, None), "slices are read from safetensors files; leave it out"),
    "adapter_kwargs": (NONE, "adapters of text encoders are not sharded; leave it out"),
    "config": (NONE, "the configuration is that of the folder, with the changes that are passed by name"),
}
_WITHOUT_EFFECT = ("weights_only", "use_kernels", "trust_remote_code", "offload_buffers")
