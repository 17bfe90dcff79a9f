"""The last stage: a transformer and the text encoder that feeds it, trained together by flow matching.

Owns what the transformer is shown while it learns, which must be what `Flux2KleinPipeline` shows it later:
the same latents, the same hidden states of the text encoder, the same position ids, time counted from 0 to 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

from shardwise.demo.world import caption, render, sample_scene

from .autoencoder import LATENT_CHANNELS, PATCH, encode, to_tensor, to_tokens
from .captions import TOKENS, tokenize
from .fitting import fit, round_to_bfloat16
from .settings import DenoiserSettings

TEXT_WIDTH = 96
TEXT_LAYERS = (1, 2, 3)
"""The hidden states of the text encoder that the transformer reads; the last is the normalised output."""

_CHUNK = 64


@dataclass(frozen=True)
class Pairs:
    """Pictures as the transformer sees them, with the tokens of their captions and of the empty caption."""

    latents: Tensor
    ids: Tensor
    mask: Tensor
    empty_ids: Tensor
    empty_mask: Tensor


def sample_pairs(
    autoencoder: AutoencoderKLFlux2, tokenizer: Qwen2Tokenizer, count: int, rng: Random
) -> Pairs:
    """Make up captioned pictures and encode both; the pictures themselves are not kept."""
    captions: list[str] = []
    latents: list[Tensor] = []
    for start in range(0, count, _CHUNK):
        scenes = [sample_scene(rng) for _ in range(min(_CHUNK, count - start))]
        captions += [caption(scene) for scene in scenes]
        pictures = to_tensor([render(scene, rng) for scene in scenes])
        latents.append(to_tokens(autoencoder, encode(autoencoder, pictures)))
    return Pairs(torch.cat(latents), *tokenize(tokenizer, captions), *tokenize(tokenizer, [""]))


def new_transformer() -> Flux2Transformer2DModel:
    """Build an untrained transformer of five blocks whose output, and whose modulation, start at zero."""
    transformer = Flux2Transformer2DModel(
        in_channels=LATENT_CHANNELS * PATCH**2,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=24,
        num_attention_heads=8,
        joint_attention_dim=TEXT_WIDTH * len(TEXT_LAYERS),
        timestep_guidance_channels=64,
        mlp_ratio=2.0,
        axes_dims_rope=(4, 8, 8, 4),
        guidance_embeds=False,
    )
    for linear in (
        transformer.double_stream_modulation_img.linear,
        transformer.double_stream_modulation_txt.linear,
        transformer.single_stream_modulation.linear,
        transformer.norm_out.linear,
        transformer.proj_out,
    ):
        nn.init.zeros_(linear.weight)
    return transformer


def new_text_encoder(tokenizer: Qwen2Tokenizer, vocabulary: int) -> Qwen3ForCausalLM:
    """Build an untrained text encoder of three layers for the tokens of a tokenizer."""
    text_encoder = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            num_hidden_layers=len(TEXT_LAYERS),
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=16,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    nn.init.normal_(text_encoder.model.embed_tokens.weight, std=0.3)
    return text_encoder


def train_denoiser(
    transformer: Flux2Transformer2DModel,
    text_encoder: Qwen3ForCausalLM,
    pairs: Pairs,
    settings: DenoiserSettings,
) -> list[float]:
    """Train transformer and text encoder together; return the loss of each step."""

    def batch_loss() -> Tensor:
        chosen = torch.randint(len(pairs.latents), (settings.schedule.batch,))
        dropped = torch.rand(len(chosen), 1) < settings.dropped_captions
        ids = torch.where(dropped, pairs.empty_ids, pairs.ids[chosen])
        mask = torch.where(dropped, pairs.empty_mask, pairs.mask[chosen])
        times = _sample_times(len(chosen), settings)
        return denoising_loss(transformer, pairs.latents[chosen], embed(text_encoder, ids, mask), times)

    modules = nn.ModuleList([transformer, text_encoder])
    parameters = list(modules.parameters())
    losses = fit("denoiser", batch_loss, parameters, _optimizers(modules, settings), settings.schedule)
    round_to_bfloat16(modules)
    return losses


def _optimizers(modules: nn.Module, settings: DenoiserSettings) -> list[Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for embeddings, modulation, norms and projections."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in modules.named_parameters():
        in_block = "transformer_blocks." in name or ".layers." in name
        (matrices if in_block and parameter.ndim == 2 else others).append(parameter)
    return [
        Muon(
            matrices,
            lr=settings.matrix_learning_rate,
            weight_decay=settings.matrix_weight_decay,
            momentum=settings.momentum,
            adjust_lr_fn="match_rms_adamw",
        ),
        AdamW(others, lr=settings.other_learning_rate, betas=settings.other_betas, weight_decay=0.0),
    ]


def _sample_times(count: int, settings: DenoiserSettings) -> Tensor:
    """Draw how noisy each latent shall be: mostly rather noisy, but a share of them anything from 0 to 1."""
    times = torch.sigmoid(settings.noise_mean + settings.noise_spread * torch.randn(count))
    return torch.where(torch.rand(count) < settings.uniform_noise, torch.rand(count), times)


def embed(text_encoder: Qwen3ForCausalLM, ids: Tensor, mask: Tensor) -> Tensor:
    """Turn token ids into what the transformer reads of them, as `Flux2KleinPipeline` does, with gradients."""
    states = text_encoder(
        input_ids=ids,
        attention_mask=mask,
        output_hidden_states=True,
        use_cache=False,
        logits_to_keep=1,  # nobody looks at the logits
    ).hidden_states
    return torch.cat([states[layer] for layer in TEXT_LAYERS], dim=-1)


def denoising_loss(
    transformer: Flux2Transformer2DModel, latents: Tensor, prompt: Tensor, times: Tensor
) -> Tensor:
    """Tell how badly the transformer guesses the way from latents to noise, shown a mix of both (1: all noise)."""
    noise = torch.randn_like(latents)
    noisy = torch.lerp(latents, noise, times.view(-1, 1, 1))
    side = round(latents.shape[1] ** 0.5)
    guess = transformer(
        hidden_states=noisy,
        encoder_hidden_states=prompt,
        timestep=times,
        img_ids=_positions(1, side, side, 1),
        txt_ids=_positions(1, 1, 1, TOKENS),
        return_dict=False,
    )[0]
    return F.mse_loss(guess, noise - latents)


def _positions(*extents: int) -> Tensor:
    return torch.cartesian_prod(*(torch.arange(extent) for extent in extents))
