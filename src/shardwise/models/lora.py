"""The calls of diffusers that give a model LoRA adapters, on a sharded one.

Files, key names and configurations are diffusers' own affair here as anywhere; what it is handed is this rank's part.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MethodType
from typing import Any

import torch
from diffusers.loaders import FluxLoraLoaderMixin, PeftAdapterMixin
from diffusers.loaders.lora_base import _fetch_state_dict
from diffusers.utils import convert_unet_state_dict_to_peft, get_adapter_name, is_peft_available
from torch import Tensor, nn

from shardwise.checkpoint.adapters import check_factors
from shardwise.compose import lora
from shardwise.compose.offload import require_data, settled
from shardwise.errors import CheckpointError
from shardwise.models.offload import offload_groups_again, unmarked
from shardwise.runtime.modes import ordinary, outside_inference_mode
from shardwise.runtime.modules import LocalLayer
from shardwise.runtime.shard import Sharding, digest, sharding_of

_READING = (
    "weight_name",
    "use_safetensors",
    "local_files_only",
    "cache_dir",
    "force_download",
    "proxies",
    "token",
    "revision",
    "subfolder",
)
"""Options of `load_lora_adapter` that say where the file is."""

_SAMPLES = 4096
"""Values of a factor that the ranks compare, spread over all of it."""


def allow(model: nn.Module) -> None:
    """Let a sharded model have LoRA adapters; diffusers' calls load them where the model has these calls."""
    lora.watch()
    if isinstance(model, PeftAdapterMixin) and is_peft_available():
        _keep_layers()
        for call in (load_lora_adapter, add_adapter, fuse_lora, unfuse_lora):
            vars(model)[call.__name__] = MethodType(call, model)


@outside_inference_mode()
def load_lora_adapter(
    model: Any,
    pretrained_model_name_or_path_or_dict: Any,
    prefix: str | None = "transformer",
    hotswap: bool = False,
    **kwargs: Any,
) -> None:
    """Load an adapter as diffusers' method of this name does; each rank keeps its slices of A and B.

    Raises:
        CheckpointError: a file that cannot be read, or factors that do not fit the model; on every rank, and the
            model is as it was.
        UnsupportedOperation: an adapter that is not plain LoRA.
        RankFailure: another rank failed, or was given another adapter.
    """
    group, subject = _sharding(model).group, f"loading an adapter into {type(model).__name__}"
    name = kwargs.pop("adapter_name", None) or get_adapter_name(model)
    with group.agreement(subject) as step:
        if kwargs.get("_pipeline") is None:
            require_data(model, "loading an adapter", "load it through the pipeline, or before offloading")
        state, metadata = _read(pretrained_model_name_or_path_or_dict, kwargs)
        check_factors(state, name)
        state = _in_peft_names(state, prefix)
        local = lora.local_state(model, state, group)
        factors = [(key, *_told_apart(tensor)) for key, tensor in sorted(state.items())]
        alphas = sorted((kwargs.get("network_alphas") or {}).items())
        claim = digest((name, prefix, hotswap, factors, alphas, sorted((metadata or {}).items())))
        step.must_equal(adapter=f"{len(state)} tensors as {name} ({claim})")
    kwargs = {"low_cpu_mem_usage": True, **kwargs, "adapter_name": name, "metadata": metadata}
    named = {key if prefix is None else f"{prefix}.{key}": ordinary(tensor) for key, tensor in local.items()}
    with lora.undone_on_failure(model, name), group.agreement(subject), unmarked(model), settled():
        type(model).load_lora_adapter(model, named, prefix=prefix, hotswap=hotswap, **kwargs)
    if kwargs.get("_pipeline") is None:
        offload_groups_again(model)


@outside_inference_mode()
def add_adapter(model: Any, adapter_config: Any, adapter_name: str = "default") -> None:
    """Add an adapter for training as diffusers' method of this name does; rank 0's random values are everybody's.

    Raises:
        UnsupportedOperation: an adapter that is not plain LoRA.
        RankFailure: another rank failed, or was given another configuration.
    """
    group, subject = _sharding(model).group, f"adding an adapter to {type(model).__name__}"
    from shardwise.compose.lora_layers import check_start  # needs PEFT, as the call does

    with group.agreement(subject) as step:
        require_data(model, "adding an adapter", "add it before offloading")
        check_start(adapter_config, type(model).__name__)
        entries: dict[str, Any] = getattr(adapter_config, "to_dict", dict)()
        facts = [(k, sorted(v) if isinstance(v, set | list) else v) for k, v in sorted(entries.items())]
        step.must_equal(adapter=f"{type(adapter_config).__name__} {adapter_name} ({digest(facts)})")
    with lora.undone_on_failure(model, adapter_name), group.agreement(subject):
        type(model).add_adapter(model, adapter_config, adapter_name)
    offload_groups_again(model)


