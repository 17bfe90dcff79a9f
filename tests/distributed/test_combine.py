"""What goes together with a sharded model, and with what else: each cell of docs/combine.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import combine, tolerances
from tests.combine import CELLS, FAMILIES, measure, prepare
from tests.pool import Pool


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models on disk."""
    return {name: prepare(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("what", CELLS)
def test_sharded_model_does_it_as_one_process(
    ranks: Pool, folders: dict[str, Path], tmp_path: Path, what: str, name: str
) -> None:
    folder = prepare(name, tmp_path / "model") if "save" in what else folders[name]
    for error in ranks.run(measure, what, name, folder):
        if "int8" in what:
            assert 0 < error.sharded < tolerances.QUANTIZED_RATIO * error.alone
        else:
            assert error.sharded < tolerances.FP32


def test_int8_weights_are_not_saved(two_ranks: Pool, folders: dict[str, Path]) -> None:
    for name in FAMILIES:
        assert two_ranks.run(combine.saving_int8, name, folders[name]) == ["UnsupportedOperation"] * 2
