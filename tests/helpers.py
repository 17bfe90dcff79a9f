"""Small tools that several tests use: random weights, comparing outputs, tiny models on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tools.rounding import exactly
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention
from torch.overrides import TorchFunctionMode

from shardwise import models
from shardwise.models.lookup import skeleton, tiny_case
from tests import devices

FAMILIES = sorted(models.FAMILIES)


def family(name: str) -> Any:
    """Return the module of a model class: its class, `PLAN`, `TINY_CONFIG` and `example_inputs`."""
    return import_module(f"shardwise.models.families.{models.FAMILIES[name]}")


def randomize(model: nn.Module, seed: int = 1) -> nn.Module:
    """Fill every parameter with random numbers that are not zero: zero-initialised gates would hide errors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if parameter.dim() >= 2:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.copy_(0.2 * noise + (1.0 if name.endswith("weight") else 0.0))
    return model.eval()


def tiny_model(name: str, stock: bool = False, **config: Any) -> Any:
    """Return a tiny model of a class of `shardwise.models`, or the diffusers class of the same name."""
    module = family(name)
    cls = getattr(import_module("diffusers"), name) if stock else getattr(module, name)
    return randomize(cls(**{**module.TINY_CONFIG, **config}))


@cache
def tiny_skeleton(name: str, variant: str = "") -> nn.Module:
    """Return a tiny model without weights, the same one for all tests of a process: it is not to be changed."""
    return skeleton(name, **tiny_case(family(name), variant)[0])


def tiny_inputs(name: str, seed: int = 0, **kwargs: Any) -> dict[str, Any]:
    """Return inputs for a tiny model."""
    module = family(name)
    return module.example_inputs(module.TINY_CONFIG, torch.Generator().manual_seed(seed), **kwargs)


def variants() -> list[tuple[str, str]]:
    """Return (model class, variant) for each further configuration that a family's file lists."""
    return [(name, variant) for name in FAMILIES for variant in getattr(family(name), "TINY_VARIANTS", {})]


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return `value` with `function` applied to each tensor in its dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield each tensor in the lists and tuples of `value`."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)


def cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return inputs with their floating tensors in `dtype`; a tuple holds tables, which stay as they are.

    But for a pair of texts and images, which are data.
    """

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    tables = {k for k, v in inputs.items() if isinstance(v, tuple) and k != "encoder_hidden_states"}
    return {k: v if k in tables else map_tensors(convert, v) for k, v in inputs.items()}


def save_tiny(name: str, folder: Path, max_shard_size: str = "10GB", **config: Any) -> Any:
    """Write a tiny model as its diffusers class would, and return it."""
    model = tiny_model(name, stock=True, **config)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def plainly(model: nn.Module) -> dict[str, bool]:
    """Return what asks a diffusers model for a tuple; one that returns nothing but a tensor is not asked."""
    own = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    return {"return_dict": False} if "return_dict" in signature(type(own).forward).parameters else {}


class Routes(TorchFunctionMode):
    """Has every forward after the first choose as the first did, where a model chooses by `topk`.

    A router that rounds may send a token to another expert, which is another picture and no error of rounding: of 24
    tiny HiDreams in bf16, 5 sharded ones are more than 1.5 times as far from fp32 as one process is, up to 7.8
    times; with the same routes none is (at most 1.3 times).
    """

    def __init__(self) -> None:
        super().__init__()
        self._chosen: list[Tensor] = []
        self._next: int | None = None

    def again(self) -> Routes:
        """Return the mode for a forward that chooses as the first did."""
        self._next = 0
        return self

    def all_taken(self) -> bool:
        """Return whether the last forward chose as often as the first did."""
        return self._next == len(self._chosen)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return output
        if self._next is None:
            self._chosen.append(output.indices)
            return output
        indices, self._next = self._chosen[self._next], self._next + 1
        dim = args[2] if len(args) > 2 else (kwargs or {}).get("dim", -1)
        return torch.return_types.topk((args[0].gather(dim, indices), indices))


def call(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """Return the output tensors of a diffusers model, which are on the CPU wherever the model is."""
    inputs = map_tensors(partial(devices.to, devices.device_of(model)), inputs)
    with exactly(model):
        return [tensor.cpu() for tensor in tensors_of(model(**{**inputs, **plainly(model)}))]


@contextmanager
def differentiable_flex_attention() -> Iterator[None]:
    """Let FlexAttention, which has no gradients on a CPU, be attention with its mask and its blocks."""

    def attention(
        query: Tensor, key: Tensor, value: Tensor, block_mask: Any, scale: Any, **options: Any
    ) -> Tensor:
        rows, columns = query.shape[2], key.shape[2]
        mask = flex_attention.create_mask(block_mask.mask_mod, 1, 1, rows, columns, "cpu")
        blocks = block_mask.to_dense().bool()
        for dim, size in zip((-2, -1), block_mask.BLOCK_SIZE, strict=True):
            blocks = blocks.repeat_interleave(size, dim)
        mask = mask & blocks[..., :rows, :columns]
        mask = mask | ~mask.any(-1, keepdim=True)  # padding that sees nothing, and is cut off
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)

    with mock.patch.object(flex_attention, "flex_attention", attention):
        yield


@torch.no_grad()
def outputs(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """Return the output tensors of a diffusers model, without gradients."""
    return call(model, inputs)


def relative_error(actual: list[Tensor] | Tensor, expected: list[Tensor] | Tensor) -> float:
    """Return the largest absolute difference, over the largest absolute value of `expected`."""
    actual = [actual] if isinstance(actual, Tensor) else actual
    expected = [expected] if isinstance(expected, Tensor) else expected
    assert len(actual) == len(expected) > 0
    assert all(a.shape == e.shape for a, e in zip(actual, expected, strict=True))
    errors = [
        ((a.double() - e.double()).abs().max() / e.double().abs().max()).item()
        for a, e in zip(actual, expected, strict=True)
    ]
    assert all(torch.isfinite(e).all() and e.abs().max() > 0 for e in expected)
    return max(errors)


def distance(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Return the norm of the difference, over that of what is expected: a mean over elements, little left to chance."""
    return max(
        ((a.double() - e.double()).norm() / e.double().norm()).item()
        for a, e in zip(actual, expected, strict=True)
    )
