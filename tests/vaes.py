"""Tiny autoencoders that decode in tiles, and latents for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import diffusers
import torch
from torch import Tensor

from shardwise.models.decode import TILINGS
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
_FRAMES = {"tile_sample_min_num_frames": 12, "tile_sample_stride_num_frames": 8}


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


def dc() -> Any:
    """Return Sana's kind, of blocks of convolutions and of linear attention."""
    sizes = {"encoder_block_out_channels": (8, 16), "decoder_block_out_channels": (8, 16)}
    sizes |= {f"{side}_layers_per_block": (1, 1) for side in ("encoder", "decoder")}
    sizes |= {f"{side}_block_types": ("ResBlock", "EfficientViTBlock") for side in ("encoder", "decoder")}
    sizes |= {f"{side}_qkv_multiscales": ((), (5,)) for side in ("encoder", "decoder")}
    return _tiled(diffusers.AutoencoderDC(latent_channels=4, attention_head_dim=4, **sizes), **_small(2))


def hunyuan_image() -> Any:
    sizes = {"block_out_channels": (32, 64), "layers_per_block": 1, "spatial_compression_ratio": 2}
    vae = diffusers.AutoencoderKLHunyuanImage(3, 3, 4, **sizes, sample_size=16)
    return _tiled(vae)


def hunyuan_video() -> Any:
    """Return one that decodes long videos in tiles of frames, which are again of tiles."""
    sizes = {
        "block_out_channels": (8, 8, 16, 16),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": 4,
    }
    return _tiled(diffusers.AutoencoderKLHunyuanVideo(**sizes), **_small(8), **_FRAMES)


def hunyuan_video_15() -> Any:
    sizes = {"block_out_channels": (8, 16, 16), "layers_per_block": 1, "latent_channels": 4}
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        **sizes, spatial_compression_ratio=4, temporal_compression_ratio=2
    )
    return _tiled(
        vae,
        tile_sample_min_height=16,
        tile_sample_min_width=16,
        tile_latent_min_height=4,
        tile_latent_min_width=4,
    )


def ltx(**config: Any) -> Any:
    sizes = {"block_out_channels": (8, 8, 8, 8), "decoder_block_out_channels": (8, 8, 8, 8)}
    sizes |= dict.fromkeys(("layers_per_block", "decoder_layers_per_block"), (1, 1, 1, 1, 1))
    scaling = (True, True, False, False)
    sizes |= {"spatio_temporal_scaling": scaling, "decoder_spatio_temporal_scaling": scaling, "patch_size": 1}
    vae = diffusers.AutoencoderKLLTXVideo(latent_channels=8, **sizes, **config)
    vae.use_framewise_decoding = True
    return _tiled(vae, **_small(4), **_FRAMES)


def ltx2() -> Any:
    sizes = {"block_out_channels": (8, 8, 8, 8), "decoder_block_out_channels": (8, 16, 32)}
    sizes |= {"layers_per_block": (1, 1, 1, 1, 1), "decoder_layers_per_block": (1, 1, 1, 1), "patch_size": 1}
    vae = diffusers.AutoencoderKLLTX2Video(latent_channels=8, **sizes)
    return _tiled(vae, **_small(vae.spatial_compression_ratio))


CASES: dict[str, tuple[Callable[[], Any], tuple[int, ...], int]] = {
    "AutoencoderDC": (dc, (1, 4, 7, 9), 6),
    "AutoencoderKL": (kl, (1, 4, 19, 14), 12),
    "AutoencoderKL-batch": (kl, (3, 4, 9, 14), 6),
    "AutoencoderKLFlux2": (flux2, (2, 4, 13, 11), 6),
    "AutoencoderKLHunyuanImage": (hunyuan_image, (1, 4, 9, 13), 6),
    "AutoencoderKLHunyuanVideo": (hunyuan_video, (1, 4, 5, 7, 4), 9),
    "AutoencoderKLHunyuanVideo-frames": (hunyuan_video, (1, 4, 5, 4, 3), 3),
    "AutoencoderKLHunyuanVideo-tiles": (hunyuan_video, (1, 4, 2, 7, 6), 6),
    "AutoencoderKLHunyuanVideo15": (hunyuan_video_15, (1, 4, 3, 5, 7), 6),
    "AutoencoderKLLTX2Video": (ltx2, (1, 8, 2, 8, 7), 6),
    "AutoencoderKLLTXVideo": (ltx, (1, 8, 5, 5, 6), 12),
    "AutoencoderKLQwenImage": (qwen_image, (2, 4, 1, 7, 9), 6),
    "AutoencoderKLWan": (wan, (1, 4, 3, 8, 9), 6),
    "AutoencoderKLWan-patches": (wan22, (1, 4, 2, 5, 7), 4),
}
"""Name -> what makes the autoencoder, the shape of its latents, and how many tiles these are."""


def _small(factor: int) -> dict[str, int]:
    """Return tiles of 4 x 6 latents, in steps of 3 x 5."""
    return {name: size * factor // 8 for name, size in _TILES.items()}


def tiled(vae: Any, z: Tensor) -> tuple[Callable[[], Tensor], Sequence[str]]:
    """Return the tiled decode of diffusers that decodes these latents, and the blending that ends it."""
    name, framewise = "tiled_decode", getattr(vae, "use_framewise_decoding", False)
    if framewise and z.shape[2] > vae.tile_sample_min_num_frames // vae.temporal_compression_ratio:
        name = "_temporal_tiled_decode"

    def decode() -> Tensor:
        output = getattr(type(vae), name)(vae, z, *([None] if "LTX" in type(vae).__name__ else []))
        return getattr(output, "sample", output)

    return decode, TILINGS[name]


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
