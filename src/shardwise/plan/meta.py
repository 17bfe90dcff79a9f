"""Models without weights: parameters on the meta device, buffers computed as always.

A model's buffers (rotary tables, frequencies) are in no checkpoint, so they must be real, while its weights
must not take memory before a rank's slice of them is known. Unlike accelerate's `init_empty_weights`, weights
that are tied stay tied, and a Linear, an embedding or a convolution never allocates its full weight, not even for a
moment.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from shardwise.plan.linears import CONVOLUTIONS


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Give every module that is built inside the context parameters without data."""
    register = nn.Module.register_parameter
    twins: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # keeps originals alive, so that ids stay unique

    @functools.wraps(register)
    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            twin = twins.get(id(param))
            if twin is None:
                twin = twins[id(param)] = (param, nn.Parameter(param.to("meta"), param.requires_grad))
            param = twin[1]
        register(module, name, param)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(nn.Module, "register_parameter", register_on_meta))
        for cls in (nn.Linear, nn.Embedding, *CONVOLUTIONS):
            patches.enter_context(mock.patch.object(cls, "__init__", _on_meta(cls.__init__)))
        for base in (
            nn.Linear,
            nn.Embedding,
            _ConvNd,
        ):  # there is nothing to draw, and that would take most of the time
            patches.enter_context(mock.patch.object(base, "reset_parameters", return_value=None))
        yield


def _on_meta(init: Callable[..., None]) -> Callable[..., None]:
    """Return the `__init__` of a layer with the meta device as its default."""
    names = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def build(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        kwargs |= dict(zip(names, args, strict=False))
        if kwargs.get("device") is None:
            kwargs["device"] = torch.device("meta")
        init(self, **kwargs)

    return build
