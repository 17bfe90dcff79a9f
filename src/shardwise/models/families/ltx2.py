"""LTX-2: video and audio streams that attend to each other; norms and rotary tables look at all heads together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import LTX2VideoTransformer3DModel as _LTX2VideoTransformer3DModel
from torch import nn

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent, SliceOutput


def dim_of_heads(rope: nn.Module) -> int:
    """Return the dim of a rotary table that is cut: the heads', or that of the features of all heads."""
    return 1 if rope.rope_type == "split" else -1


PLAN = {
    # Applied to queries and keys of all heads. Attention between the streams has the heads of the audio.
    "rope": SliceOutput(dim_of_heads),
    "audio_rope": SliceOutput(dim_of_heads),
    "cross_attn_rope": SliceOutput(dim_of_heads),
    "cross_attn_audio_rope": SliceOutput(dim_of_heads),
    "transformer_blocks.*.attn1.norm_q": "across_head_norm",
    "transformer_blocks.*.attn1.norm_k": "across_head_norm",
    "transformer_blocks.*.attn1.to_q": "colwise",
    "transformer_blocks.*.attn1.to_k": "colwise",
    "transformer_blocks.*.attn1.to_v": "colwise",
    "transformer_blocks.*.attn1.to_out.0": "rowwise",
    # One gate for each head, from LTX-2.3 on.
    "transformer_blocks.*.attn1.to_gate_logits": IfPresent("colwise"),
    "transformer_blocks.*.audio_attn1.norm_q": "across_head_norm",
    "transformer_blocks.*.audio_attn1.norm_k": "across_head_norm",
    "transformer_blocks.*.audio_attn1.to_q": "colwise",
    "transformer_blocks.*.audio_attn1.to_k": "colwise",
    "transformer_blocks.*.audio_attn1.to_v": "colwise",
    "transformer_blocks.*.audio_attn1.to_out.0": "rowwise",
    "transformer_blocks.*.audio_attn1.to_gate_logits": IfPresent("colwise"),
    "transformer_blocks.*.attn2.norm_q": "across_head_norm",
    "transformer_blocks.*.attn2.norm_k": "across_head_norm",
    "transformer_blocks.*.attn2.to_q": "colwise",
    "transformer_blocks.*.attn2.to_k": "colwise",
    "transformer_blocks.*.attn2.to_v": "colwise",
    "transformer_blocks.*.attn2.to_out.0": "rowwise",
    "transformer_blocks.*.attn2.to_gate_logits": IfPresent("colwise"),
    "transformer_blocks.*.audio_attn2.norm_q": "across_head_norm",
    "transformer_blocks.*.audio_attn2.norm_k": "across_head_norm",
    "transformer_blocks.*.audio_attn2.to_q": "colwise",
    "transformer_blocks.*.audio_attn2.to_k": "colwise",
    "transformer_blocks.*.audio_attn2.to_v": "colwise",
    "transformer_blocks.*.audio_attn2.to_out.0": "rowwise",
    "transformer_blocks.*.audio_attn2.to_gate_logits": IfPresent("colwise"),
    "transformer_blocks.*.audio_to_video_attn.norm_q": "across_head_norm",
    "transformer_blocks.*.audio_to_video_attn.norm_k": "across_head_norm",
    "transformer_blocks.*.audio_to_video_attn.to_q": "colwise",
    "transformer_blocks.*.audio_to_video_attn.to_k": "colwise",
    "transformer_blocks.*.audio_to_video_attn.to_v": "colwise",
    "transformer_blocks.*.audio_to_video_attn.to_out.0": "rowwise",
    "transformer_blocks.*.audio_to_video_attn.to_gate_logits": IfPresent("colwise"),
    "transformer_blocks.*.video_to_audio_attn.norm_q": "across_head_norm",
    "transformer_blocks.*.video_to_audio_attn.norm_k": "across_head_norm",
    "transformer_blocks.*.video_to_audio_attn.to_q": "colwise",
    "transformer_blocks.*.video_to_audio_attn.to_k": "colwise",
    "transformer_blocks.*.video_to_audio_attn.to_v": "colwise",
    "transformer_blocks.*.video_to_audio_attn.to_out.0": "rowwise",
    "transformer_blocks.*.video_to_audio_attn.to_gate_logits": IfPresent("colwise"),
    "transformer_blocks.*.ff.net.0.proj": "colwise",
    "transformer_blocks.*.ff.net.2": "rowwise",
    "transformer_blocks.*.audio_ff.net.0.proj": "colwise",
    "transformer_blocks.*.audio_ff.net.2": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "time_embed.linear": "rowwise_split_input",
    "audio_time_embed.linear": "rowwise_split_input",
    "av_cross_attn_video_scale_shift.linear": "rowwise_split_input",
    "prompt_adaln.linear": IfPresent("rowwise_split_input"),
}


