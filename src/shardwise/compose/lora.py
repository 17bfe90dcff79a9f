"""LoRA on a sharded model: which part of an adapter a rank holds, and how a model with adapters is sharded.

Whoever wraps a sharded Linear in one of PEFT's LoRA layers gets a layer that does this rank's part, or an error: PEFT
hands the Linear over by registering it as a submodule, and `watch` looks at what is registered. So it does not matter
whether diffusers, PEFT or a script put the adapter there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from shardwise.errors import CheckpointError, UnsupportedOperation
from shardwise.plan.layout import Shard
from shardwise.runtime.group import TensorParallelGroup
from shardwise.runtime.modules import LocalLayer
from shardwise.runtime.shard import digest, local_slice

_FACTOR = re.compile(r"(.+)\.(lora_A|lora_B)\.(weight|bias)")
_OTHER_KINDS = re.compile(r"\.lokr_|lora_magnitude_vector|dora_scale|^lora_controlnet")


@cache
def watch() -> None:
    """See to it, in this process, that an adapter around a sharded layer does its rank's part."""
    register_module_module_registration_hook(_on_registration)


def _on_registration(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if child is not None and is_adapter_layer(parent) and _takes_part(base_layer(child)):
        from shardwise.compose.lora_layers import adopt

        adopt(parent, child)


def _takes_part(module: nn.Module) -> bool:
    """Return whether a module is sharded, or whole with gradients that are summed over the ranks."""
    return isinstance(module, LocalLayer) or "tp_sums_gradients" in vars(module)


def is_adapter_layer(module: nn.Module) -> bool:
    """Return whether a module is one of PEFT's layers around another."""
    return "peft" in sys.modules and any(base.__name__ == "BaseTunerLayer" for base in type(module).__mro__)


def base_layer(module: nn.Module) -> nn.Module:
    """Return the layer inside of adapter layers."""
    while is_adapter_layer(module) and isinstance(getattr(module, "base_layer", None), nn.Module):
        module = module.get_submodule("base_layer")
    return module


# ------------------------------------------------------------------------------------------- a model with adapters


@contextmanager
def set_aside(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Take plain LoRA layers out of a model for a while, so that a plan finds the Linears in them.

    Yields the layers by path. Other adapters stay where they are, and are refused there.
    """
    layers = {path: layer for path, layer in model.named_modules(remove_duplicate=False) if _is_plain(layer)}
    for path, layer in layers.items():
        model.set_submodule(path, layer.base_layer)
    try:
        yield layers
    finally:
        for path, layer in layers.items():
            model.set_submodule(path, layer)


def _is_plain(layer: Any) -> bool:
    if not is_adapter_layer(layer):
        return False
    from peft.tuners import lora

    return type(layer) is lora.Linear and type(layer.base_layer) is nn.Linear and not layer.lora_variant


def describe(layers: Mapping[str, Any]) -> dict[str, object]:
    """Return what must be equal on all ranks of the adapters of a model; nothing if it has none."""
    facts = [
        (
            path,
            layer.scaling,
            layer.active_adapters,
            layer.merged_adapters,
            layer.disable_adapters,
            [(name, tuple(p.shape), str(p.dtype)) for name, p in _factors(layer)],
        )
        for path, layer in layers.items()
    ]
    return {"adapters": f"{len(layers)} LoRA layers ({digest(facts)})"}


def shard_layers(layers: Mapping[str, Any], group: TensorParallelGroup) -> None:
    """Leave each rank its part of the adapters of a model whose base layers have just been sharded.

    Rank 0's values win, as they do for the model.
    """
    for layer in {id(layer): layer for layer in layers.values()}.values():
        base = layer.base_layer
        if _takes_part(base):
            from shardwise.compose.lora_layers import adopt

            adopt(layer, base)
        if isinstance(base, LocalLayer):
            layer.in_features, layer.out_features = base.in_features, base.out_features
            for name in layer.lora_A:
                layer.keep_part(name)
        else:
            for _, parameter in _factors(layer):
                parameter.data = group.from_first(parameter.detach())


def _factors(layer: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of an adapter layer that are not its base's."""
    for name, parameter in layer.named_parameters():
        if not name.startswith("base_layer."):
            yield name, parameter


# ---------------------------------------------------------------------------------------------- an adapter in a file


def local_state(
    model: nn.Module, state: Mapping[str, Tensor], group: TensorParallelGroup
) -> dict[str, Tensor]:
    """Return this rank's part of an adapter in PEFT's names, relative to the model.

    Raises:
        UnsupportedOperation: it is not plain LoRA, or adapts a sharded convolution.
        CheckpointError: a factor does not fit the layer that it adapts.
    """
    other = next((key for key in state if _OTHER_KINDS.search(key)), None)
    if other is not None:
        name = type(model).__name__
        raise UnsupportedOperation(
            f"{other}: an adapter that is not plain LoRA is not supported on {name}, which is sharded with tensor "
            "parallelism: fuse it into the weights and save them before sharding"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    return {key: _local(modules, key, tensor, group) for key, tensor in state.items()}


def _local(modules: Mapping[str, nn.Module], key: str, tensor: Tensor, group: TensorParallelGroup) -> Tensor:
    match = _FACTOR.fullmatch(key)
    base = base_layer(modules[match[1]]) if match and match[1] in modules else None
    if match is None or not isinstance(base, LocalLayer):
        return tensor  # of a layer that is whole, or of none: diffusers names those that it does not use
    if not isinstance(base, nn.Linear):
        raise UnsupportedOperation(
            f"LoRA on {match[1]}, a sharded convolution, is not supported: fuse the adapter before sharding"
        )
    from shardwise.compose.lora_layers import factor_layout

    layout = factor_layout(base, match[2], match[3])
    _check_width(key, tensor, base, match[2])
    return local_slice(tensor, layout, group.rank, group.degree) if isinstance(layout, Shard) else tensor


def _check_width(key: str, tensor: Tensor, base: LocalLayer, factor: str) -> None:
    """Refuse a factor whose width is not that of the whole layer."""
    dim = 1 if factor == "lora_A" else 0
    wanted = base.whole_shape[dim]
    if tensor.ndim <= dim or tensor.shape[dim] != wanted:
        side = "input" if dim else "output"
        raise CheckpointError(
            f"{key} has shape {tuple(tensor.shape)}, but the layer has {wanted} {side} features: "
            "is the adapter made for this model?"
        )


# ------------------------------------------------------------------------------------------------- all or nothing


@contextmanager
def undone_on_failure(model: Any, adapter: str) -> Iterator[None]:
    """Leave a model as it was, with what it had under the name of an adapter, if what is done inside fails."""
    before = _Adapters(model, adapter)
    try:
        yield
    except BaseException:
        before.restore()
        raise


class _Adapters:
    """The adapters of a model, as they were."""

    def __init__(self, model: Any, adapter: str) -> None:
        self.model = model
        self.marks = {name: vars(model)[name] for name in _MARKS if name in vars(model)}
        self.configs = dict(self.marks.get("peft_config", {}))
        self.layers = {layer: _Layer(layer, adapter) for layer in model.modules() if is_adapter_layer(layer)}

    def restore(self) -> None:
        for path, layer in list(self.model.named_modules(remove_duplicate=False)):
            if is_adapter_layer(layer) and layer not in self.layers:
                self.model.set_submodule(path, layer.base_layer)
        for was in self.layers.values():
            was.restore()
        for name in _MARKS:
            vars(self.model).pop(name, None)
        vars(self.model).update(self.marks)
        if "peft_config" in self.marks:
            self.model.peft_config = self.configs


_MARKS = ("peft_config", "_hf_peft_config_loaded", "_prepare_lora_hotswap_kwargs")
"""What diffusers keeps on a model with adapters."""


class _Layer:
    """An adapter layer as it was: what it has by adapter, and the values of one."""

    def __init__(self, layer: Any, adapter: str) -> None:
        self.layer, self.active = layer, layer._active_adapter
        names = (*layer.adapter_layer_names, *layer.other_param_names)
        self.by_adapter = {name: dict(getattr(layer, name).items()) for name in names}
        self.values = {p: p.detach().clone() for name, p in _factors(layer) if f".{adapter}." in name}

    def restore(self) -> None:
        for name, was in self.by_adapter.items():
            now = getattr(self.layer, name)
            now.clear()
            now.update(was)
        for parameter, value in self.values.items():
            parameter.data = value
        self.layer._active_adapter = self.active
