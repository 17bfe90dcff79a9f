"""RFD4-Proteina: blocks over the tokens of a molecule, whose attention is biased by what is known of each pair."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import RFD4ProteinaTransformer as _RFD4ProteinaTransformer
from torch import Tensor

from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.styles import IfPresent, PackedColwiseParallel

_SPLIT = "rowwise_split_input"
_UPDATES = [f"pair_update_layers.{i}" for i in range(0, 14, 2)]
"""Behind every second block of the released model: they are no list, but stand under the numbers of their blocks."""

PLAN = {
    "transition_c_1.swish_linear.0": PackedColwiseParallel([1, 1]),
    "transition_c_1.linear_out": "rowwise",
    "transition_c_2.swish_linear.0": PackedColwiseParallel([1, 1]),
    "transition_c_2.linear_out": "rowwise",
    "transformer_layers.*.transition.transition.swish_linear.0": PackedColwiseParallel([1, 1]),
    "transformer_layers.*.transition.transition.linear_out": "rowwise",
    # The heads cannot be shared: the attention lays them side by side again by the width of its whole input. So each
    # of its Linears splits its input, which is whole, and has an output that is whole.
    "transformer_layers.*.mhba.mha.to_q": _SPLIT,
    "transformer_layers.*.mhba.mha.to_k": _SPLIT,
    "transformer_layers.*.mhba.mha.to_v": _SPLIT,
    "transformer_layers.*.mhba.mha.to_g": _SPLIT,
    "transformer_layers.*.mhba.mha.to_out": _SPLIT,
    # Read the conditioning, which is whole, and their outputs are used whole by every rank.
    "transformer_layers.*.mhba.adaln.to_gamma.0": _SPLIT,
    "transformer_layers.*.mhba.adaln.to_beta": _SPLIT,
    "transformer_layers.*.mhba.scale_output.0": _SPLIT,
    "transformer_layers.*.transition.adaln.to_gamma.0": _SPLIT,
    "transformer_layers.*.transition.adaln.to_beta": _SPLIT,
    "transformer_layers.*.transition.scale_output.0": _SPLIT,
    **{f"{update}.linear_x": IfPresent(_SPLIT) for update in _UPDATES},
    **{f"{update}.transition_out.linear_1": IfPresent("colwise") for update in _UPDATES},
    **{f"{update}.transition_out.linear_2": IfPresent("rowwise") for update in _UPDATES},
    "init_repr_factory.linear_out": _SPLIT,  # reads the features of the tokens
    # Read what a pass leaves.
    "s_cycle_proj": _SPLIT,
    "insertion_q_proj": _SPLIT,
    "insertion_k_proj": _SPLIT,
}


class RFD4ProteinaTransformer(TensorParallelMixin, _RFD4ProteinaTransformer):  # type: ignore[misc]
    """The denoiser of RFD4-Proteina, with tensor parallelism. Heads: 12, of which each rank computes all.

    Whole: the products over triangles of pairs, embeddings, norms.
    """

    _tp_plan = PLAN


TINY_CONFIG: dict[str, Any] = {
    "nlayers": 2,
    "token_dim": 48,
    "nheads": 4,
    "dim_cond": 20,
    "pair_repr_dim": 28,
    "latent_dim": 5,
    "token_type_emb_dim": 6,
    "cath_emb_dim": 3,
    "t_emb_dim": 18,
    "seq_sep_dim": 9,
    "xt_pair_dist_dim": 7,
    "tri_mult_c": 12,
    "num_sequence_classes": 11,
    "num_token_types": 5,
    "recycle_conditioning_dim": 2,
}

_TOKENS, _ATOMS = 7, 37


def example_inputs(config: Mapping[str, Any], generator: torch.Generator, batch: int = 3) -> dict[str, Any]:
    """Return inputs for a model of this config: molecules of 7 tokens, one of 5 and padding; two passes."""
    mask = torch.ones(batch, _TOKENS, dtype=torch.bool)
    mask[-1, 5:] = False
    return {
        "bb_ca": torch.randn(batch, _TOKENS, 3, generator=generator),
        "local_latents": torch.randn(batch, _TOKENS, config["latent_dim"], generator=generator),
        "bb_ca_time": torch.rand(batch, generator=generator),
        "local_latents_time": torch.rand(batch, generator=generator),
        "padding_mask": mask,
        "token_type": _codes(generator, config["num_token_types"], batch, _TOKENS),
        "atom37_mask": _codes(generator, 2, batch, _TOKENS, _ATOMS).bool(),
        "conditioning": _conditioning(generator, batch),
        "recycle_depth": 2,
    }


def _codes(generator: torch.Generator, kinds: int, *shape: int) -> Tensor:
    return torch.randint(0, kinds, shape, generator=generator)


def _conditioning(generator: torch.Generator, batch: int) -> dict[str, Tensor]:
    """Return what is known of the tokens, of their atoms and of each pair of them."""
    atoms, tokens, pairs = (batch, _TOKENS, _ATOMS), (batch, _TOKENS), (batch, _TOKENS, _TOKENS)
    of_atoms = ("rasa-binned", "hbond", "pistack", "pication", "saltbridge", "hydrophobic", "metal-coord")
    return {
        "is_in_context_conditioning": _codes(generator, 2, *tokens),
        "supports_local_latent": _codes(generator, 2, *tokens),
        "molecule_iid": _codes(generator, 2, *tokens),
        "molecule_entity_id": _codes(generator, 2, *tokens),
        "condition_index-group_1_token": _codes(generator, 2, *tokens),
        "condition_secondary-structure_1_residue": _codes(generator, 4, *tokens),
        "condition_cath-label_1_residue": _codes(generator, 4, *tokens, 3),
        "condition_coordinate_1_atom": torch.randn(*atoms, 3, generator=generator),
        "token_bond_path_length": _codes(generator, 9, *pairs),
        "bond_mask": _codes(generator, 2, *pairs),
        "bond_order": _codes(generator, 5, *pairs),
        **{f"condition_{name}_1_atom": _codes(generator, 4, *atoms) for name in of_atoms},
    }


TINY_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as_deep_as_released": ({"nlayers": 14}, {})
}
"""Other cases to prove: what they change in `TINY_CONFIG`, and arguments of `example_inputs`."""
