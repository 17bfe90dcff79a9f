"""Small IP adapters of random numbers, in the formats that diffusers loads: XLabs' for FLUX.1, InstantX's for SD3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

IMAGE_DIMS = (14, 18)
"""Widths of the image features that the two adapters of FLUX.1 read."""


def load_flux_adapters(model: Any, image_dims: tuple[int, ...] = IMAGE_DIMS) -> None:
    """Put one adapter for each width of image features into a FLUX.1, each with a scale of its own in each block."""
    model._load_ip_adapter_weights([flux_adapter(model, dim, seed) for seed, dim in enumerate(image_dims)])
    scale_adapters(model, 1.0)


def load_sd3_adapter(model: Any) -> None:
    """Put an adapter into an SD3, with a scale of its own in each attention."""
    model._load_ip_adapter_weights(sd3_adapter(model))
    scale_adapters(model, 1.0)


def scale_adapters(model: Any, factor: float) -> None:
    """Set the scale of every adapter, no two alike, as `set_ip_adapter_scale` of a pipeline does."""
    processors = [p for p in model.attn_processors.values() if hasattr(p, "to_k_ip")]
    for i, processor in enumerate(processors):
        scale = factor * (0.6 + 0.3 * i)
        many = isinstance(processor.scale, list)
        processor.scale = [scale - 2.0 * j * factor for j in range(len(processor.scale))] if many else scale


def flux_adapter(model: Any, image_dim: int, seed: int, tokens: int = 4) -> dict[str, dict[str, Tensor]]:
    """Return the state dict of an adapter: an image projection to 4 tokens, keys and values for each double block."""
    text, width = model.config.joint_attention_dim, model.inner_dim
    image = {"proj": (tokens * text, image_dim), "norm": (text,)}
    heads = {
        f"{block}.{name}": (width, text)
        for block in range(model.config.num_layers)
        for name in ("to_k_ip", "to_v_ip")
    }
    return {"image_proj": _linears(image, seed), "ip_adapter": _linears(heads, seed + 100)}


def sd3_adapter(model: Any, image_dim: int = 14, hidden: int = 64) -> dict[str, dict[str, Tensor]]:
    """Return the state dict of an adapter: a resampler to 5 tokens, and a processor for each attention."""
    width, head, time = model.inner_dim, model.config.attention_head_dim, 22
    image = {
        "proj_in": (hidden, image_dim),
        "proj_out": (width, hidden),
        "norm_out": (width,),
        "time_embedding.linear_1": (hidden, time),
        "time_embedding.linear_2": (hidden, hidden),
    }
    fused = {"latents": (1, 5, hidden)}
    for layer in range(4):  # as many as the class builds
        image |= {f"layers.{layer}.{name}": (hidden,) for name in ("0.norm1", "0.norm2", "1.0")}
        image |= {f"layers.{layer}.2.1": (4 * hidden, hidden)}
        fused |= {
            f"layers.{layer}.0.to_q.weight": (hidden, hidden),
            f"layers.{layer}.0.to_kv.weight": (2 * hidden, hidden),
            f"layers.{layer}.0.to_out.weight": (hidden, hidden),
            f"layers.{layer}.1.1.weight": (4 * hidden, hidden),
            f"layers.{layer}.1.3.weight": (hidden, 4 * hidden),
        }
    heads: dict[str, tuple[int, ...]] = {}
    norms: dict[str, tuple[int, ...]] = {}
    for i in range(len(model.attn_processors)):
        norms[f"{i}.norm_ip.linear"] = (2 * width, hidden)
        heads |= {f"{i}.{name}.weight": (width, width) for name in ("to_k_ip", "to_v_ip")}
        heads |= {f"{i}.{name}.weight": (head,) for name in ("norm_q", "norm_k", "norm_ip_k")}
    return {
        "image_proj": _linears(image, 5) | _tensors(fused, 6),
        "ip_adapter": _linears(norms, 7) | _tensors(heads, 8),
    }


def _linears(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Return a weight of each shape, and a bias."""
    weights = {f"{name}.weight": shape for name, shape in shapes.items()}
    return _tensors(weights | {f"{name}.bias": shape[:1] for name, shape in shapes.items()}, seed)


def _tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Return random tensors that are not zero; weights of norms are around one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1 and name.endswith("weight")
        tensors[name] = noise * shape[-1] ** -0.5 if len(shape) > 1 else 0.2 * noise + float(is_norm)
    return tensors
