"""docs/reliability.md, from what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
RECORD = ROOT / "docs" / "reliability.json"

_INTRO = """# When something fails

What happens when a rank, a host, a link or another program fails in the middle of a job, as it was seen.
`make faults` does all of it anew and writes this page; it takes about {minutes} minutes, and needs the right to make
network namespaces for the part with several hosts.

- **Nothing waits without an end.** Agreements of ranks end by each rank's own clock, within their patience and 5 s,
  also where the store that carries them does not answer. Collectives end by the process group's time-out. A rank that
  is stopped (SIGSTOP) is found by its launcher where nobody waits for it.
- **All end together, with one message** that names the rank, and its host where there are several.
- **Nothing is half done.** A file is whole or absent; a load that failed on one rank failed on all.

Measured on {machine}, {date}, with `--timeout 10 --load-timeout 10` on the embedded model; the defaults are 2 minutes
and 2 hours. Seconds are from the fault to the end of the last process.
"""

_RANKS = """
## A rank is lost: two ranks of one machine, our own launcher

{count} faults: each phase of `shardwise generate`, each way, on rank 0 (which keeps the store) and on rank 1. Processes
that were left behind: {left}. Pictures that were half written: none; a whole one was there where the fault came after
it was written ({pictures} of {count}).
"""

_HOSTS = """
## A rank, a host or a link is lost: several hosts, torchrun

Hosts are network namespaces, each with its own name, its own copy of the model and its own folder for pictures, one
rank and one torchrun agent on each; the fault is on the last host. *Link*: its interface goes down. *Host*: the same,
and everything on it is killed. Seconds are to the end of the last process on any host, the agents included.
"""

_AFTER_HOSTS = """
An agent of torchrun 2.13.0 whose host is cut off waits for ever for a store that it cannot reach. A rank of `shardwise
generate` that has lost its store therefore ends its agent, 10 s after itself, if that is still there (exit code -9).
"""

_SOAK = """
## Long runs

{pictures} pictures by two ranks in one process each, of {sizes} sizes and {prompts} prompts; an adapter loaded and
unloaded, and a request given up in its first step, in each round of ten; a pipeline with `cfg=2`, `dp=2` or `tp=2`
loaded in every fourth.
The reference picture had the same bytes at all {checks} checks on both ranks: {same}.
"""


def record() -> dict[str, Any]:
    """Return what has been measured: part -> rows."""
    found: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return found


def page(found: Mapping[str, Any]) -> str:
    """Return docs/reliability.md."""
    return "".join(
        (
            _INTRO.format(**found["about"]),
            *_ranks(found["ranks"]),
            _HOSTS,
            *_hosts(found["hosts"]),
            _AFTER_HOSTS,
            "\n## Other machines, jobs, groups and users\n\n| attack | what came of it |\n|---|---|\n",
            *(f"| {row['attack']} | {_escaped(row['came'])} |\n" for row in found["attacks"]),
            *_soak(found["soak"]),
        )
    )


def _ranks(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    left, pictures = sum(row["left"] for row in rows), sum(bool(row["files"]) for row in rows)
    yield _RANKS.format(count=len(rows), left=left, pictures=pictures)
    ways = list(dict.fromkeys(row["way"] for row in rows))
    yield f"\n| seconds, rank 0 / rank 1 | {' | '.join(ways)} |\n|---|{'---|' * len(ways)}\n"
    by_phase: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        by_phase.setdefault(row["phase"], {}).setdefault(row["way"], []).append(_seconds(row))
    for phase, cells in by_phase.items():
        yield f"| {phase} | {' | '.join(' / '.join(cells[way]) for way in ways)} |\n"
    yield "\nMessages, one of each kind:\n\n"
    seen = set()
    for row in rows:
        if row["said"] and row["way"] not in seen:
            seen.add(row["way"])
            yield f"- rank {row['rank']} {row['way']}, {row['phase']}: `{row['said']}`\n"


def _seconds(row: Mapping[str, Any]) -> str:
    if row["seconds"] is None:
        return "no fault"
    return f"{row['seconds']}" + ("" if row["exit"] == 1 else f" (exit {row['exit']})")


def _hosts(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "\n| hosts | lost | phase | seconds | exit codes | the first host says | the last host says |\n"
    yield f"|{'---|' * 7}\n"
    for row in rows:
        ended = row["seconds"]
        took = "" if row["lost"] == "nothing" else "did not end" if None in ended else f"{max(ended)}"
        said = " | ".join(
            _escaped(row["said"][i]) or ("a picture" if row["files"][i] else "") for i in (0, -1)
        )
        codes = ", ".join(map(str, row["exit"]))
        yield f"| {row['hosts']} | {row['lost']} | {row['phase']} | {took} | {codes} | {said} |\n"


def _soak(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    from tools.faults.soak import PROMPTS, SIZES

    references = {row["reference"] for rows in ranks for row in rows}
    yield _SOAK.format(
        pictures=ranks[0][-1]["pictures"],
        sizes=len(SIZES),
        prompts=len(PROMPTS),
        checks=len(ranks[0]),
        same="yes" if len(references) == 1 else f"no, {len(references)}",
    )
    held = ("MiB", "descriptors", "threads", "groups")
    yield f"\n| rank, first check -> last | {' | '.join(held)} |\n|---|{'---|' * len(held)}\n"
    for rank, rows in enumerate(ranks):
        cells = (f"{rows[0][name]} -> {rows[-1][name]}" for name in held)
        yield f"| {rank} | {' | '.join(cells)} |\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