@outside_inference_mode()
def fuse_lora(model: Any, *args: Any, **kwargs: Any) -> None:
    """Add adapters to the weights as diffusers' method of this name does.

    Raises:
        UnsupportedOperation: the model is offloaded layer by layer, so that its weights are not there.
    """
    require_data(model, "fuse_lora", "fuse the adapters before offloading")
    type(model).fuse_lora(model, *args, **kwargs)
    offload_groups_again(model)


@outside_inference_mode()
def unfuse_lora(model: Any) -> None:
    """Take adapters out of the weights as diffusers' method of this name does.

    Raises:
        UnsupportedOperation: the model is offloaded layer by layer, so that its weights are not there.
    """
    require_data(model, "unfuse_lora", "take the hooks away first, with pipeline.remove_all_hooks()")
    type(model).unfuse_lora(model)
    offload_groups_again(model)


def _sharding(model: nn.Module) -> Sharding:
    sharding = sharding_of(model)
    assert sharding is not None  # the calls are those of sharded models only
    return sharding


def _read(source: Any, kwargs: dict[str, Any]) -> tuple[Mapping[str, Tensor], dict[str, Any] | None]:
    """Return an adapter's tensors and its configuration, if the file has one; takes what says where out of `kwargs`."""
    where = {option: kwargs.pop(option, None) for option in _READING}
    agent = {"file_type": "attn_procs_weights", "framework": "pytorch"}
    metadata = kwargs.pop("metadata", None)
    try:
        return _fetch_state_dict(  # type: ignore[no-any-return]
            source, **where, user_agent=agent, allow_pickle=False, metadata=metadata
        )
    except OSError as error:
        raise CheckpointError(f"the adapter {source} cannot be read: {error}") from error


def _in_peft_names(state: Mapping[str, Tensor], prefix: str | None) -> dict[str, Tensor]:
    """Return the part of an adapter that is under a prefix, without it and in PEFT's names."""
    own = dict(state)
    if prefix is not None:
        own = {k.removeprefix(f"{prefix}."): v for k, v in own.items() if k.startswith(f"{prefix}.")}
    if own and "lora_A" not in next(iter(own)):
        own = convert_unet_state_dict_to_peft(own)
    return dict(sorted(own.items()))


def _told_apart(factor: Tensor) -> tuple[tuple[int, ...], str, str]:
    """Return what tells a factor from another adapter's of the same shape: some of its values, too."""
    values = factor.detach().flatten()
    some = values[:: max(1, len(values) // _SAMPLES)].cpu()
    return tuple(factor.shape), str(factor.dtype), digest(some.view(torch.uint8).numpy().tobytes())


@cache
def _keep_layers() -> None:
    """Keep diffusers' loader for FLUX.1, in this process, from replacing the layers of a sharded model.

    Control adapters read more channels than the model has. The loader replaces a Linear that is smaller than its
    adapter by a larger one, filled up with zeros, and every sharded layer looks smaller. So it sees nothing of those:
    whether an adapter fits them is asked when it is cut.
    """
    grow_model = FluxLoraLoaderMixin._maybe_expand_transformer_param_shape_or_error_.__func__
    grow_state = FluxLoraLoaderMixin._maybe_expand_lora_state_dict.__func__

    def model(cls: Any, transformer: Any, lora_state_dict: Any = None, *args: Any, **kwargs: Any) -> Any:
        _, whole = _by_cut(cls, transformer, lora_state_dict or {})
        return grow_model(cls, transformer, whole, *args, **kwargs)

    def state(cls: Any, transformer: Any, lora_state_dict: Any) -> Any:
        cut, whole = _by_cut(cls, transformer, lora_state_dict)
        return {**grow_state(cls, transformer, whole), **cut}

    FluxLoraLoaderMixin._maybe_expand_transformer_param_shape_or_error_ = classmethod(model)
    FluxLoraLoaderMixin._maybe_expand_lora_state_dict = classmethod(state)


def _by_cut(
    pipeline: Any, transformer: nn.Module, state: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parts of an adapter that are for sharded layers and for whole ones."""
    sharded = {path for path, m in transformer.named_modules() if isinstance(lora.base_layer(m), LocalLayer)}
    cut: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}
    for key, tensor in state.items():
        path = key.removeprefix(f"{pipeline.transformer_name}.").partition(".lora_")[0]
        (cut if path in sharded else whole)[key] = tensor
    return cut, whole
