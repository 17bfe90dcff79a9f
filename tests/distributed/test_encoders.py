"""Text encoders: each class loaded slice by slice from a folder, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import transformers
from torch import Tensor

from shardwise import TensorParallelConfig, encoders
from tests import tolerances
from tests.encoders import WITH_IMAGES, cases, encoded, language_of, save_encoder, tokens, with_an_image
from tests.helpers import relative_error
from tests.pool import Pool


def load(name: str, folder: Path, **kwargs: Any) -> Any:
    config = TensorParallelConfig(dist.get_world_size())
    return getattr(encoders, name).from_pretrained(folder, parallel_config=config, **kwargs)


def _encode(name: str, folder: Path, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    model = load(name, folder)
    return encoded(model, inputs), language_of(model)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    errors = {key: relative_error(found[key], expected[key]) for key in expected}
    assert max(errors.values()) < tolerances.FP32, errors


@pytest.mark.parametrize(("name", "case"), cases())
def test_encoder_gives_what_one_process_gives_also_every_hidden_state(
    ranks: Pool, tmp_path: Path, name: str, case: str
) -> None:
    save_encoder(name, tmp_path, case)
    whole = getattr(transformers, name).from_pretrained(tmp_path).eval()
    inputs = tokens(whole)
    expected = encoded(whole, inputs)
    assert len([key for key in expected if key.startswith("hidden_states")]) >= 3
    for found, held in ranks.run(_encode, name, tmp_path, inputs):
        assert_equal(found, expected)
        assert held < language_of(whole) * (1 / ranks.size + 0.1)


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_images_are_read_as_in_one_process(ranks: Pool, tmp_path: Path, name: str) -> None:
    save_encoder(name, tmp_path)
    whole = getattr(transformers, name).from_pretrained(tmp_path).eval()
    inputs = with_an_image(name, whole)
    expected = encoded(whole, inputs)
    other = encoded(whole, {**inputs, "pixel_values": -inputs["pixel_values"]})["hidden_states.0"]
    assert relative_error(other, expected["hidden_states.0"]) > tolerances.MISTAKE  # the image counts
    for found, _ in ranks.run(_encode, name, tmp_path, inputs):
        assert_equal(found, expected)
