"""The model classes whose code rounds to bf16 in a forward of any dtype: in fp32 they are compared without."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from shardwise.verification.rounding import unrounded
from shardwise.verification.run import main_dtype

ROUNDS_IN_ANY_DTYPE = frozenset({"Kandinsky5Transformer3DModel", "SanaWMTransformer3DModel"})
"""Classes whose code rounds queries and keys to bf16 in every forward, also in one of fp32."""


def exactly(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which a model computes in the dtype of its weights: one process and ranks alike."""
    return unrounded(main_dtype(model)) if type(model).__name__ in ROUNDS_IN_ANY_DTYPE else nullcontext()
