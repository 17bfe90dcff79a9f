"""A checkpoint to load: FLUX.2's tensors in their real shapes, fewer of its blocks, and random numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.models import Flux2Transformer2DModel
from shardwise.models.lookup import skeleton

HEADS = 48
"""Of FLUX.2-dev; with 128 features each they are the width of 6144."""

SHARD_BYTES = 2_000_000_000
STEM = "diffusion_pytorch_model"
_BYTES = 2  # of a bfloat16
_BLOCK = 16 * 2**20
_FINITE = 0xBFFF  # without the highest bit of the exponent: no infinity and no NaN

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Sizes:
    """A FLUX.2 transformer by what makes its size."""

    heads: int
    double_blocks: int
    single_blocks: int

    @property
    def config(self) -> dict[str, int]:
        """Changes of the default configuration, which is that of FLUX.2-dev."""
        narrower = {} if self.heads == HEADS else {"joint_attention_dim": 320 * self.heads}
        return {
            "num_attention_heads": self.heads,
            "num_layers": self.double_blocks,
            "num_single_layers": self.single_blocks,
            **narrower,
        }


def sizes_for(nbytes: int) -> Sizes:
    """Return the model whose checkpoint comes nearest to `nbytes`.

    As many heads as FLUX.2-dev, hence its shapes, where one block and what is around the blocks fit; else fewer.
    Single blocks are six to one double block, as there.
    """
    for heads in (HEADS, 24, 12, 4):
        around, double, single = _parts(heads)
        singles = round((nbytes - around) / single)
        if singles >= 1 or heads == 4:
            break
    doubles = round(singles / 8)  # a double block is as large as two single ones
    rest = round((nbytes - around - doubles * double) / single)
    return Sizes(heads, doubles, max(1, rest))


def _parts(heads: int) -> tuple[int, int, int]:
    """Return the bytes of what is around the blocks, of a double block and of a single block."""
    none, double, single = (
        sum(_BYTES * prod(shape) for shape in shapes_of(Sizes(heads, *blocks)).values())
        for blocks in ((0, 0), (1, 0), (0, 1))
    )
    return none, double - none, single - none


def shapes_of(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor, in the order in which diffusers saves them."""
    return {name: tuple(t.shape) for name, t in _skeleton(sizes).state_dict().items()}


def _skeleton(sizes: Sizes) -> Any:
    return skeleton(Flux2Transformer2DModel, **sizes.config)


def write_checkpoint(folder: Path, sizes: Sizes, seed: int = 0) -> int:
    """Write a FLUX.2 checkpoint of random numbers, and return the bytes of its files; see `write_model`."""
    return write_model(folder, _skeleton(sizes), seed)


def write_model(folder: Path, model: Any, seed: int = 0) -> int:
    """Write a checkpoint in bf16 for a model without weights, as diffusers would; return the bytes of its files.

    The numbers are random, finite, and different in each tensor; memory does not grow with the checkpoint. The files
    are on storage when this returns, so that they can be dropped from memory.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.save_config(folder)
    files = list(_split({name: tuple(t.shape) for name, t in model.state_dict().items()}))
    names = [f"{STEM}-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    noise = _noise(seed)
    for name, shapes in zip(names, files, strict=True):
        _write_file(folder / name, shapes, noise)
    weight_map = {key: name for name, shapes in zip(names, files, strict=True) for key in shapes}
    total = sum(_BYTES * prod(shape) for shapes in files for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{STEM}.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return sum((folder / name).stat().st_size for name in names)


def _split(shapes: Shapes) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield the tensors of each file."""
    part: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, shape in shapes.items():
        nbytes = _BYTES * prod(shape)
        if part and size + nbytes > SHARD_BYTES:
            yield part
            part, size = {}, 0
        part[name], size = shape, size + nbytes
    yield part


def _noise(seed: int) -> Iterator[memoryview]:
    """Yield blocks of random bf16 numbers for ever, no two neighbours alike."""
    numbers = np.random.default_rng(seed).integers(0, 2**16, _BLOCK, dtype=np.uint16) & np.uint16(_FINITE)
    data, start = numbers.view(np.uint8).data, 0
    while True:
        yield data[start : start + _BLOCK]
        start = (start + 2 * 1_000_003) % _BLOCK


def _write_file(path: Path, shapes: Shapes, noise: Iterator[memoryview]) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + _BYTES * prod(shape)
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for shape in shapes.values():
            for piece in _pieces(_BYTES * prod(shape)):
                file.write(next(noise)[:piece])
        file.flush()
        os.fsync(file.fileno())


def _pieces(nbytes: int) -> Iterable[int]:
    return (min(_BLOCK, nbytes - done) for done in range(0, nbytes, _BLOCK))
