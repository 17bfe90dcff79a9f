"""PEFT's LoRA layer around a slice of a Linear.

The adapter adds B A x to what its base layer returns. Where the base holds some rows of its weight, a rank holds the
same rows of B, and A whole; where it holds some columns, the same columns of A, and B whole. Either way a rank's base
and its adapter give terms of one slice or of one sum, so the adapter is added before the base layer's all-reduce, and
the forward has no further one. In backward each rank knows a part of the gradient of the factor that is whole.

Importing this needs PEFT.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.lora.torchao import TorchaoLoraLinear
from torch import Tensor, nn
from torch.nn.functional import linear

from shardwise.compose.offload import is_hooked
from shardwise.errors import UnsupportedOperation
from shardwise.plan.layout import Layout, Replicated, Shard
from shardwise.runtime.collectives import enter_shard
from shardwise.runtime.gradients import enter_copies
from shardwise.runtime.modules import LocalLayer
from shardwise.runtime.shard import local_slice

_PLAIN_STARTS = (True, False, "gaussian")
"""Values of `init_lora_weights` that do not look at the base layer's weight."""


class LocalLoraLinear(lora.Linear):  # type: ignore[misc]
    """A LoRA layer whose base is a rank's slice of a Linear; it holds the same slice of A or of B."""

    base_layer: LocalLayer
    in_features: int
    out_features: int

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the base layer and the active adapters make of an input; as many all-reduces as the base."""
        if kwargs.get("adapter_names") is not None:
            raise _unsupported(
                self.base_layer, "another adapter for each sample", "call the model once for each"
            )
        names = _added(self)
        if not names:
            return super().forward(x, *args, **kwargs)
        output = self.base_layer(x, partial(self._add, names))
        for name in names if self._bias_is_whole() else ():
            bias = self.lora_B[name].bias
            output = output if bias is None else (output + bias * self.scaling[name]).to(output.dtype)
        return output

    def _add(self, names: list[str], own: Tensor, terms: Tensor) -> Tensor:
        """Return the base layer's slice or term with what the adapters make of the same input."""
        dtype = terms.dtype
        for name in names:
            terms = terms + self._adapted(name, own) * self.scaling[name]
        return terms.to(dtype)

    def _adapted(self, name: str, own: Tensor) -> Tensor:
        """Return this rank's slice or term of B A x, unscaled."""
        first, second, group = self.lora_A[name], self.lora_B[name], self.base_layer.tp_group
        own = self.lora_dropout[name](self._cast_input_dtype(own, first.weight.dtype))
        enter = partial(enter_shard, group=group)
        if self._bias_is_whole():
            return _times(second, _times(first, own), enter, add_bias=False)
        copied = partial(enter_copies, shard=self.base_layer.tp_shard, group=group)
        return _times(second, _times(first, own, enter), copied)

    @property
    def tp_adapters(self) -> dict[str, tuple[Layout, tuple[int, ...]]]:
        """The layout and the whole shape of each parameter of the adapters, by its name in the layer."""
        found: dict[str, tuple[Layout, tuple[int, ...]]] = {}
        for adapter in self.lora_A:
            for factor in ("lora_A", "lora_B"):
                for name, parameter in getattr(self, factor)[adapter].named_parameters():
                    layout = factor_layout(self.base_layer, factor, name)
                    shape = list(parameter.shape)
                    if isinstance(layout, Shard):
                        shape[layout.dim] = layout.size
                    found[f"{factor}.{adapter}.{name}"] = layout, tuple(shape)
        return found

    def _bias_is_whole(self) -> bool:
        return self.base_layer.tp_shard.dim == 1

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        """Add an adapter, drawn whole as one process would, of which each rank keeps its part of rank 0's.

        Raises:
            UnsupportedOperation: it is more than A and B.
        """
        self._check(config)
        own = self.in_features, self.out_features
        self.out_features, self.in_features = self.base_layer.whole_shape
        try:
            super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)
        finally:
            self.in_features, self.out_features = own
        self.keep_part(adapter_name)

    def _check(self, config: Any) -> None:
        base = self.base_layer
        if self.resolve_lora_variant(config=config) is not None:
            raise _unsupported(base, "a variant of LoRA, such as DoRA", "use plain LoRA")
        check_start(config, base.tp_planned.path)
        if config.lora_bias and base.tp_inside and self._bias_is_whole():
            raise _unsupported(base, "lora_bias, which each rank would add", "leave it out")

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the adapters to this rank's part of the weight.

        Raises:
            ValueError, RankFailure: with `safe_merge`, on every rank if one would have numbers that are not finite.
        """
        if not safe_merge:
            super().merge(safe_merge, adapter_names)
            return
        with self.base_layer.tp_group.agreement(f"fusing adapters into {self.base_layer.tp_planned.path}"):
            super().merge(safe_merge, adapter_names)

    def keep_part(self, adapter_name: str) -> None:
        """Keep this rank's part of an adapter that is whole, as rank 0 has it."""
        base = self.base_layer
        group = base.tp_group
        for factor in ("lora_A", "lora_B"):
            for name, parameter in getattr(self, factor)[adapter_name].named_parameters():
                whole = parameter.detach() if parameter.is_meta else group.from_first(parameter.detach())
                layout = factor_layout(base, factor, name)
                parameter.data = local_slice(whole, layout, group.rank, group.degree)
        self.lora_A[adapter_name].in_features = self.lora_A[adapter_name].weight.shape[1]
        self.lora_B[adapter_name].out_features = self.lora_B[adapter_name].weight.shape[0]


