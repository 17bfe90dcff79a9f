"""GLM-Image: the blocks of CogView4, guided by tokens of a language model and by glyphs to draw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import GlmImageTransformer2DModel as _GlmImageTransformer2DModel

from shardwise.models.mixin import TensorParallelMixin

PLAN = {
    # Lone projections of whole inputs: glyphs, tokens of the language model, and the modulation of each block.
    "glyph_projector.net.0.proj": "rowwise_split_input",
    "glyph_projector.net.2": "rowwise_split_input",
    "prior_projector.net.0.proj": "rowwise_split_input",
    "prior_projector.net.2": "rowwise_split_input",
    "transformer_blocks.*.norm1.linear": "rowwise_split_input",
    "transformer_blocks.*.attn1.to_q": "colwise",
    "transformer_blocks.*.attn1.to_k": "colwise",
    "transformer_blocks.*.attn1.to_v": "colwise",
    "transformer_blocks.*.attn1.to_out.0": "rowwise",
    "transformer_blocks.*.ff.net.0.proj": "colwise",
    "transformer_blocks.*.ff.net.2": "rowwise",
}


class GlmImageTransformer2DModel(TensorParallelMixin, _GlmImageTransformer2DModel):  # type: ignore[misc]
    """The transformer of GLM-Image, with tensor parallelism. Heads: 32 or 64; whole: embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 3,
    "out_channels": 5,
    "num_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "text_embed_dim": 20,
    "time_embed_dim": 28,
    "condition_dim": 6,
    "prior_vq_quantizer_codebook_size": 31,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 15 image tokens (5 x 3), a code for each, 7 glyph tokens.

    The codes of one sample are dropped, and some of its glyphs are padding.
    """
    height, width = 5 * config["patch_size"], 3 * config["patch_size"]
    codes = config["prior_vq_quantizer_codebook_size"]
    sizes = torch.rand(2, batch, 2, generator=generator) * 1024
    dropped = torch.zeros(batch, 15, dtype=torch.bool)
    dropped[-1] = True
    mask = torch.ones(batch, 7)
    mask[-1, 4:] = 0
    return {
        "hidden_states": torch.randn(batch, config["in_channels"], height, width, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["text_embed_dim"], generator=generator),
        "prior_token_id": torch.randint(0, codes, (batch, 15), generator=generator),
        "prior_token_drop": dropped,
        "timestep": torch.randint(0, 1000, (batch,), generator=generator),
        "target_size": sizes[0],
        "crop_coords": sizes[1],
        "attention_mask": mask,
    }
