"""Tensor parallel classes of diffusers models that have no plan here: it is derived from names when they are loaded."""

from __future__ import annotations

from typing import Any

import diffusers

from shardwise.models.mixin import TensorParallelMixin


def class_of(name: str) -> type[Any] | None:
    """Return the tensor parallel class of a diffusers model, or None if diffusers has no model of this name."""
    base = getattr(diffusers, name, None)
    if not (isinstance(base, type) and issubclass(base, diffusers.ModelMixin)):
        return None
    doc = f"{name} of diffusers, with tensor parallelism by a plan that is derived from the names of its modules."
    return type(name, (TensorParallelMixin, base), {"__doc__": doc, "__module__": "shardwise.models"})
