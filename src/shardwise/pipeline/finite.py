"""Pictures of numbers that are not finite are an error, and not a black picture.

A step notes on the device whether its numbers are finite, and nothing waits for that. Whoever decodes looks once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import NotFinite

_CAUSE = (
    "weights, an adapter or an argument that is not a number, or a dtype that is too small for them (try bfloat16 in "
    "place of float16)"
)


class _Watch:
    """What is known of one call of a pipeline.

    Attributes:
        encoders: For each text encoder that was called, whether all it returned was finite; on its device.
        step: Number of the denoising steps so far.
        first: The first step that returned something not finite, 0 if there was none; on the device.
    """

    def __init__(self) -> None:
        self.encoders: dict[str, Tensor] = {}
        self.begin()

    def begin(self) -> None:
        """Begin to denoise."""
        self.step, self.first = 0, torch.zeros((), dtype=torch.int64)

    def note(self, found: Tensor) -> None:
        """Note what the denoiser has returned in the next step."""
        self.step += 1
        first = self.first.to(found.device)
        bad = (first == 0) & ~found.isfinite().all()
        self.first = torch.where(bad, self.step, first)

    def blame(self) -> str:
        """Return where it began, as far as is known."""
        for name, finite in self.encoders.items():
            if not finite:
                return f"what the {name} returned"
        return f"what the denoiser returned in step {int(self.first)}" if self.first else "the latents"


def watch_finite(pipeline: Any) -> None:
    """Have a pipeline raise before it decodes what is not finite, and after, if the decoder made it so.

    Raises:
        NotFinite: by the pipeline's call; it names the component and the step where it began.
    """
    watch = _Watch()
    for name, encoder in pipeline.components.items():
        if name.startswith("text_encoder") and isinstance(encoder, nn.Module):
            encoder.register_forward_hook(_noting(watch, name))
    bar = pipeline.progress_bar

    def progress_bar(*args: Any, **kwargs: Any) -> Any:
        watch.begin()
        return bar(*args, **kwargs)

    pipeline.progress_bar = progress_bar
    scheduler: Any = getattr(pipeline, "scheduler", None)
    vae: Any = getattr(pipeline, "vae", None)
    if hasattr(scheduler, "step"):
        vars(scheduler)["step"] = MethodType(_watched_step(type(scheduler).step, watch), scheduler)
    if hasattr(vae, "decode"):
        vars(vae)["decode"] = MethodType(_watched_decode(type(vae).decode, watch), vae)


def _noting(watch: _Watch, name: str) -> Any:
    def note(module: nn.Module, args: Any, outputs: Any) -> None:
        found = next(_floats(outputs), None)
        if found is not None:
            watch.encoders[name] = found.isfinite().all() & watch.encoders.get(name, torch.tensor(True)).to(
                found.device
            )

    return note


def _watched_step(step: Any, watch: _Watch) -> Any:
    @wraps(step)
    def watched(self: Any, model_output: Any, *args: Any, **kwargs: Any) -> Any:
        for found in _floats(model_output):
            watch.note(found)
            break
        return step(self, model_output, *args, **kwargs)

    return watched


def _watched_decode(decode: Any, watch: _Watch) -> Any:
    @wraps(decode)
    def watched(self: Any, z: Any, *args: Any, **kwargs: Any) -> Any:
        if not all(bool(tensor.isfinite().all()) for tensor in _floats(z)):
            raise NotFinite(f"no picture: {watch.blame()} is not finite; {_CAUSE}")
        watch.encoders.clear()
        decoded = decode(self, z, *args, **kwargs)
        if not all(bool(tensor.isfinite().all()) for tensor in _floats(decoded)):
            raise NotFinite(f"no picture: what the vae decoded is not finite; {_CAUSE}")
        return decoded

    return watched


def _floats(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of floating-point numbers in what a module of diffusers or transformers takes or returns."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _floats(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _floats(each)
