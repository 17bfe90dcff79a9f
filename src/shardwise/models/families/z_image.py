"""Z-Image: single-stream blocks over image and text, behind refiners of each; inputs are lists, one item a sample."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from diffusers import ZImageTransformer2DModel as _ZImageTransformer2DModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent

PLAN = {
    "noise_refiner.*.attention.to_q": "colwise",
    "noise_refiner.*.attention.to_k": "colwise",
    "noise_refiner.*.attention.to_v": "colwise",
    "noise_refiner.*.attention.to_out.0": "rowwise",
    "noise_refiner.*.feed_forward.w1": "colwise",
    "noise_refiner.*.feed_forward.w3": "colwise",
    "noise_refiner.*.feed_forward.w2": "rowwise",
    "context_refiner.*.attention.to_q": "colwise",
    "context_refiner.*.attention.to_k": "colwise",
    "context_refiner.*.attention.to_v": "colwise",
    "context_refiner.*.attention.to_out.0": "rowwise",
    "context_refiner.*.feed_forward.w1": "colwise",
    "context_refiner.*.feed_forward.w3": "colwise",
    "context_refiner.*.feed_forward.w2": "rowwise",
    # Image features beside the text, in the model that edits.
    "siglip_refiner.*.attention.to_q": IfPresent("colwise"),
    "siglip_refiner.*.attention.to_k": IfPresent("colwise"),
    "siglip_refiner.*.attention.to_v": IfPresent("colwise"),
    "siglip_refiner.*.attention.to_out.0": IfPresent("rowwise"),
    "siglip_refiner.*.feed_forward.w1": IfPresent("colwise"),
    "siglip_refiner.*.feed_forward.w3": IfPresent("colwise"),
    "siglip_refiner.*.feed_forward.w2": IfPresent("rowwise"),
    "layers.*.attention.to_q": "colwise",
    "layers.*.attention.to_k": "colwise",
    "layers.*.attention.to_v": "colwise",
    "layers.*.attention.to_out.0": "rowwise",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "cap_embedder.1": "rowwise_split_input",
    "noise_refiner.*.adaLN_modulation.0": "rowwise_split_input",
    "layers.*.adaLN_modulation.0": "rowwise_split_input",
}


class ZImageTransformer2DModel(TensorParallelMixin, _ZImageTransformer2DModel):  # type: ignore[misc]
    """The transformer of Z-Image, with tensor parallelism. Heads: 30; whole: small embeddings, final layer, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "all_patch_size": (2,),
    "all_f_patch_size": (1,),
    "in_channels": 3,
    "dim": 48,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 4,
    "n_kv_heads": 4,
    "cap_feat_dim": 20,
    "axes_dims": [2, 4, 6],
    "axes_lens": [128, 16, 8],
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 15 image tokens (5 x 3), and texts of 7, 8, ... tokens.

    The model pads each to 32 tokens; the last text is longer, so that the others are masked. A model that edits
    gets two images and two texts for each sample: a clean image with its features, and a noisy one without.
    """
    patch, frames = config["all_patch_size"][0], config["all_f_patch_size"][0]
    image, text = (config["in_channels"], frames, 5 * patch, 3 * patch), config["cap_feat_dim"]
    draw = partial(torch.randn, generator=generator)
    sizes = {"patch_size": patch, "f_patch_size": frames, "t": torch.rand(batch, generator=generator)}
    if config.get("siglip_feat_dim") is None:
        lengths = [*range(7, 6 + batch), 35]
        return {
            "x": [draw(image) for _ in lengths],
            "cap_feats": [draw(length, text) for length in lengths],
            **sizes,
        }
    return {
        "x": [[draw(image), draw(image)] for _ in range(batch)],
        "cap_feats": [[draw(7, text), draw(5, text)] for _ in range(batch)],
        "siglip_feats": [[draw(3, 5, config["siglip_feat_dim"]), None] for _ in range(batch)],
        "image_noise_mask": [[0, 1]] * batch,
        **sizes,
    }


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "edit": ({"siglip_feat_dim": 28}, {"batch": 1}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
