"""Fuzzing led by coverage: `python -m tools.fuzz.guided -max_total_time=600`, with the options of libFuzzer.

Needs atheris. The first byte of an input says what the rest is: an index, a file, or a header that is given its length
and its data, which chance would not find.
"""

from __future__ import annotations

import random
import sys

import atheris

with atheris.instrument_imports(include=["shardwise.checkpoint", "json.decoder", "json.scanner"]):
    from tools.fuzz.verdicts import judge_file, judge_index

from tools.fuzz.inputs import broken_file, broken_index


def judge(data: bytes) -> None:
    """Judge one input.

    Raises:
        Disagreement: its outcome must not be.
    """
    kind, content = data[:1], data[1:]
    if kind == b"i":
        judge_index(content)
    elif kind == b"f":
        judge_file(content)
    else:
        size = kind[0] if kind else 0
        judge_file(len(content).to_bytes(8, "little") + content + bytes(size))


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Return libFuzzer's mutation of an input, or now and then a new one that is nearly right."""
    rng = random.Random(seed)
    if rng.random() < 0.9:
        mutated: bytes = atheris.Mutate(data, max_size)
        return mutated
    made = b"i" + broken_index(rng) if rng.random() < 0.3 else b"f" + broken_file(rng)
    return made[:max_size]


def main() -> None:
    """Run until a time or a count is reached, or an input is found that must not be."""
    atheris.Setup([*sys.argv, "-max_len=1024"], judge, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
