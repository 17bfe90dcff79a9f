"""ConsisID: the blocks of CogVideoX, which read a face by cross-attention after every second one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import ConsisIDTransformer3DModel as _ConsisIDTransformer3DModel

from shardwise.models.families import cogvideox
from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent, PackedColwiseParallel

PLAN = {
    **cogvideox.PLAN,
    # The face: what extracts it, and what reads it. Keys and values come from one Linear.
    "local_facial_extractor.layers.*.0.to_q": IfPresent("colwise"),
    "local_facial_extractor.layers.*.0.to_kv": IfPresent(PackedColwiseParallel([1, 1])),
    "local_facial_extractor.layers.*.0.to_out": IfPresent("rowwise"),
    "local_facial_extractor.layers.*.1.1": IfPresent("colwise"),
    "local_facial_extractor.layers.*.1.3": IfPresent("rowwise"),
    "perceiver_cross_attention.*.to_q": IfPresent("colwise"),
    "perceiver_cross_attention.*.to_kv": IfPresent(PackedColwiseParallel([1, 1])),
    "perceiver_cross_attention.*.to_out": IfPresent("rowwise"),
}


class ConsisIDTransformer3DModel(TensorParallelMixin, _ConsisIDTransformer3DModel):  # type: ignore[misc]
    """The transformer of ConsisID, with tensor parallelism. Heads: 48, of faces 16; whole: embeddings, maps, norms."""

    _tp_plan = PLAN


_FACE: dict[str, Any] = {
    "is_train_face": True,
    "cross_attn_interval": 2,
    "cross_attn_dim_head": 6,
    "cross_attn_num_heads": 8,
    "LFE_id_dim": 28,
    "LFE_vit_dim": 20,
    "LFE_depth": 4,
    "LFE_dim_head": 10,
    "LFE_num_heads": 4,
    "LFE_num_id_token": 3,
    "LFE_num_querie": 5,
    "LFE_output_dim": 32,  # two thirds of the model's width
    "LFE_ff_mult": 2,
    "LFE_num_scale": 2,
}

TINY_CONFIG: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 3,
    "out_channels": 5,
    "time_embed_dim": 28,
    "text_embed_dim": 20,
    "num_layers": 4,
    "sample_width": 6,
    "sample_height": 10,
    "sample_frames": 9,
    "patch_size": 2,
    "max_text_seq_length": 7,
    "use_rotary_positional_embeddings": True,
    **_FACE,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: those of CogVideoX, and a face of 4 features at each scale."""
    inputs = cogvideox.example_inputs(config, generator, batch)
    if config.get("is_train_face"):
        scales, width = config["LFE_num_scale"], config["LFE_vit_dim"]
        inputs["id_cond"] = torch.randn(batch, config["LFE_id_dim"], generator=generator)
        inputs["id_vit_hidden"] = [torch.randn(batch, 4, width, generator=generator) for _ in range(scales)]
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "without_face": ({"is_train_face": False}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
