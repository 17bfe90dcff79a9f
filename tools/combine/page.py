"""The page: a table of the recorded errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "combine.md"
RECORD = ROOT / "tests" / "data" / "combine.json"

Record = Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]

_INTRO = """# What goes together with a sharded model

Each cell: a tiny model of the class with random parameters, none of them zero, in fp32 on 2 / 4 ranks, compared with
one process that does the same. The number is the largest difference over the largest output value; in the columns with
int8 it is the mean distance to the model in fp32 and, in brackets, that of one process with int8.
`python -m tools.combine` measures and writes this page; the tests run the same functions and bound what they return
(1e-5; with int8, 1.2 times the error of one process).
"""

_COLUMNS = """
- *LoRA*: an adapter on every Linear ([architecture.md](architecture.md)). *int8*: torchao's `Int8WeightOnlyConfig`, and
  others in [quantization.md](quantization.md). *Offload*: by layers with accelerate and by leaves with diffusers; the
  eight ways are in [offload.md](offload.md).
- *Save, reload*: `save_pretrained`, as one checkpoint and as a file for each rank, then loaded sharded and whole.
- *Compile*: `model.compile(fullgraph=True)`; with LoRA or int8 `compile_repeated_blocks(fullgraph=True)`, and
  the model for SD3, of which diffusers does not say which blocks are alike. Every style is compiled with LoRA and with
  int8 in further tests.
"""

_RAISES = {
    "save a model whose weights are int8": (
        "`UnsupportedOperation` on every rank, before anything is written",
        "save it before it is quantized: loaded with the same configuration, it has the same weights to the last bit",
    ),
    "save a model with adapters": (
        "`UnsupportedOperation`",
        "`fuse_lora` and `unload_lora`, or `unload_lora` alone",
    ),
    "offload to disk": ("`UnsupportedOption`", "offload to the host's memory"),
    "`fuse_lora` while offloaded layer by layer": ("`UnsupportedOperation`", "fuse first"),
    "shard a model that is quantized or offloaded already": ("`UnsupportedState`", "shard first"),
}
"""What is refused -> what it raises, and what to do instead; more is on the pages that are named."""


def record() -> dict[str, Any]:
    """Return what has been measured: column -> class -> degree -> errors."""
    found: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return found


def page(found: Record) -> str:
    """Return docs/combine.md."""
    single = [what for what in found if "+" not in what]
    pairs = [what for what in found if "+" in what]
    tables = (_table(found, single), "\n## Pairs\n", _table(found, pairs))
    return "\n".join([_INTRO, *tables]) + "\n" + _COLUMNS + "\n".join(_refusals())


def _refusals() -> Iterator[str]:
    yield "\n## What raises\n\n| | raises | instead |\n|---|---|---|"
    yield from (f"| {what} | {raises} | {instead} |" for what, (raises, instead) in _RAISES.items())
    yield ""


def _table(found: Record, columns: list[str]) -> str:
    return "\n".join(_rows(found, columns))


def _rows(found: Record, columns: list[str]) -> Iterator[str]:
    yield f"| | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for name in found[columns[0]]:
        yield f"| {name} | {' | '.join(_cell(found[what][name]) for what in columns)} |"


def _cell(errors: Mapping[str, Mapping[str, float]]) -> str:
    return " / ".join(
        f"{error.get('sharded', 0.0):.1e}" + (f" ({error['alone']:.1e})" if "alone" in error else "")
        for error in errors.values()
    )
