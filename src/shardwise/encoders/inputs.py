"""Example inputs of text encoders: with them a plan is checked before any weight is read."""

from __future__ import annotations

from typing import Any

import torch


def example_inputs(model: Any, batch: int = 3, length: int = 7) -> dict[str, Any]:
    """Return tokens for a text encoder, and a mask by which one text is shorter than the others."""
    size = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, size, (batch, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[-1, 2 * length // 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "output_hidden_states": True}
