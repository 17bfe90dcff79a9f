"""Tiny autoencoders that decode in tiles, and latents for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor

from tests.helpers import randomize

_TWO_STAGES = {
    "block_out_channels": (8, 16),
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "latent_channels": 4,
    "norm_num_groups": 4,
    "sample_size": 16,
}
_VIDEO = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 2, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
}
_TILES = {
    "tile_sample_min_height": 32,
    "tile_sample_min_width": 48,
    "tile_sample_stride_height": 24,
    "tile_sample_stride_width": 40,
}


def kl() -> Any:
    """Return one whose tiles are squares of 8 latents, in steps of 6."""
    return _tiled(diffusers.AutoencoderKL(**_TWO_STAGES))


def flux2() -> Any:
    return _tiled(diffusers.AutoencoderKLFlux2(**_TWO_STAGES))


def qwen_image() -> Any:
    """Return one whose tiles are 4 x 6 latents, in steps of 3 x 5."""
    return _tiled(diffusers.AutoencoderKLQwenImage(**_VIDEO), **_TILES)


def wan() -> Any:
    """Return one that decodes frame by frame, with a cache for each tile."""
    return _tiled(diffusers.AutoencoderKLWan(**_VIDEO), **_TILES)


def wan22() -> Any:
    """Return one whose decoder makes patches of 2 x 2 pixels, as Wan 2.2's does."""
    sizes = {
        "patch_size": 2,
        "in_channels": 12,
        "out_channels": 12,
        "is_residual": True,
        "decoder_base_dim": 8,
    }
    vae = diffusers.AutoencoderKLWan(**_VIDEO, **sizes, scale_factor_spatial=16)
    return _tiled(vae, **{name: 2 * size for name, size in _TILES.items()})


CASES: dict[str, tuple[Callable[[], Any], tuple[int, ...], int]] = {
    "AutoencoderKL": (kl, (1, 4, 19, 14), 12),
    "AutoencoderKL-batch": (kl, (3, 4, 9, 14), 6),
    "AutoencoderKLFlux2": (flux2, (2, 4, 13, 11), 6),
    "AutoencoderKLQwenImage": (qwen_image, (2, 4, 1, 7, 9), 6),
    "AutoencoderKLWan": (wan, (1, 4, 3, 8, 9), 6),
    "AutoencoderKLWan-patches": (wan22, (1, 4, 2, 5, 7), 4),
}
"""Name -> what makes the autoencoder, the shape of its latents, and how many tiles these are."""


def _tiled(vae: Any, **sizes: int) -> Any:
    randomize(vae)
    with torch.no_grad():
        for parameter in vae.decoder.conv_out.parameters():
            parameter.mul_(0.02)  # Wan clamps to 1, which would hide much
    vae.enable_tiling(**sizes)
    return vae


def latents(case: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(CASES[case][1], generator=torch.Generator().manual_seed(seed)).to(dtype)


@torch.no_grad()
def decoded(vae: Any, z: Tensor) -> Tensor:
    return vae.decode(z, return_dict=False)[0]
