"""The embedded demo: a tiny, really trained text-to-image pipeline, and the job that draws with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CALL: dict[str, Any] = {
    "height": 64,
    "width": 64,
    "num_inference_steps": 12,
    "guidance_scale": 2.0,
    "max_sequence_length": 16,
    "text_encoder_out_layers": (1, 2, 3),
}
"""The arguments the embedded pipeline was trained for; its class's defaults are for a model of 4 billion weights."""


def demo_model_path() -> Path:
    """Return the folder of the embedded pipeline, in diffusers format."""
    return Path(__file__).parent / "model"
