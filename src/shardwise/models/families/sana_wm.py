"""SANA-WM: blocks of recurrent and of softmax attention with a camera branch, and gated convolutions as feed-forward.

The attentions reshape what they compute by the width of the tensor that they are given, which is whole: at the norms of
queries and keys, and where keys are told from values. No plan can divide that width, so all heads are computed on each
rank, and what projects into and out of them is shared by its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import SanaWMTransformer3DModel as _SanaWMTransformer3DModel

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent, PackedColwiseParallel, PackedDepthwiseParallel

PLAN = {
    "blocks.*.mlp.inverted_conv.conv": PackedColwiseParallel([1, 1]),
    "blocks.*.mlp.depth_conv.conv": PackedDepthwiseParallel([1, 1]),
    "blocks.*.mlp.point_conv.conv": "rowwise",
    # Mixes frames; reads what the other convolutions of the feed-forward leave, which is whole.
    "blocks.*.mlp.t_conv": "rowwise_split_input",
    # Lone and large: each reads a whole input, and every rank needs the whole output.
    "blocks.*.attn.qkv": "rowwise_split_input",
    "blocks.*.attn.q_proj_cam": "rowwise_split_input",
    "blocks.*.attn.k_proj_cam": "rowwise_split_input",
    "blocks.*.attn.v_proj_cam": "rowwise_split_input",
    "blocks.*.attn.out_proj_cam": "rowwise_split_input",
    "blocks.*.attn.output_gate": "rowwise_split_input",
    "blocks.*.attn.proj": "rowwise_split_input",
    "blocks.*.plucker_proj": IfPresent("rowwise_split_input"),
    "blocks.*.cross_attn.q_linear": "rowwise_split_input",
    "blocks.*.cross_attn.kv_linear": "rowwise_split_input",
    "blocks.*.cross_attn.proj": "rowwise_split_input",
    "t_embedder.linear_2": "rowwise_split_input",
    "t_block.1": "rowwise_split_input",
    "y_embedder.y_proj.fc1": "rowwise_split_input",
    "y_embedder.y_proj.fc2": "rowwise_split_input",
}


class SanaWMTransformer3DModel(TensorParallelMixin, _SanaWMTransformer3DModel):  # type: ignore[misc]
    """The transformer of SANA-WM, with tensor parallelism. Heads: any, none is divided; whole: tables, norms, gates."""

    _tp_plan = PLAN


# Wide heads: linear attention jumps where rounding decides whether any feature of a query is positive.
TINY_CONFIG: dict[str, Any] = {
    "in_channels": 6,
    "num_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "patch_size": (1, 2, 2),
    "softmax_every_n": 2,
    "linear_head_dim": 16,
    "use_chunk_plucker_post_attn": True,
    "chunk_plucker_channels": 5,
    "caption_channels": 20,
    "mlp_ratio": 1.5,
}


def example_inputs(
    config: Mapping[str, Any], generator: torch.Generator, batch: int = 3, prepared: bool = True
) -> dict[str, Any]:
    """Return inputs for a model of this config: 45 video tokens (3 frames of 5 x 3), 7 of text, some padding.

    The last frame of the last video is padding. Cameras look ahead from places of their own; `prepared`, the rays of
    each token come with them, and otherwise the model computes them.
    """
    frames, height, width = (n * patch for n, patch in zip((3, 5, 3), config["patch_size"], strict=True))
    mask, valid = torch.ones(batch, 7), torch.ones(batch, 3)
    mask[-1, 4:], valid[-1, 2:] = 0, 0
    poses = torch.eye(4).repeat(batch, frames, 1, 1)
    poses[..., :3, 3] = torch.randn(batch, frames, 3, generator=generator)
    lens = torch.tensor([4.0, 5.0, width / 2, height / 2]).expand(batch, frames, 4)
    inputs: dict[str, Any] = {
        "hidden_states": torch.randn(
            batch, config["in_channels"], frames, height, width, generator=generator
        ),
        "encoder_hidden_states": torch.randn(batch, 1, 7, config["caption_channels"], generator=generator),
        "encoder_attention_mask": mask,
        "timestep": torch.randint(0, 1000, (batch, 1, 3), generator=generator),
        "camera_conditions": torch.cat([poses.flatten(2), lens], -1),
        "frame_valid_mask": valid,
    }
    if prepared:
        rays = torch.eye(4).repeat(batch, 45, 1, 1)
        rays[..., :3, 3] = torch.randn(batch, 45, 3, generator=generator)
        directions = torch.randn(batch, 3, frames, height, width, generator=generator)
        inputs["cam_pos_embeds"] = {"P": rays, "P_inv": rays.inverse(), "absmap": directions}
    if config["use_chunk_plucker_post_attn"]:
        channels = config["chunk_plucker_channels"]
        inputs["chunk_plucker"] = torch.randn(batch, channels, frames, height, width, generator=generator)
    return inputs


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "directions_added": ({"use_chunk_plucker_post_attn": False}, {}),
    "own_rays": ({}, {"prepared": False}),
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
