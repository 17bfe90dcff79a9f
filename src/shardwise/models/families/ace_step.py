"""ACE-Step 1.5: self-attention with a window in every other block, cross-attention to text, lyrics and timbre."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import AceStepTransformer1DModel as _AceStepTransformer1DModel

from shardwise.models.mixin import TensorParallelMixin

PLAN = {
    "layers.*.self_attn.to_q": "colwise",
    "layers.*.self_attn.to_k": "colwise",
    "layers.*.self_attn.to_v": "colwise",
    "layers.*.self_attn.to_out.0": "rowwise",
    "layers.*.cross_attn.to_q": "colwise",
    "layers.*.cross_attn.to_k": "colwise",
    "layers.*.cross_attn.to_v": "colwise",
    "layers.*.cross_attn.to_out.0": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "time_embed.linear_2": "rowwise_split_input",
    "time_embed.time_proj": "rowwise_split_input",
    "time_embed_r.linear_2": "rowwise_split_input",
    "time_embed_r.time_proj": "rowwise_split_input",
    "condition_embedder": "rowwise_split_input",
}


class AceStepTransformer1DModel(TensorParallelMixin, _AceStepTransformer1DModel):  # type: ignore[misc]
    """The transformer of ACE-Step 1.5, with tensor parallelism. Heads: 16, of keys 8; whole: convolutions, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,  # with a window, without, with
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 10,
    "in_channels": 11,
    "patch_size": 2,
    "audio_acoustic_hidden_dim": 5,
    "sliding_window": 2,
    "encoder_hidden_size": 20,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 7 audio tokens, the last of them half padding, and 5 conditions."""
    length, channels = 7 * config["patch_size"] - 1, config["audio_acoustic_hidden_dim"]
    width = config["encoder_hidden_size"] or config["hidden_size"]
    return {
        "hidden_states": torch.randn(batch, length, channels, generator=generator),
        "context_latents": torch.randn(batch, length, config["in_channels"] - channels, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 5, width, generator=generator),
        "timestep": torch.rand(batch, generator=generator),
        "timestep_r": torch.rand(batch, generator=generator),
    }


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one_key_head": ({"num_key_value_heads": 1}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