class LTX2VideoTransformer3DModel(TensorParallelMixin, _LTX2VideoTransformer3DModel):  # type: ignore[misc]
    """The transformer of LTX-2, with tensor parallelism. Heads: 32 of each stream; whole: small embeddings, tables."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "in_channels": 6,
    "out_channels": 5,
    "num_attention_heads": 4,
    "attention_head_dim": 10,
    "cross_attention_dim": 40,
    "audio_in_channels": 7,
    "audio_out_channels": 9,
    "audio_num_attention_heads": 4,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 32,
    "num_layers": 2,
    "caption_channels": 20,
}


def example_inputs(
    config: Mapping[str, Any], generator: torch.Generator, batch: int = 3, guidance: bool = False
) -> dict[str, Any]:
    """Return inputs for a model of this config: 45 video tokens (3 frames of 5 x 3), 11 of audio, 7 of text.

    With `guidance` one block and sample of the batch leave attention out (spatio-temporal guidance), streams take each
    other's noise levels, and tokens of the video attend to some of it.
    """
    widths = [config["caption_channels"]] * 2
    if not config.get("use_prompt_embeddings", True):
        widths = [config["cross_attention_dim"], config["audio_cross_attention_dim"]]
    texts = [torch.randn(batch, 7, width, generator=generator) for width in widths]
    mask = torch.ones(batch, 7)
    mask[-1, 4:] = 0
    inputs = {
        "hidden_states": torch.randn(batch, 45, config["in_channels"], generator=generator),
        "audio_hidden_states": torch.randn(batch, 11, config["audio_in_channels"], generator=generator),
        "encoder_hidden_states": texts[0],
        "audio_encoder_hidden_states": texts[1],
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask,
        "timestep": torch.randint(0, 1000, (batch, 45), generator=generator),
        "audio_timestep": torch.randint(0, 1000, (batch, 11), generator=generator),
        "sigma": torch.randint(0, 1000, (batch,), generator=generator),
        "num_frames": 3,
        "height": 5,
        "width": 3,
        "audio_num_frames": 11,
    }
    if guidance:
        inputs |= {
            "use_cross_timestep": True,
            "spatio_temporal_guidance_blocks": [1],
            "perturbation_mask": torch.tensor([0.0] + [1.0] * (batch - 1)),
            "video_self_attention_mask": torch.rand(batch, 45, 45, generator=generator).round(),
        }
    if config.get("use_keyframes_abs_pos_embedding"):
        inputs["video_keyframes_mask"] = (torch.arange(45) < 15).float().repeat(batch, 1).unsqueeze(-1)
    return inputs


_GATED = {"gated_attn": True, "audio_gated_attn": True, "rope_type": "split"}
_MODULATED = {"cross_attn_mod": True, "audio_cross_attn_mod": True, "use_prompt_embeddings": False}

TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "split": ({"rope_type": "split"}, {}),
    "ltx_2_3": ({**_GATED, **_MODULATED, "perturbed_attn": True}, {"guidance": True}),
    "ltx_2_5": (
        {
            **_GATED,
            **_MODULATED,
            "ff_bias": False,
            "use_prompt_adaln_single": False,
            "use_keyframes_abs_pos_embedding": True,
        },
        {},
    ),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
