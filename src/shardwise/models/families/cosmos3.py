"""Cosmos 3: text, and the video, sound and actions that are made, in blocks with an attention and an MLP for each.

The text reads itself, what is made reads both. Fewer key and value heads than queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from diffusers import Cosmos3OmniTransformer as _Cosmos3OmniTransformer

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent

PLAN = {
    "layers.*.self_attn.to_q": "colwise",
    "layers.*.self_attn.to_k": "colwise",
    "layers.*.self_attn.to_v": "colwise",
    "layers.*.self_attn.to_out": "rowwise",
    "layers.*.self_attn.add_q_proj": "colwise",
    "layers.*.self_attn.add_k_proj": "colwise",
    "layers.*.self_attn.add_v_proj": "colwise",
    "layers.*.self_attn.to_add_out": "rowwise",
    "layers.*.mlp.gate_proj": IfPresent("colwise"),  # not with the activation of Nemotron
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "layers.*.mlp_moe_gen.gate_proj": IfPresent("colwise"),
    "layers.*.mlp_moe_gen.up_proj": "colwise",
    "layers.*.mlp_moe_gen.down_proj": "rowwise",
    "time_embedder.linear_2": "rowwise_split_input",  # reads the embedding of the timesteps, which is whole
    # The transformer does not call it; whoever does gives it a whole input.
    "lm_head": "rowwise_split_input",
}


class Cosmos3OmniTransformer(TensorParallelMixin, _Cosmos3OmniTransformer):  # type: ignore[misc]
    """The transformer of Cosmos 3, with tensor parallelism. Heads: 32, of keys 8; whole: embeddings, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "head_dim": 12,
    "hidden_size": 40,
    "intermediate_size": 56,
    "latent_channel": 3,
    "latent_patch_size": 2,
    "patch_latent_dim": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "rope_axes_dim": (2, 2, 2),
    "vocab_size": 36,
    "action_dim": 7,
    "action_gen": True,
    "num_embodiment_domains": 3,
    "sound_dim": 5,
    "sound_gen": True,
}

_TEXT, _SOUND, _ACTION, _VIDEO = 7, 11, 5, (3, 5, 3)


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 1) -> dict[str, Any]:
    """Return inputs for a model of this config: 7 tokens of text, videos of 45 (3 frames of 5 x 3), the first given.

    With sound 11 tokens more, with actions 5, the first of which is given. `batch` is the number of videos: the
    class takes all tokens as one sequence.
    """
    video, patch = batch * prod(_VIDEO), config["latent_patch_size"]
    size = (config["latent_channel"], _VIDEO[0], _VIDEO[1] * patch, _VIDEO[2] * patch)
    places = torch.arange(_TEXT, _TEXT + video)
    noisy = places.view(batch, _VIDEO[0], -1)[:, 1:].flatten()
    inputs: dict[str, Any] = {
        "input_ids": torch.randint(0, config["vocab_size"], (_TEXT,), generator=generator),
        "text_indexes": torch.arange(_TEXT),
        "und_len": _TEXT,
        "vision_tokens": [torch.randn(1, *size, generator=generator) for _ in range(batch)],
        "vision_token_shapes": [_VIDEO] * batch,
        "vision_sequence_indexes": places,
        "vision_mse_loss_indexes": noisy,
        "vision_timesteps": torch.rand(len(noisy), generator=generator) * 1000,
        "vision_noisy_frame_indexes": [torch.arange(1, _VIDEO[0])] * batch,
    }
    length = _TEXT + video
    if config["sound_gen"]:
        inputs |= _sound(config, generator, length)
        length += _SOUND
    if config["action_gen"]:
        inputs |= _action(config, generator, length)
        length += _ACTION
    ids = torch.randint(0, 9, (3, length), generator=generator)
    return {**inputs, "position_ids": ids, "sequence_length": length}


def _sound(config: Mapping[str, Any], generator: torch.Generator, start: int) -> dict[str, Any]:
    places = torch.arange(start, start + _SOUND)
    return {
        "sound_tokens": [torch.randn(config["sound_dim"], _SOUND, generator=generator)],
        "sound_token_shapes": [(_SOUND, 1, 1)],
        "sound_sequence_indexes": places,
        "sound_mse_loss_indexes": places,
        "sound_timesteps": torch.rand(_SOUND, generator=generator) * 1000,
        "sound_noisy_frame_indexes": [torch.arange(_SOUND)],
    }


def _action(config: Mapping[str, Any], generator: torch.Generator, start: int) -> dict[str, Any]:
    places = torch.arange(start, start + _ACTION)
    return {
        "action_tokens": [torch.randn(_ACTION, config["action_dim"], generator=generator)],
        "action_token_shapes": [(_ACTION, 1, 1)],
        "action_sequence_indexes": places,
        "action_mse_loss_indexes": places[1:],
        "action_timesteps": torch.rand(_ACTION - 1, generator=generator) * 1000,
        "action_noisy_frame_indexes": [torch.arange(1, _ACTION)],
        "action_domain_ids": [torch.tensor(1)],
    }


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nemotron": ({"hidden_act": "relu2", "qk_norm_for_text": False, "use_und_k_norm_for_gen": True}, {}),
    "two_videos": ({"action_gen": False, "sound_gen": False, "attention_bias": True}, {"batch": 2}),
    "two_key_heads": ({"num_key_value_heads": 2}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
