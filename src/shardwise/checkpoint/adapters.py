"""What can be wrong with the file of a LoRA adapter, known from its header. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shardwise.checkpoint.untrusted import Invalid, opened, parse_object
from shardwise.errors import CheckpointError

_PAIRS = (("lora_A", "lora_B"), ("lora_down", "lora_up"), ("lora.down", "lora.up"))
"""What a pair of factors is called, in PEFT and in other trainers."""


def check_factors(names: Iterable[str], adapter: object) -> None:
    """Refuse an adapter that is empty, or has one factor of a pair: the other would be whatever memory holds.

    Args:
        names: Names of its tensors.
        adapter: What to call it in messages.

    Raises:
        CheckpointError: it is such an adapter.
    """
    there = set(names)
    if not there:
        raise CheckpointError(f"the adapter {adapter} has no tensors: save or fetch it again")
    for name in sorted(there):
        other = _partner(name)
        if other is not None and other not in there:
            raise CheckpointError(f"the adapter {adapter} has {name} and no {other}: save or fetch it again")


def _partner(name: str) -> str | None:
    if name.endswith(".bias"):  # of the second factor alone
        return None
    for pair in _PAIRS:
        for one, other in (pair, pair[::-1]):
            if f".{one}." in name or f"_{one}." in name:
                return other.join(name.rsplit(one, 1))
    return None


def check_adapter_file(file: Path) -> None:
    """Check the header of an adapter's file; one that is no safetensors file is left to who reads it.

    Raises:
        CheckpointError: there is no such file, or it is no adapter.
    """
    if file.suffix != ".safetensors":
        return
    try:
        with opened(file) as (stream, size):
            length = int.from_bytes(stream.read(8), "little")
            if length > size - 8:
                raise Invalid("it is shorter than its header says")
            names = parse_object(stream.read(length)).keys() - {"__metadata__"}
    except Invalid as error:
        raise CheckpointError(f"{file} is no safetensors file: {error}") from error
    check_factors(names, file)
