"""The tensor parallel model classes: each is the diffusers class of its name, with a plan and sharded loading.

Any other model class of diffusers can be imported from here as well: its plan is derived from names.

One file per family holds the plan, the class, and a tiny configuration with inputs to prove the plan on.
Adding a model is adding such a file and a line here. Classes are imported when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.models.cogvideox import CogVideoXTransformer3DModel
    from shardwise.models.flux import FluxTransformer2DModel
    from shardwise.models.flux2 import Flux2Transformer2DModel
    from shardwise.models.hunyuan_video import HunyuanVideoTransformer3DModel
    from shardwise.models.ltx import LTXVideoTransformer3DModel
    from shardwise.models.lumina2 import Lumina2Transformer2DModel
    from shardwise.models.minimax_h3 import MiniMaxH3Transformer3DModel
    from shardwise.models.qwen_image import QwenImageTransformer2DModel
    from shardwise.models.sd3 import SD3Transformer2DModel
    from shardwise.models.wan import WanTransformer3DModel
    from shardwise.models.z_image import ZImageTransformer2DModel

FAMILIES = {
    "CogVideoXTransformer3DModel": "cogvideox",
    "Flux2Transformer2DModel": "flux2",
    "FluxTransformer2DModel": "flux",
    "HunyuanVideoTransformer3DModel": "hunyuan_video",
    "LTXVideoTransformer3DModel": "ltx",
    "Lumina2Transformer2DModel": "lumina2",
    "MiniMaxH3Transformer3DModel": "minimax_h3",
    "QwenImageTransformer2DModel": "qwen_image",
    "SD3Transformer2DModel": "sd3",
    "WanTransformer3DModel": "wan",
    "ZImageTransformer2DModel": "z_image",
}
"""Class name -> the module of this package that holds it."""

__all__ = [
    "FAMILIES",
    "CogVideoXTransformer3DModel",
    "Flux2Transformer2DModel",
    "FluxTransformer2DModel",
    "HunyuanVideoTransformer3DModel",
    "LTXVideoTransformer3DModel",
    "Lumina2Transformer2DModel",
    "MiniMaxH3Transformer3DModel",
    "QwenImageTransformer2DModel",
    "SD3Transformer2DModel",
    "WanTransformer3DModel",
    "ZImageTransformer2DModel",
]


def __getattr__(name: str) -> Any:
    """Import a model class when it is first asked for; one of diffusers without a plan here is made then."""
    if name in FAMILIES:
        return getattr(import_module(f"{__name__}.{FAMILIES[name]}"), name)
    if name.startswith("_"):
        raise AttributeError(name)
    cls = import_module(f"{__name__}.unplanned").class_of(name)
    if cls is None:
        raise AttributeError(f"shardwise.models has no {name}, and diffusers no model of that name")
    return globals().setdefault(name, cls)


def __dir__() -> list[str]:
    """List the model classes."""
    return sorted(__all__)
