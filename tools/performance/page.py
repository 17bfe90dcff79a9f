"""The page: tables of the committed figures, and the ratios that follow from them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardwise.bench.steps import OURS, SAME_PLAN

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"

Results = Mapping[str, Mapping[str, Any]]

_INTRO = """# Performance

Loading and steps, measured on CPU beside diffusers' own tensor parallelism. `make bench` measures anew and writes
[benchmarks/results](../benchmarks/results); `python -m tools.performance` writes this page from there, and a test holds
it current.

Read the ratios within one table, not the seconds: {hardware}. All figures are medians of interleaved turns, each load
in processes of its own, imports excluded. What a GPU changes is not in them: an accelerator has memory that is ready
before a load begins, which the rows *into ready memory* stand for.
"""

_LOADS = """## Loading

FLUX.2's transformer with fewer blocks, in bf16. Every row of a table loads the same slices, and the numbers were
compared. In the first two they are those of shardwise's plan: diffusers {diffusers} is made to cut the modulations too.
Its own plan leaves them whole (2.5% of the whole model, but two fifths of one with few blocks): the third table.
diffusers does not run on CPU by itself: three values of the measuring process are changed
([diffusers_tp.py](../src/shardwise/bench/diffusers_tp.py)).

- *CPU*: of all ranks together. *Beside the shard*: the most memory of a rank, mapped files included, beyond the slices
  that it keeps; *staging* is the part of it that is not mapped from files, seen every 4 ms.
- *Requested*: bytes that a rank asks of files. Mapped files are not asked for, so diffusers' is near zero. On a CPU its
  slices along dim 0 stay views of the mapped file, and are read when they are first used: the row *diffusers* is
  without that, *into ready memory* with it.
- *As many bytes*: each rank reads as many bytes as it keeps, one after another, and does nothing else. A load that
  holds its slices when it is done, and copies each byte once, cannot take less.
- *Cold*: the files were dropped from memory. *Storage*: bytes that the ranks together took from it then.
"""

_REFERENCE = """### Beside the figure to beat

FLUX.2-dev's transformer (64 GB) on 4 GPUs: 12.5 s and 6.8 GB of host memory for a rank, against 30.4 s and 64.1 GB for
loading all and then sharding, that is 2.43 times and 9.4 times. On 4 ranks here, without a GPU:

{lines}
"""


def results() -> dict[str, Any]:
    """Return the committed figures, by the name of their file."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}


def page(found: Results) -> str:
    """Return docs/performance.md."""
    loads = {name: figures for name, figures in found.items() if name.startswith("load")}
    steps = [figures for name, figures in found.items() if name.startswith("step")]
    first = next(iter(loads.values()))
    parts = [_INTRO.format(hardware=_hardware(first)), _LOADS.format(**first["versions"])]
    for name, load in sorted(loads.items(), key=lambda item: not item[1]["modulations_sharded"]):
        parts += _load_part(name, load)
    parts += [_reference(load) for load in loads.values() if load["ranks"] == 4]
    for step in steps:
        parts += _step_part(step)
    return "\n".join(parts)


def _hardware(found: Mapping[str, Any]) -> str:
    on, versions = found["hardware"], found["versions"]
    return (
        f"{on['cores']} cores ({on['cpu']}), {on['memory_bytes'] / 2**30:.0f} GiB, torch {versions['torch']}, "
        f"Linux {versions['linux']}, {found['date']}"
    )


