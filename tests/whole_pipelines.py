"""Small pipelines of diffusers: random, written to a folder, and what they draw."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from shardwise import demo_model_path
from shardwise.demo import CALL
from tests.encoders import family as encoders_family
from tests.encoders import tiny_encoder
from tests.helpers import randomize, tiny_model

PROMPT = "a red circle on a white background"
VOCABULARY = 400
"""More than the embedded model's tokenizer knows, and divisible by the numbers of ranks."""


def embedded_copy(folder: Path) -> Path:
    """Copy the embedded pipeline, a Flux2Klein with a Qwen3, to a folder that may be changed."""
    return Path(shutil.copytree(demo_model_path(), folder))


def flux2_like(folder: Path, width: int = 1) -> Path:
    """Write a FLUX.2 pipeline whose text encoder, a Mistral 3, is about as large as its transformer.

    It has no tokenizer: `tokenizer=None` is to be passed, and `prompt_embeds`.
    """
    heads, dim = 8, 16 * width
    transformer = randomize(
        diffusers.Flux2Transformer2DModel(
            in_channels=16,
            num_layers=2,
            num_single_layers=4,
            attention_head_dim=dim,
            num_attention_heads=heads,
            joint_attention_dim=3 * heads * dim,
            timestep_guidance_channels=16,
            axes_dims_rope=(dim // 4,) * 4,
        )
    )
    hidden = heads * dim
    text: dict[str, Any] = {
        "model_type": "mistral", "vocab_size": 512, "hidden_size": hidden, "intermediate_size": 3 * hidden,
        "num_hidden_layers": 10, "num_attention_heads": heads, "num_key_value_heads": 4, "head_dim": dim,
        "pad_token_id": 5,
    }  # fmt: skip
    encoder = tiny_encoder("Mistral3ForConditionalGeneration", text_config=text)
    vae = randomize(
        diffusers.AutoencoderKLFlux2(
            down_block_types=("DownEncoderBlock2D",),
            up_block_types=("UpDecoderBlock2D",),
            block_out_channels=(8,),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=4,
            sample_size=32,
        )
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline = diffusers.Flux2Pipeline(scheduler, vae, encoder, None, transformer)  # type: ignore[arg-type]
    for name, part in pipeline.components.items():
        if part is not None:
            part.save_pretrained(folder / name)
    pipeline.save_config(folder)
    return folder


def _tokenizer() -> Any:
    """Return the embedded model's tokenizer, for texts of at most 16 tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model_path(), subfolder="tokenizer")
    tokenizer.model_max_length = 16
    return tokenizer


def _clip(cls: type[Any] = transformers.CLIPTextModel) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 2}
    config = transformers.CLIPTextConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=2,
        max_position_embeddings=16,
        projection_dim=24,
        **sizes,
    )
    return randomize(cls(config))


def _vae() -> Any:
    return randomize(
        diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",),
            up_block_types=("UpDecoderBlock2D",),
            block_out_channels=(8,),
            latent_channels=4,
            norm_num_groups=4,
            sample_size=16,
            shift_factor=0.1,
            scaling_factor=0.4,
        )
    )


def _video_vae(cls: type[Any]) -> Any:
    sizes: dict[str, Any] = {"latents_mean": [0.1] * 4, "latents_std": [1.2] * 4, "dim_mult": [1, 1, 1, 1]}
    return randomize(cls(base_dim=4, z_dim=4, num_res_blocks=1, **sizes))


def _scheduler() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler()


def _flux() -> Any:
    encoder = tiny_encoder("T5EncoderModel", vocab_size=VOCABULARY)
    sizes = {"in_channels": 16, "joint_attention_dim": encoder.config.d_model, "pooled_projection_dim": 24}
    transformer = tiny_model("FluxTransformer2DModel", stock=True, **sizes)
    return diffusers.FluxPipeline(
        _scheduler(), _vae(), _clip(), _tokenizer(), encoder, _tokenizer(), transformer
    )  # fmt: skip


def _sd3() -> Any:
    encoder = tiny_encoder("T5EncoderModel", vocab_size=VOCABULARY, d_model=48)
    sizes = {"in_channels": 4, "out_channels": 4, "joint_attention_dim": 48, "pooled_projection_dim": 48}
    sizes["pos_embed_max_size"] = 16
    transformer = tiny_model("SD3Transformer2DModel", stock=True, **sizes)
    clips = [_clip(transformers.CLIPTextModelWithProjection) for _ in range(2)]
    return diffusers.StableDiffusion3Pipeline(
        transformer,
        _scheduler(),
        _vae(),
        clips[0],
        _tokenizer(),
        clips[1],
        _tokenizer(),
        encoder,
        _tokenizer(),
    )


def _qwen_image() -> Any:
    name = "Qwen2_5_VLForConditionalGeneration"
    tiny = encoders_family(name).TINY_CONFIGS[name][""]
    text = {**tiny["text_config"], "vocab_size": VOCABULARY, "max_position_embeddings": 1024}
    encoder = tiny_encoder(name, text_config=text)
    transformer = tiny_model(
        "QwenImageTransformer2DModel", stock=True, joint_attention_dim=text["hidden_size"]
    )
    vae = _video_vae(diffusers.AutoencoderKLQwenImage)
    return diffusers.QwenImagePipeline(_scheduler(), vae, encoder, _tokenizer(), transformer)


def _wan() -> Any:
    """Return a Wan 2.2: two transformers, for the two ends of the noise."""
    encoder = tiny_encoder("UMT5EncoderModel", vocab_size=VOCABULARY)
    sizes = {"in_channels": 4, "out_channels": 4, "text_dim": encoder.config.d_model}
    high, low = (tiny_model("WanTransformer3DModel", stock=True, **sizes) for _ in range(2))
    vae = _video_vae(diffusers.AutoencoderKLWan)
    return diffusers.WanPipeline(
        _tokenizer(), encoder, vae, _scheduler(), high, randomize(low, seed=2), boundary_ratio=0.9
    )


_IMAGE = {"height": 32, "width": 32, "num_inference_steps": 4, "max_sequence_length": 16}

SMALL: dict[str, tuple[Callable[[], Any], dict[str, Any], list[str]]] = {
    "FluxPipeline": (_flux, _IMAGE, ["text_encoder_2", "transformer"]),
    "QwenImagePipeline": (
        _qwen_image,
        {**_IMAGE, "negative_prompt": "a square", "true_cfg_scale": 3.0},
        ["text_encoder", "transformer"],
    ),
    "StableDiffusion3Pipeline": (
        _sd3,
        {**_IMAGE, "negative_prompt": "a square"},
        ["text_encoder_3", "transformer"],
    ),
    "WanPipeline": (
        _wan,
        {**_IMAGE, "negative_prompt": "a square", "num_frames": 5},
        ["text_encoder", "transformer", "transformer_2"],
    ),
}
"""Pipeline -> how a small one is made, the arguments of its call, and which of its components are sharded."""

TESTED = {**dict.fromkeys(SMALL, "yes"), "Flux2KleinPipeline": "yes", "Flux2Pipeline": "loading"}
"""Pipelines of diffusers that are tested whole."""


def save_small(name: str, folder: Path) -> Any:
    """Write a small pipeline to a folder, and return it."""
    pipeline = SMALL[name][0]()
    pipeline.save_pretrained(folder)
    return pipeline


def draw(pipeline: Any, **options: Any) -> Any:
    """Return what a small pipeline draws of a prompt."""
    call = {**SMALL[type(pipeline).__name__][1], **options}
    generator = torch.Generator().manual_seed(7)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(prompt=PROMPT, generator=generator, output_type="np", **call)[0]


def draw_embedded(pipeline: Any, prompt: str | None = PROMPT, seed: int = 7, **options: Any) -> Any:
    """Return what an embedded pipeline draws: pixels of 0 to 1."""
    generator = torch.Generator().manual_seed(seed)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(prompt=prompt, generator=generator, output_type="np", **{**CALL, **options}).images
