"""EasyAnimate: joint blocks, in which text and video have weights of their own and one modulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import EasyAnimateTransformer3DModel as _EasyAnimateTransformer3DModel

from shardwise.models.mixin import TensorParallelMixin

PLAN = {
    # Read the timestep embedding, which is whole, and their outputs are used whole by every rank.
    "transformer_blocks.*.norm1.linear": "rowwise_split_input",
    "transformer_blocks.*.norm2.linear": "rowwise_split_input",
    "transformer_blocks.*.attn1.to_q": "colwise",
    "transformer_blocks.*.attn1.to_k": "colwise",
    "transformer_blocks.*.attn1.to_v": "colwise",
    "transformer_blocks.*.attn1.to_out.0": "rowwise",
    "transformer_blocks.*.attn1.add_q_proj": "colwise",
    "transformer_blocks.*.attn1.add_k_proj": "colwise",
    "transformer_blocks.*.attn1.add_v_proj": "colwise",
    "transformer_blocks.*.attn1.to_add_out": "rowwise",
    "transformer_blocks.*.ff.net.0.proj": "colwise",
    "transformer_blocks.*.ff.net.2": "rowwise",
    "transformer_blocks.*.txt_ff.net.0.proj": "colwise",
    "transformer_blocks.*.txt_ff.net.2": "rowwise",
}


class EasyAnimateTransformer3DModel(TensorParallelMixin, _EasyAnimateTransformer3DModel):  # type: ignore[misc]
    """The transformer of EasyAnimate, with tensor parallelism. Heads: 48; whole: embeddings, norms.

    All blocks must be joint ones, as in every released model (`mmdit_layers` not below `num_layers`): the others
    add what attention returns for the text without a projection, and a rank has only its heads of that.
    """

    _tp_plan = PLAN


RELEASED_CONFIG: dict[str, Any] = {
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": 2,
}
"""The sizes of EasyAnimate 5.1; the class has no defaults of them that work."""

TINY_CONFIG: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "in_channels": 8,
    "out_channels": 3,
    "patch_size": 2,
    "sample_width": 6,
    "sample_height": 10,
    "num_layers": 2,
    "time_embed_dim": 28,
    "text_embed_dim": 20,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 45 video tokens (3 frames of 5 x 3), 7 of text, 5 of T5's text.

    Channels that the model takes and does not return are those of what to paint over.
    """
    size = (3, 5 * config["patch_size"], 3 * config["patch_size"])
    channels, others = config["out_channels"], config["in_channels"] - config["out_channels"]
    inputs = {
        "hidden_states": torch.randn(batch, channels, *size, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 7, config["text_embed_dim"], generator=generator),
        "timestep": torch.randint(0, 1000, (batch,), generator=generator),
    }
    if others:
        inputs["inpaint_latents"] = torch.randn(batch, others, *size, generator=generator)
    if config.get("text_embed_dim_t5"):
        text = (batch, 5, config["text_embed_dim_t5"])
        inputs["encoder_hidden_states_t5"] = torch.randn(*text, generator=generator)
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two_texts": ({"in_channels": 3, "text_embed_dim_t5": 12}, {}),
    "normed": ({"add_norm_text_encoder": True, "after_norm": True}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