def _load_part(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    size, plan = found["checkpoint_bytes"] / 1e9, found["plan_bytes_per_rank"] / 1e9
    read = found["sequential_read"]
    yield (
        f"### {found['ranks']} ranks{'' if found['modulations_sharded'] else ', modulations whole'}\n\n"
        f"{size:.2f} GB in {found['checkpoint']['files']} files, of which a rank keeps "
        f"{plan:.2f} GB. The floor, one process that reads the files from end to end: {read['warm_s']:.2f} s warm"
        + (f", {read['cold_s']:.2f} s cold" if "cold_s" in read else "")
        + f". Load average before: {found['hardware']['load_average']:g}.\n"
    )
    yield "| | s | CPU, s | beside the shard, MiB | staging, MiB | requested, GB | cold, s | storage, GB |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    yield from (_load_row(figures) for figures in found["variants"].values())
    yield f"\n![Loads on {found['ranks']} ranks](../benchmarks/results/{name}.png)\n"
    yield from _load_ratios(found)


def _load_row(figures: Mapping[str, Any]) -> str:
    cold = figures.get("cold")
    cells = [
        figures["title"],
        f"{figures['wall_s']:.2f}",
        f"{figures['cpu_s']:.2f}",
        f"{figures['peak_beyond_shard_bytes'] / 2**20:.0f}",
        f"{figures['staging_bytes'] / 2**20:.0f}",
        f"{figures['bytes_requested_per_rank'] / 1e9:.3f}",
        f"{cold['wall_s']:.2f}" if cold else "",
        f"{cold['storage_bytes_node'] / 1e9:.2f}" if cold else "",
    ]
    return f"| {' | '.join(cells)} |"


def _load_ratios(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what follows from the table, in one paragraph."""
    kinds, floor = found["variants"], found["sequential_read"]
    ours, theirs = kinds["shardwise_ready"], kinds["diffusers_ready"]
    excess = kinds["shardwise"]["bytes_requested_per_rank"] / found["plan_bytes_per_rank"] - 1
    yield (
        f"Into ready memory shardwise takes {_times(theirs, ours, 'wall_s')} less time than diffusers and "
        f"{_times(theirs, ours, 'cpu_s')} less CPU time; in the default mode diffusers takes "
        f"{_times(kinds['diffusers'], kinds['shardwise'], 'wall_s')} as long"
        f"{_floor(kinds)}. shardwise asks for "
        f"{excess:.2%} more than the plan's bytes: the headers. Of its time "
        f"{ours['check_s']:.2f} s are the static check, {ours['read_s']:.2f} s reading."
    )
    if "cold" in ours:
        storage = kinds["shardwise"]["cold"]["storage_bytes_node"] / found["checkpoint_bytes"]
        yield (
            f"Cold it takes {kinds['shardwise']['cold']['wall_s'] / floor['cold_s']:.2f} times the floor, and "
            f"{storage:.2f} times the checkpoint's bytes from storage."
        )
    yield ""


def _floor(kinds: Mapping[str, Any]) -> str:
    """Return how diffusers compares to reading as many bytes and doing nothing else, which no load can do without."""
    default = _times(kinds["bytes_alone"], kinds["diffusers"], "wall_s")
    ready, cpu = (
        _times(kinds["diffusers_ready"], kinds["bytes_alone_ready"], name) for name in ("wall_s", "cpu_s")
    )
    return (
        f". Reading as many bytes and doing nothing else takes {default} as long as diffusers in the default mode; "
        f"into ready memory diffusers takes {ready} the time of that and {cpu} its CPU time, which is the most that a "
        "loader can gain here"
    )


def _reference(found: Mapping[str, Any]) -> str:
    kinds = found["variants"]
    sharded = kinds["shardwise"]
    lines = [
        f"- {name}, load all and then shard: {_times(kinds[kind], sharded, 'wall_s')} the time of shardwise's sharded "
        f"load, {_times(kinds[kind], sharded, 'peak_beyond_shard_bytes')} the memory beside the shard"
        for name, kind in (
            ("shardwise", "shardwise_full_then_shard"),
            ("diffusers", "diffusers_full_then_shard"),
        )
    ]
    return _REFERENCE.format(lines="\n".join(lines))


def _times(more: Mapping[str, Any], less: Mapping[str, Any], name: str) -> str:
    return f"{more[name] / less[name]:.2g} times" if less[name] else "any number of times"


def _step_ratio(case: Mapping[str, Any], way: str) -> str:
    """Return a class, and how many times the time and the CPU time of a way diffusers takes."""
    theirs, ours = case["ways"]["diffusers"], case["ways"][way]
    wall, cpu = (theirs[name] / ours[name] for name in ("wall_s", "cpu_s"))
    return f"{case['name'].partition('Transformer')[0]} {wall:.2f} (CPU {cpu:.2f})"


def _step_part(found: Mapping[str, Any]) -> Iterator[str]:
    host = found["colwise_call"]
    yield (
        f"## Steps, {found['ranks']} ranks\n\nOne forward without gradients, bf16, random weights. *CPU*: of the main "
        "thread of the busiest rank. One process runs alone, on one rank's threads, while the others wait. By default "
        "shardwise shards the modulations too, which saves a quarter or more of the memory and costs all-reduces that "
        "diffusers' plans do not have; *modulations whole* (`shard_modulation=False`) shards what those shard. For "
        f"MiniMax-H3 diffusers has no plan. Load average before: {found['hardware']['load_average']:g}.\n"
    )
    yield "| class | | ms | CPU, ms | all-reduces | KiB |"
    yield "|---|---|--:|--:|--:|--:|"
    for case in found["cases"]:
        for way, figures in case["ways"].items():
            yield (
                f"| {case['name']}, {case['size']} | {way} | {figures['wall_s'] * 1e3:.1f} | "
                f"{figures['cpu_s'] * 1e3:.1f} | {figures['all_reduces']} | {figures['all_reduce_bytes'] / 1024:.0f} |"
            )
    yield f"\n![Steps on {found['ranks']} ranks](../benchmarks/results/step-{found['ranks']}-ranks.png)\n"
    both = [case for case in found["cases"] if "diffusers" in case["ways"]]
    for size in dict.fromkeys(case["size"] for case in both):
        for way in (OURS, SAME_PLAN):
            ratios = ", ".join(_step_ratio(case, way) for case in both if case["size"] == size)
            yield f"- diffusers over {way}, {size}: {ratios}"
    yield (
        f"\nA colwise call of shardwise takes {host['colwise_us']:.1f} us of CPU time where a plain `nn.Linear` of its "
        f"size takes {host['plain_us']:.1f} us: {host['ratio']:.2f} times.\n"
    )
