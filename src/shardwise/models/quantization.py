"""`quantization_config` of a sharded `from_pretrained`: each rank's slices are quantized as they arrive.

Which weights are quantized, in which dtype the others are, and what the model remembers of it are diffusers' own
affair, and decided by its quantizer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from diffusers.quantizers import DiffusersAutoQuantizer
from diffusers.quantizers.torchao import torchao_quantizer
from torch import Tensor

from shardwise.compose.quantize import check_borders, check_device
from shardwise.errors import UnsupportedOption
from shardwise.plan.resolve import ResolvedPlan
from shardwise.runtime.modules import LocalLayer

METHOD = "torchao"

_REASONS = {
    "bitsandbytes": "its blocks of 4 bits run over the flattened weight, across the borders of slices, and its layers "
    "of 8 bits look for outliers in whole inputs",
    "gguf": "its files have blocks of weights in a format of their own, of which no slices are read",
}


def refusal(config: Any) -> str | None:
    """Return why a `quantization_config`, or that of a checkpoint, cannot be honoured; None if it can."""
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    name = str(getattr(method, "value", method))
    if name == METHOD:
        return None
    reason = _REASONS.get(name, "only quantization by torchao has been proved on slices")
    return f"{reason}; load the weights that are not quantized, with quantization_config=TorchAoConfig(...)"


class Quantization:
    """What quantizes the weights of one model while it is read.

    Raises:
        UnsupportedOption: it is not by torchao.
    """

    def __init__(self, config: Any) -> None:
        reason = refusal(config)
        if reason is not None:
            raise UnsupportedOption(
                f"quantization_config={type(config).__name__} cannot be combined with tensor parallelism: {reason}"
            )
        self._quantizer = DiffusersAutoQuantizer.from_config(copy.deepcopy(config), pre_quantized=False)
        self._quantizer.validate_environment()
        self._dtype: torch.dtype | None = None

    def __str__(self) -> str:
        """Return what must be equal on all ranks of it."""
        config = self._quantizer.quantization_config
        return f"{config.quant_type} but for {config.modules_to_not_convert}"

    def dtype_for(self, requested: torch.dtype | None) -> torch.dtype | None:
        """Return the dtype of what is not quantized, as diffusers chooses it."""
        self._dtype = self._quantizer.update_torch_dtype(requested)
        return self._dtype

    def prepare(self, model: Any) -> None:
        """Tell a model without weights that it will be quantized."""
        kept = getattr(model, "_keep_in_fp32_modules", None) or []
        kept = [kept] if isinstance(kept, str) else list(kept)
        self._quantizer.preprocess_model(model, device_map=None, keep_in_fp32_modules=kept)
        self._model = model

    def check(self, plan: ResolvedPlan) -> None:
        """Refuse a configuration that does not go with slices; before any weight is read.

        Raises:
            UnsupportedOption: the configuration is not known to, or a group of weights would be cut.
        """
        check_borders(plan, dict(self._configs()))

    def check_device(self, device: torch.device) -> None:
        """Refuse a device on which what was asked for gives wrong numbers.

        Raises:
            UnsupportedOption: the processor multiplies integers of 8 bits wrongly.
        """
        check_device(device, (config for _, config in self._configs()))

    def _configs(self) -> Iterator[tuple[str, Any]]:
        """Yield the path of each module whose weight will be quantized, and torchao's configuration for it."""
        whole = self._quantizer.quantization_config.get_apply_tensor_subclass()
        by_name = type(whole).__name__ == "FqnToConfig"
        for name, weight in self._model.named_parameters():
            path, config = name.rpartition(".")[0], whole
            if by_name:
                config = torchao_quantizer._resolve_fqn_to_config(whole, path, name)
            if config is not None and self._chosen(name, weight):
                yield path, config

    def _chosen(self, name: str, weight: Tensor) -> bool:
        return bool(self._quantizer.check_if_quantized_param(self._model, weight, name, {}))

    def arrival(self, name: str, weight: Tensor) -> Tensor | None:
        """Return the quantized parameter of a rank's slice of a weight, or None if it is not to be quantized."""
        if not self._chosen(name, weight):
            return None
        self._quantizer.create_quantized_param(self._model, weight, name, weight.device, {}, [])
        made: Tensor = self._model.get_parameter(name)
        return made

    def finish(self, model: Any) -> None:
        """Leave on a model that has been read what diffusers leaves on a quantized one."""
        self._quantizer.postprocess_model(model)
        model.hf_quantizer = self._quantizer
        model.register_to_config(
            quantization_config=self._quantizer.quantization_config, _pre_quantization_dtype=self._dtype
        )
        for module in model.modules():
            if isinstance(module, LocalLayer):  # says how it is cut, and torchao's text would hide it
                vars(module).pop("extra_repr", None)
