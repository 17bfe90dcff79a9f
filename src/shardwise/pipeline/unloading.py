"""Freeing text encoders once they have done their work."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from shardwise.errors import UnsupportedState


class Unloaded:
    """Stands where a text encoder was: it still says its dtype and device, and nothing else."""

    def __init__(self, name: str, encoder: Any) -> None:
        self.name, self.dtype, self.device = name, encoder.dtype, encoder.device

    def _gone(self) -> NoReturn:
        raise UnsupportedState(
            f"{self.name} was unloaded after the first call had encoded its prompt "
            "(unload_text_encoders_after_encoding=True): pass prompt_embeds, or load the pipeline again"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to encode."""
        self._gone()

    def __getattr__(self, name: str) -> Any:
        """Refuse everything else; what Python and libraries look for in any object is not there."""
        if name.startswith("_"):
            raise AttributeError(name)
        self._gone()

    def __repr__(self) -> str:
        """Return what it stands for."""
        return f"Unloaded({self.name})"


def unload_after_encoding(pipeline: Any) -> None:
    """Free the text encoders of a pipeline when its first denoising loop begins.

    Pipelines ask for their progress bar there, so it is what tells.
    """
    bar = pipeline.progress_bar

    def progress_bar(*args: Any, **kwargs: Any) -> Any:
        unload(pipeline)
        return bar(*args, **kwargs)

    pipeline.progress_bar = progress_bar


def unload(pipeline: Any) -> list[str]:
    """Free the text encoders of a pipeline, and return their names."""
    names = [
        name
        for name, part in pipeline.components.items()
        if name.startswith("text_encoder") and isinstance(part, nn.Module)
    ]
    for name in names:
        setattr(pipeline, name, Unloaded(name, getattr(pipeline, name)))
    if names and torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()
    return names
