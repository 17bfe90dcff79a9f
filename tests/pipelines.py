"""Tiny pipelines of diffusers, with random weights and without text encoders, that draw latents by guidance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from tests.helpers import randomize

STEPS = 4


def noise(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def qwen_image() -> Any:
    """Two calls a step; the prompts have different lengths, so the calls have different shapes."""
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return diffusers.QwenImagePipeline(
        scheduler=scheduler, vae=None, text_encoder=None, tokenizer=None, transformer=transformer
    )


def _qwen_image_call() -> dict[str, Any]:
    return {
        "prompt_embeds": noise(1, 9, 16),
        "prompt_embeds_mask": torch.ones(1, 9).long(),
        "negative_prompt_embeds": noise(1, 7, 16, seed=8),
        "negative_prompt_embeds_mask": torch.ones(1, 7).long(),
        "true_cfg_scale": 3.0,
        "height": 32,
        "width": 32,
    }


def wan() -> Any:
    """Two transformers, the second for the later steps; two calls a step."""

    def transformer() -> nn.Module:
        return diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=4,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=32,
            ffn_dim=32,
            num_layers=3,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
        )

    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    vae = diffusers.AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return diffusers.WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae,
        scheduler=scheduler,
        transformer=transformer(),
        transformer_2=transformer(),
        boundary_ratio=0.8,
    )


def _wan_call() -> dict[str, Any]:
    return {
        "prompt_embeds": noise(1, 12, 16),
        "negative_prompt_embeds": noise(1, 12, 16, seed=8),
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "guidance_scale": 4.0,
        "guidance_scale_2": 3.0,
    }


def hunyuan_video15() -> Any:
    """A guider makes the calls and combines them."""
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        patch_size=1,
        patch_size_t=1,
        text_embed_dim=16,
        text_embed_2_dim=12,
        image_embed_dim=12,
        rope_axes_dim=(4, 6, 6),
        target_size=16,
        task_type="t2v",
    )
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(16, 16),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
        downsample_match_channel=False,
        upsample_match_channel=False,
    )
    pipeline = diffusers.HunyuanVideo15Pipeline(
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder_2=None,
        tokenizer_2=None,
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=4.0),
    )
    pipeline.vision_num_semantic_tokens, pipeline.vision_states_dim = 4, 12
    return pipeline


def _hunyuan_video15_call() -> dict[str, Any]:
    call: dict[str, Any] = {"height": 16, "width": 16, "num_frames": 5}
    for prefix, seed in (("", 7), ("negative_", 8)):
        call |= {
            f"{prefix}prompt_embeds": noise(1, 12, 16, seed=seed),
            f"{prefix}prompt_embeds_mask": torch.ones(1, 12),
            f"{prefix}prompt_embeds_2": noise(1, 6, 12, seed=seed),
            f"{prefix}prompt_embeds_mask_2": torch.ones(1, 6),
        }
    return call


def sd3() -> Any:
    """One call a step, on a batch of both branches."""
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=32,
        patch_size=1,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=96,
        qk_norm="rms_norm",
    )
    encoders = dict.fromkeys(f"{kind}{i}" for kind in ("text_encoder", "tokenizer") for i in ("", "_2", "_3"))
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=None, **encoders
    )


def _sd3_call() -> dict[str, Any]:
    return {
        "prompt_embeds": noise(1, 10, 32),
        "negative_prompt_embeds": noise(1, 10, 32, seed=8),
        "pooled_prompt_embeds": noise(1, 64),
        "negative_pooled_prompt_embeds": noise(1, 64, seed=8),
        "height": 64,
        "width": 64,
        "guidance_scale": 5.0,
    }


def z_image() -> Any:
    """One call a step, on a list of both branches."""
    transformer = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=16,
        dim=96,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=4,
        n_kv_heads=4,
        qk_norm=True,
        cap_feat_dim=16,
        rope_theta=256.0,
        t_scale=1000.0,
        axes_dims=[8, 8, 8],
        axes_lens=[256, 32, 32],
    )
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=None,
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
    )


def _z_image_call() -> dict[str, Any]:
    return {
        "prompt_embeds": [noise(16, 16)],
        "negative_prompt_embeds": [noise(12, 16, seed=8)],
        "height": 64,
        "width": 64,
        "guidance_scale": 4.0,
    }


CASES: Mapping[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "QwenImage": (qwen_image, _qwen_image_call),
    "Wan": (wan, _wan_call),
    "HunyuanVideo15": (hunyuan_video15, _hunyuan_video15_call),
    "SD3": (sd3, _sd3_call),
    "ZImage": (z_image, _z_image_call),
}
"""Name -> the pipeline, and what it is called with."""


def pipeline(name: str) -> Any:
    """Return a tiny pipeline, the same on every rank."""
    made = CASES[name][0]()
    for component in made.components.values():
        if isinstance(component, nn.Module):
            randomize(component)
    made.set_progress_bar_config(disable=True)
    return made


def draw(made: Any, name: str, steps: int = STEPS, **changes: Any) -> Tensor:
    """Return the latents that a pipeline draws."""
    options = {"num_inference_steps": steps, "output_type": "latent", "return_dict": False}
    call = CASES[name][1]() | options | changes
    latents = made(**call, generator=torch.Generator().manual_seed(3))[0]
    return torch.stack(latents) if isinstance(latents, list) else latents
