"""Nucleus-Image: blocks whose feed-forward is a mixture of experts in most, which hold nearly all of the weights.

The experts of a block are kept side by side in two parameters. They and the one that all tokens share are summed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import NucleusMoEImageTransformer2DModel as _NucleusMoEImageTransformer2DModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent, PackedColwiseParallel, SliceExperts, SumOnce

PLAN = {
    "transformer_blocks.*.attn.to_q": "colwise",
    "transformer_blocks.*.attn.to_k": "colwise",
    "transformer_blocks.*.attn.to_v": "colwise",
    "transformer_blocks.*.attn.add_k_proj": "colwise",
    "transformer_blocks.*.attn.add_v_proj": "colwise",
    "transformer_blocks.*.attn.to_out.0": "rowwise",
    "transformer_blocks.*.img_mlp": SumOnce(
        {
            "experts": IfPresent(SliceExperts("gate_up_proj", "down_proj", [1, 1])),
            "shared_expert.net.0.proj": IfPresent(PackedColwiseParallel([1, 1])),
            "shared_expert.net.2": IfPresent("rowwise"),
            # The first blocks and the last have a feed-forward without experts.
            "net.0.proj": IfPresent(PackedColwiseParallel([1, 1])),
            "net.2": IfPresent("rowwise"),
        }
    ),
    # Read the timestep embedding and the text, which are whole, and their outputs are used whole by every rank.
    "transformer_blocks.*.img_mod.1": "rowwise_split_input",
    "transformer_blocks.*.encoder_proj": "rowwise_split_input",
}


class NucleusMoEImageTransformer2DModel(TensorParallelMixin, _NucleusMoEImageTransformer2DModel):  # type: ignore[misc]
    """The transformer of Nucleus-Image, with tensor parallelism. Heads: 16; whole: embeddings, norms, routers."""

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 6,
    "out_channels": 5,
    "num_layers": 3,
    "attention_head_dim": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "joint_attention_dim": 20,
    "axes_dims_rope": (2, 4, 6),
    "mlp_ratio": 2.0,
    "dense_moe_strategy": "leave_first_block_dense",
    "num_experts": 3,
    "moe_intermediate_dim": 28,
    "capacity_factors": 1.5,
}


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: 15 image tokens (5 x 3), 7 of text, some of them padding."""
    mask = torch.ones(batch, 7, dtype=torch.bool)
    mask[-1, 4:] = False
    return {
        "hidden_states": torch.randn(batch, 15, config["in_channels"], generator=generator),
        "img_shapes": [(1, 5, 3)] * batch,
        "encoder_hidden_states": torch.randn(batch, 7, config["joint_attention_dim"], generator=generator),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.rand(batch, generator=generator),
    }


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sigmoid_router": ({"use_sigmoid": True, "dense_moe_strategy": "all_moe"}, {}),
    "one_key_head": ({"num_key_value_heads": 1}, {}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
