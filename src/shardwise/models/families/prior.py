"""The prior of unCLIP, Kandinsky and Shap-E: text, timestep and a noisy image embedding as one sequence of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import PriorTransformer as _PriorTransformer

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import DivideAttributes, IfPresent

PLAN = {
    # The forward repeats the attention mask for each head, and reads how many there are from the configuration.
    "": DivideAttributes("config.num_attention_heads"),
    # Lone projections of whole inputs.
    "time_embedding.linear_1": "rowwise_split_input",
    "time_embedding.linear_2": "rowwise_split_input",
    "proj_in": "rowwise_split_input",
    "embedding_proj": "rowwise_split_input",
    "encoder_hidden_states_proj": IfPresent("rowwise_split_input"),  # of text
    "transformer_blocks.*.attn1.to_q": "colwise",
    "transformer_blocks.*.attn1.to_k": "colwise",
    "transformer_blocks.*.attn1.to_v": "colwise",
    "transformer_blocks.*.attn1.to_out.0": "rowwise",
    "transformer_blocks.*.ff.net.0.proj": "colwise",
    "transformer_blocks.*.ff.net.2": "rowwise",
    "proj_to_clip_embeddings": "rowwise_split_input",
}


class PriorTransformer(TensorParallelMixin, _PriorTransformer):  # type: ignore[misc]
    """The prior transformer, with tensor parallelism. Heads: 16 or 32; whole: position tables, norms."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "num_layers": 3,
    "embedding_dim": 20,
    "num_embeddings": 7,
    "additional_embeddings": 4,
    "embedding_proj_dim": 28,
    "clip_embed_dim": 36,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: as many text tokens as it takes, some padding, for one embedding.

    Without text, as in Shap-E, the sequence is that of the noisy embeddings.
    """
    tokens, width = config["num_embeddings"], config["embedding_dim"]
    text = config.get("encoder_hid_proj_type", "linear") is not None
    noisy = (batch, width) if text else (batch, tokens, width)
    inputs = {
        "hidden_states": torch.randn(*noisy, generator=generator),
        "timestep": torch.randint(0, 1000, (batch,), generator=generator),
        "proj_embedding": torch.randn(batch, config.get("embedding_proj_dim") or width, generator=generator),
    }
    if text:
        inputs["encoder_hidden_states"] = torch.randn(batch, tokens, width, generator=generator)
        inputs["attention_mask"] = torch.ones(batch, tokens, dtype=torch.bool)
        inputs["attention_mask"][-1, 4:] = False
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shap_e": (
        {
            "additional_embeddings": 0,
            "time_embed_act_fn": "gelu",
            "norm_in_type": "layer",
            "embedding_proj_norm_type": "layer",
            "encoder_hid_proj_type": None,
            "added_emb_type": None,
            "time_embed_dim": 56,
        },
        {},
    ),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
