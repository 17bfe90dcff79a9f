"""Tries many files and indexes: `python -m tools.fuzz --count 1000000 --seed 1 --record docs/fuzz.json`."""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from tools.fuzz.inputs import broken_file, broken_index
from tools.fuzz.verdicts import Disagreement, judge_file, judge_index

Make = Callable[[random.Random], bytes]
Judge = Callable[[bytes], str]


def tally(make: Make, judge: Judge, count: int, seed: int) -> Counter[str]:
    """Return how many of `count` inputs had which outcome.

    Raises:
        Disagreement: with the seed and the bytes, of the first input whose outcome must not be.
    """
    outcomes: Counter[str] = Counter()
    for number in range(count):
        content = make(random.Random(f"{seed}/{number}"))
        try:
            outcomes[judge(content)] += 1
        except Disagreement as error:
            raise Disagreement(f"input {number} of seed {seed}: {error}\n{content!r}") from error
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="inputs of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="JSON file to write")
    options = parser.parse_args()
    start = time.process_time()
    files = tally(broken_file, judge_file, options.count, options.seed)
    indexes = tally(broken_index, judge_index, options.count // 10, options.seed)
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "seed": options.seed,
        "files": dict(sorted(files.items())),
        "indexes": dict(sorted(indexes.items())),
        "disagreements": 0,
        "cpu_seconds": round(time.process_time() - start, 1),
        "python": platform.python_version(),
        "safetensors": version("safetensors"),
    }
    print(json.dumps(record, indent=2))
    if options.record:
        options.record.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