class SummedLoraLinear(lora.Linear):  # type: ignore[misc]
    """A LoRA layer around a whole Linear of whose gradient each rank knows a part, such as a router among experts."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what PEFT's layer returns; the gradients of A and B are summed over the ranks."""
        names = _added(self)
        if not names or kwargs.get("adapter_names") is not None:
            return super().forward(x, *args, **kwargs)
        output, enter = self.base_layer(x), partial(enter_shard, group=self.base_layer.tp_sums_gradients)
        dtype = output.dtype
        for name in names:
            first, second = self.lora_A[name], self.lora_B[name]
            own = self.lora_dropout[name](self._cast_input_dtype(x, first.weight.dtype))
            output = output + _times(second, _times(first, own, enter), enter) * self.scaling[name]
        return output.to(dtype)


def _times(
    factor: Any, x: Tensor, enter: Callable[[Tensor], Tensor] = lambda weight: weight, add_bias: bool = True
) -> Tensor:
    """Return what A or B makes of an input.

    Args:
        factor: A or B.
        x: The input.
        enter: What a weight goes through, so that its gradient is summed over the ranks that know a part of it.
        add_bias: Whether its bias is added, if it has one.

    Raises:
        UnsupportedOperation: it is offloaded, and more is asked than its output.
    """
    biased = add_bias and factor.bias is not None
    if not is_hooked(factor):
        return linear(x, enter(factor.weight), enter(factor.bias) if biased else None)
    # What brings its weight does so when it is called: nothing else may take the weight.
    if torch.is_grad_enabled() and factor.weight.requires_grad:
        raise UnsupportedOperation("gradients of an offloaded adapter are not supported: use torch.no_grad()")
    if factor.bias is not None and not add_bias:
        raise UnsupportedOperation("an offloaded adapter with lora_bias is not supported: leave it out")
    return factor(x)  # type: ignore[no-any-return]


def adopt(layer: nn.Module, base: nn.Module) -> None:
    """Make `layer`, an adapter layer that was given a base which takes part in sharding, do its rank's part.

    Raises:
        UnsupportedOperation: it is another kind of adapter.
    """
    classes = _LOCAL if isinstance(base, LocalLayer) else _SUMMED
    if type(layer) in classes.values():
        return
    if type(layer) not in classes or not isinstance(base, nn.Linear):
        kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
        raise _unsupported(base, f"an adapter layer of kind {kind}", "use LoRA on Linears")
    layer.__class__ = classes[type(layer)]


def check_start(config: Any, place: str) -> None:
    """Refuse an adapter that starts from the whole weight of its base layer, and may change it.

    Raises:
        UnsupportedOperation: it is one.
    """
    start = getattr(config, "init_lora_weights", True)
    if not any(start is plain or start == plain for plain in _PLAIN_STARTS):
        raise UnsupportedOperation(
            f"init_lora_weights={start!r}, which reads the whole weight, is not supported on {place}, which is sharded "
            'with tensor parallelism: use True or "gaussian"'
        )


def _added(layer: Any) -> list[str]:
    """Return the adapters that are added to what the base layer returns, and not in its weight."""
    if layer.disable_adapters or layer.merged:
        return []
    return [name for name in layer.active_adapters if name in layer.lora_A]


def factor_layout(base: LocalLayer, factor: str, name: str) -> Layout:
    """Return how a parameter of a factor, `"lora_A"` or `"lora_B"`, lies on the ranks, by the base layer's cut."""
    follows = factor == ("lora_B" if base.tp_shard.dim == 0 else "lora_A")
    return base.tp_shard if follows else Replicated()


def _unsupported(base: nn.Module, what: str, fix: str) -> UnsupportedOperation:
    place = base.tp_planned.path if isinstance(base, LocalLayer) else f"a {type(base).__name__}"
    return UnsupportedOperation(
        f"{what} is not supported on {place}, which is sharded with tensor parallelism: {fix}"
    )


class LocalTorchaoLoraLinear(LocalLoraLinear, TorchaoLoraLinear):  # type: ignore[misc]
    """A `LocalLoraLinear` whose base is quantized; fusing quantizes this rank's part again."""


class SummedTorchaoLoraLinear(SummedLoraLinear, TorchaoLoraLinear):  # type: ignore[misc]
    """A `SummedLoraLinear` whose base is quantized."""


_LOCAL = {lora.Linear: LocalLoraLinear, TorchaoLoraLinear: LocalTorchaoLoraLinear}
_SUMMED = {lora.Linear: SummedLoraLinear, TorchaoLoraLinear: SummedTorchaoLoraLinear}
"""Layers of PEFT -> what takes their place around a rank's slice, and around a Linear with a part of its gradient."""
