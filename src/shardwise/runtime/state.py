"""Which models may be sharded, and what a sharded model refuses to do.

A refusal stands for something that would be silently wrong: an adapter of full width on a slice, a folder
with the slices of one rank in it. What is proved to work is taken out of the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

from shardwise.errors import UnsupportedOperation, UnsupportedState
from shardwise.plan import adapters

_ADAPTER_HINT = "fuse the adapter into the weights and save them before sharding"

REFUSED = {
    "save_pretrained": "each rank holds slices, and only models of diffusers and classes of shardwise.encoders are "
    "gathered; save the model before sharding it",
    "push_to_hub": "each rank holds slices; save the model with save_pretrained, and upload the folder",
    "load_lora_adapter": _ADAPTER_HINT,
    "add_adapter": _ADAPTER_HINT,
    "load_adapter": _ADAPTER_HINT,
    "save_lora_adapter": "each rank holds its part of the adapter; save it from a model that is not sharded",
    "_load_ip_adapter_weights": "its keys and values are whole, and each rank holds some of the heads; "
    "load the IP adapter before sharding, into the model in memory, and shard it with enable_parallelism",
    "resize_token_embeddings": "each rank holds some rows of the vocabulary; resize it before sharding, and save it",
    "fuse_qkv_projections": "the fused weight would not be covered by the plan",
}
"""Methods of diffusers' and transformers' models -> why they are refused on a sharded one, and what to do instead."""


@dataclass(frozen=True)
class Refusal:
    """Takes the place of a method on a sharded model and raises when called."""

    operation: str
    model: str
    hint: str

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise.

        Raises:
            UnsupportedOperation: always.
        """
        raise UnsupportedOperation(
            f"{self.operation} is not supported on {self.model}, which is sharded with tensor parallelism: {self.hint}"
        )


def refuse_operations(model: nn.Module) -> None:
    """Make the methods that a sharded model cannot honour raise."""
    name = type(model).__name__
    for operation, hint in REFUSED.items():
        if hasattr(type(model), operation):
            vars(model)[operation] = Refusal(operation, name, hint)


def check_state(model: nn.Module) -> None:
    """Refuse a model whose parameters are not plain, whole and its own.

    Raises:
        UnsupportedState: naming the state and what to do instead.
    """
    name = type(model).__name__
    if getattr(model, "_parallel_config", None) is not None:
        raise UnsupportedState(
            f"{name} is sharded already: parallelism is applied once, by from_pretrained(parallel_config=...) "
            "or by enable_parallelism"
        )
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        raise UnsupportedState(
            f"{name} is quantized: what was quantized as a whole is not cut; load it with from_pretrained("
            "parallel_config=..., quantization_config=TorchAoConfig(...)), or shard it first and quantize it then"
        )
    if getattr(model, "hf_device_map", None) is not None:
        raise UnsupportedState(f"{name} was placed by a device_map: load it without one to shard it")
    for path, module in model.named_modules():
        reason = _obstacle(module)
        if reason is not None:
            raise UnsupportedState(f"{name}: {path or 'the model'} {reason}")
    for path, tensor in model.named_parameters():
        if type(tensor) is not nn.Parameter or tensor.is_quantized:
            kind = type(tensor).__name__
            raise UnsupportedState(
                f"{name}: {path} is a {kind}, not a plain parameter: shard before converting"
            )
        if tensor.is_meta:
            raise UnsupportedState(f"{name}: {path} has no data (meta device): load the weights first")


def _obstacle(module: nn.Module) -> str | None:
    """Return what keeps this module from being sharded: something else that decides what or where its weights are."""
    if vars(module).get("_parallel_config") is not None:
        return "is sharded already: shard the model as a whole, once"
    if any(base.__name__ == "BaseTunerLayer" for base in type(module).__mro__):
        return (
            "has an adapter that is not plain LoRA on a Linear, which the plan does not cover: fuse it and unload it "
            "before sharding"
        )
    # The image projection of an IP adapter is fused from the start, and keeps no separate keys beside it.
    if getattr(module, "fused_projections", False) is True and getattr(module, "to_k", None) is not None:
        return "has fused projections, which the plan does not cover: call unfuse_qkv_projections() first"
    processor = getattr(module, "processor", None)
    if isinstance(processor, nn.Module) and not adapters.is_known(processor) and len(processor.state_dict()):
        name = type(processor).__name__
        return f"has a {name} for its processor, with weights that neither the plan nor shardwise knows: unload it"
    hooks = " ".join(getattr(getattr(module, "_diffusers_hook", None), "hooks", {}))
    if hasattr(module, "_hf_hook") or "group_offloading" in hooks:
        return "is offloaded: shard the model first, and offload each rank's slices then"
    if "layerwise_casting" in hooks:
        return "has layerwise casting enabled: shard the model first, and enable it then"
    return None
