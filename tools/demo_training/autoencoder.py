"""The first two stages: an autoencoder for the pictures, and a sharper decoder for it.

Owns how pictures become latents. The second stage leaves the encoder alone, so latents made after the first
stay valid; it makes up for what the first had no time to learn, and prepares for latents that are a little off.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLFlux2
from PIL import Image
from torch import Tensor
from torch.optim import AdamW

from .fitting import fit, round_to_bfloat16
from .settings import AutoencoderSettings, DecoderSettings

LATENT_CHANNELS = 4
PATCH = 2
_CHUNK = 64


def new_autoencoder() -> AutoencoderKLFlux2:
    """Build an untrained autoencoder that makes a picture four times smaller each way."""
    return AutoencoderKLFlux2(
        block_out_channels=(16, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=64,
        mid_block_add_attention=False,
    )


def to_tensor(pictures: Sequence[Image.Image]) -> Tensor:
    """Stack pictures into a tensor of bytes, channels first: a quarter of the memory of floats."""
    return torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures])).permute(0, 3, 1, 2)


def _as_floats(pictures: Tensor) -> Tensor:
    return pictures.float() / 127.5 - 1


def train_autoencoder(
    autoencoder: AutoencoderKLFlux2, pictures: Tensor, settings: AutoencoderSettings
) -> list[float]:
    """Train the whole autoencoder and measure its latents; return the loss of each step."""

    def batch_loss() -> Tensor:
        wanted = _as_floats(pictures[torch.randint(len(pictures), (settings.schedule.batch,))])
        latents = autoencoder.encode(wanted).latent_dist
        drawn = autoencoder.decode(latents.sample()).sample
        surplus = (latents.mean.square() + latents.var - 1 - latents.logvar).mean() / 2
        loss: Tensor = picture_loss(drawn, wanted, settings.edge_weight) + settings.kl_weight * surplus
        return loss

    parameters = list(autoencoder.parameters())
    optimizer = AdamW(
        parameters, lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay
    )
    losses = fit("autoencoder", batch_loss, parameters, [optimizer], settings.schedule)
    round_to_bfloat16(autoencoder)
    _measure_latents(autoencoder, pictures[: settings.measured_pictures])
    round_to_bfloat16(autoencoder)
    return losses


def sharpen_decoder(
    autoencoder: AutoencoderKLFlux2, pictures: Tensor, settings: DecoderSettings
) -> list[float]:
    """Train the decoder alone, on noisy latents; return the loss of each step."""
    latents = encode(autoencoder, pictures)
    noise_scale = settings.latent_noise * latents.std(dim=(0, 2, 3), keepdim=True)
    batch = settings.schedule.batch

    def batch_loss() -> Tensor:
        chosen = torch.randint(len(pictures), (batch,))
        noise = noise_scale * torch.rand(batch, 1, 1, 1) * torch.randn(batch, *latents.shape[1:])
        drawn = autoencoder.decode(latents[chosen] + noise).sample
        return picture_loss(drawn, _as_floats(pictures[chosen]), settings.edge_weight)

    parameters = [*autoencoder.decoder.parameters(), *autoencoder.post_quant_conv.parameters()]
    optimizer = AdamW(
        parameters, lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay
    )
    losses = fit("decoder", batch_loss, parameters, [optimizer], settings.schedule)
    round_to_bfloat16(autoencoder)
    return losses


def picture_loss(drawn: Tensor, wanted: Tensor, edge_weight: float) -> Tensor:
    """Tell how far a picture is off, counting the pixels near edges `1 + edge_weight` times.

    The inside of a shape is easily learned; what tells the shapes apart is their edges, which are few pixels.
    """
    off = drawn - wanted
    contrast = F.max_pool2d(wanted, 5, stride=1, padding=2) + F.max_pool2d(-wanted, 5, stride=1, padding=2)
    weight = 1 + edge_weight * contrast.amax(dim=1, keepdim=True).clamp(0, 1)
    return (weight * (off.abs() + off.square())).mean()


@torch.no_grad()
def encode(autoencoder: AutoencoderKLFlux2, pictures: Tensor) -> Tensor:
    """Turn pictures into latents, without the randomness that training adds."""
    chunks = torch.split(_as_floats(pictures), _CHUNK)
    return torch.cat([autoencoder.encode(chunk).latent_dist.mode() for chunk in chunks])


def to_tokens(autoencoder: AutoencoderKLFlux2, latents: Tensor) -> Tensor:
    """Turn latents into what the transformer sees: one token of 16 normalised numbers for each 2 x 2 patch."""
    patches = F.pixel_unshuffle(latents, PATCH)
    mean = autoencoder.bn.running_mean.view(1, -1, 1, 1)
    variance = autoencoder.bn.running_var.view(1, -1, 1, 1)
    normalised: Tensor = (patches - mean) / torch.sqrt(variance + autoencoder.config.batch_norm_eps)
    return normalised.flatten(2).transpose(1, 2)


@torch.no_grad()
def _measure_latents(autoencoder: AutoencoderKLFlux2, pictures: Tensor) -> None:
    patches = F.pixel_unshuffle(encode(autoencoder, pictures), PATCH)
    autoencoder.bn.running_mean.copy_(patches.mean(dim=(0, 2, 3)))
    autoencoder.bn.running_var.copy_(patches.var(dim=(0, 2, 3)))
