"""Ways of offloading a model, on a machine with nothing but a CPU: what is away is NaN, or on the meta device.

The hooks are those of diffusers and accelerate. Where they would copy weights to the host and back, which is the same
place here, the weights are set aside and NaN is left: whatever is used without having been brought shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import accelerate
import torch
from diffusers import DiffusionPipeline
from diffusers.hooks import apply_group_offloading, group_offloading
from torch import Tensor, nn

CPU = torch.device("cpu")


class Host:
    """Where weights are while they are away.

    Attributes:
        brought: How many tensors have been brought so far.
    """

    def __init__(self) -> None:
        self._kept: dict[Tensor, Tensor] = {}
        self.brought = 0

    def take(self, tensors: list[Tensor]) -> None:
        """Take the data of tensors, and leave NaN, or a large number, in their place."""
        for tensor in tensors:
            if tensor not in self._kept:
                self._kept[tensor] = tensor.data
                tensor.data = torch.full_like(tensor.data, float("nan") if tensor.is_floating_point() else 99)

    def bring(self, tensors: list[Tensor]) -> None:
        """Bring back the data of those tensors that are away."""
        for tensor in tensors:
            if tensor in self._kept:
                tensor.data = self._kept.pop(tensor)
                self.brought += 1


def tensors_of_group(group: Any) -> list[Tensor]:
    """Return what diffusers moves as one."""
    modules = [tensor for module in group.modules for tensor in (*module.parameters(), *module.buffers())]
    return [*modules, *group.parameters, *group.buffers]


@contextmanager
def away_on(host: Host, model: nn.Module) -> Iterator[None]:
    """Have what offloads a model, or groups of its layers, move tensors to and from `host`.

    Of the model's own `to`, `cpu` is the host, and `cpu:0` stands for an accelerator.
    """

    def to(model: nn.Module, device: Any = None, dtype: Any = None) -> nn.Module:
        (host.bring if torch.device(device).index == 0 else host.take)(list(model.parameters()))
        return model

    def offload(group: Any) -> None:
        host.take(tensors_of_group(group))

    def onload(group: Any) -> None:
        host.bring(tensors_of_group(group))

    kind = group_offloading.ModuleGroup
    with (
        mock.patch.object(kind, "_offload_to_memory", offload),
        mock.patch.object(kind, "_onload_from_memory", onload),
        mock.patch.object(type(model), "to", to),
        # It collects garbage for each tensor, which takes most of the time here.
        mock.patch("accelerate.utils.modeling.clear_device_cache"),
    ):
        yield


class Encoder(nn.Module):
    """Another component, which comes before the transformer."""

    dtype, device = torch.float32, CPU

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x)


class Holder(DiffusionPipeline):
    """A pipeline of two components that calls its transformer with what it is given."""

    model_cpu_offload_seq = "encoder->transformer"

    def __init__(self, encoder: nn.Module, transformer: nn.Module) -> None:
        super().__init__()
        self.register_modules(encoder=encoder, transformer=transformer)

    def __call__(self, **inputs: Any) -> Any:
        self.encoder(torch.ones(1, 1))
        output = self.transformer(**inputs)
        self.maybe_free_model_hooks()
        return output


def by_model(model: Any) -> Any:
    pipeline = Holder(Encoder(), model)
    pipeline.enable_model_cpu_offload(device="cpu")
    return pipeline


def by_layer(model: Any) -> Any:
    pipeline = Holder(Encoder(), model)
    pipeline._exclude_from_cpu_offload = [
        "encoder"
    ]  # accelerate itself fails with cpu:0, which diffusers asks for
    pipeline.enable_sequential_cpu_offload(device="cpu")
    return pipeline


def by_pipeline_blocks(model: Any) -> Any:
    pipeline = Holder(Encoder(), model)
    pipeline.enable_group_offload(onload_device=CPU, offload_type="block_level", num_blocks_per_group=1)
    return pipeline


def by_leaves(model: Any) -> Any:
    model.enable_group_offload(onload_device=CPU, offload_type="leaf_level")
    return model


def by_function_blocks(model: Any) -> Any:
    apply_group_offloading(model, CPU, offload_type="block_level", num_blocks_per_group=2)
    return model


def by_function_layers(model: Any) -> Any:
    return accelerate.cpu_offload(model, "cpu", offload_buffers=True)


class Stream:
    """Stands for a stream: what is put into it is done at once."""

    def synchronize(self) -> None:
        """Wait for nothing."""


def ahead(kind: str) -> Callable[[Any], Any]:
    """Return a way that brings the next group while one computes, from the second forward on.

    Nothing but this brings it: the groups that are away do not say so by their device.
    """

    def by_stream(model: Any) -> Any:
        config = group_offloading.GroupOffloadingConfig(
            onload_device=CPU,
            offload_device=torch.device("meta"),
            offload_type=group_offloading.GroupOffloadingType(kind),
            non_blocking=True,
            record_stream=False,
            low_cpu_mem_usage=True,
            num_blocks_per_group=1,
            stream=Stream(),
        )
        group_offloading._apply_group_offloading(model, config)
        return model

    return by_stream


WAYS: dict[str, Callable[[Any], Any]] = {
    "enable_model_cpu_offload": by_model,
    "enable_sequential_cpu_offload": by_layer,
    "pipeline.enable_group_offload": by_pipeline_blocks,
    "model.enable_group_offload": by_leaves,
    "apply_group_offloading": by_function_blocks,
    "accelerate.cpu_offload": by_function_layers,
    "stream of blocks": ahead("block_level"),
    "stream of leaves": ahead("leaf_level"),
}
"""How a model can be offloaded: what is to be called afterwards."""


def share_away(model: nn.Module) -> float:
    """Return the share of a model's weights that are away."""
    weights = list(model.parameters())
    away = sum(weight.numel() for weight in weights if weight.is_meta or weight.isnan().all())
    return away / sum(weight.numel() for weight in weights)
