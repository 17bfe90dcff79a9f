"""The check of equal inputs: every forward compares what the ranks were given, before anything is sent.

Ranks that draw from other noise or encode another prompt do not fail. Each computes its slices of another picture,
and the sums mix them. Off by default: it reads every input and waits for all ranks.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from shardwise.config import TensorParallelConfig
from shardwise.errors import UnequalInputs
from shardwise.runtime.group import CountingGroup, TensorParallelGroup

VARIABLE = "SHARDWISE_DEBUG"
"""The environment variable that asks for the check, when it is `1`."""


def require_equal_inputs(model: nn.Module, config: TensorParallelConfig, group: TensorParallelGroup) -> None:
    """Make every forward of a sharded model compare its inputs, if any rank asks for it.

    The ranks agree on it, here and once: a rank that compared alone would wait for the others in vain.
    """
    if isinstance(group, CountingGroup):
        return  # a rank without others
    asked = config.debug or os.environ.get(VARIABLE) == "1"
    if any(group.exchange(asked)):
        model.register_forward_pre_hook(EqualInputs(group), with_kwargs=True)


class EqualInputs:
    """A forward pre-hook that raises on every rank when the ranks call a model with different inputs.

    Not while compiling: a compiled model is compared in the forwards that run eagerly, if there are any.
    """

    def __init__(self, group: TensorParallelGroup) -> None:
        self.group = group

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the inputs of one forward.

        Raises:
            UnequalInputs: naming every argument that differs, and what each rank has there.
            RankFailure: a rank has not made the call.
        """
        if torch.compiler.is_compiling():
            return
        everywhere = self.group.exchange(describe(model, args, kwargs))
        names = dict.fromkeys(name for theirs in everywhere for name in theirs)
        lines = []
        for name in names:
            values = [theirs.get(name, "nothing") for theirs in everywhere]
            if len(set(values)) > 1:
                lines += [f"  {name}", *(f"    rank {rank}: {value}" for rank, value in enumerate(values))]
        if lines:
            hint = "give every rank the same prompt and an equally seeded generator"
            listing = "\n".join(lines)
            raise UnequalInputs(
                f"the ranks called {type(model).__name__} with different inputs: {hint}\n{listing}"
            )


def describe(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
    """Return a short text for each value in a model's inputs, by the argument's name and the place in it.

    Equal texts mean equal values for tensors and plain data; of other objects only the class is compared.
    """
    try:
        named = dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    except TypeError:  # the forward will say what is wrong with the call
        named = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
    leaves, _ = tree_flatten_with_path(named)
    return {keystr(path[:1])[2:-2] + keystr(path[1:]): text_of(value) for path, value in leaves}


def text_of(value: object) -> str:
    """Return a short text for a value; equal texts mean equal values for tensors and plain data."""
    if isinstance(value, Tensor):
        data = value.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} {_hash(data)}"
    if isinstance(value, str):
        return f"{value[:40]!r} {_hash(value.encode())}"
    if value is None or isinstance(value, (bool, int, float, complex, torch.dtype, torch.Size)):
        return repr(value)
    return type(value).__name__


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
