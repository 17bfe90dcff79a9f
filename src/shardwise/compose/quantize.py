"""Quantized weights on a sharded model: which configurations of torchao go with slices, and where a slice may begin.

Every rank quantizes what it holds. A scale belongs to a block of neighbouring weights: a row, a group of inputs of a
row, or all of them. Where the ranks hold rows, a rank's part of the quantized weight is that of one process. Where
they hold inputs, each has scales of its own, for fewer weights, and its groups are those of one process if none of
them is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import gcd
from typing import Any

import torch

from shardwise.errors import UnsupportedOption
from shardwise.plan.layout import Shard
from shardwise.plan.resolve import ResolvedPlan

_MAX_LINES = 10

WHOLE = 0
"""All rows of a weight, or all inputs: as many as a rank holds."""

Block = tuple[int, int]
"""How many neighbouring rows and inputs of a weight have one scale."""


def _weights_granularity(config: Any) -> Any:
    """Return the granularity of weights, where that of activations may stand in front of it."""
    granularity = config.granularity
    return granularity[1] if isinstance(granularity, list | tuple) else granularity


_GRANULARITIES: dict[str, Callable[[Any], Any]] = {
    "Int8WeightOnlyConfig": _weights_granularity,
    "Int8DynamicActivationInt8WeightConfig": _weights_granularity,
    "Float8WeightOnlyConfig": _weights_granularity,
    "IntxWeightOnlyConfig": _weights_granularity,
    "Int8DynamicActivationIntxWeightConfig": lambda config: config.weight_granularity,
    "Int4WeightOnlyConfig": lambda config: config,
}
"""Configurations of torchao -> what says which weights share a scale; those that are not listed are refused."""


def block_of(config: Any) -> Block:
    """Return how many rows and inputs of a weight share a scale.

    Raises:
        UnsupportedOption: it is not known of this configuration of torchao that it goes with slices.
    """
    name = type(config).__name__
    if name not in _GRANULARITIES:
        raise UnsupportedOption(
            f"quantization_config={name} cannot be combined with tensor parallelism: it has not been proved on slices "
            f"of weights; use one of {', '.join(_GRANULARITIES)}, or call torchao's quantize_ on the sharded model"
        )
    granularity = _GRANULARITIES[name](config)
    group = getattr(granularity, "group_size", None)
    if group is not None:
        return 1, int(group)
    return (WHOLE, WHOLE) if type(granularity).__name__ == "PerTensor" else (1, WHOLE)


def check_device(device: torch.device, configs: Iterable[Any]) -> None:
    """Refuse to compute with weights and activations of 8 bits where that gives wrong numbers.

    Args:
        device: Where the model computes.
        configs: The configurations of torchao that are asked for.

    Raises:
        UnsupportedOption: the processor multiplies such numbers wrongly.
    """
    names = {type(config).__name__ for config in configs}
    if device.type == "cpu" and names & _MULTIPLY_INT8 and not multiplies_int8_rightly():
        raise UnsupportedOption(
            f"quantization_config={', '.join(sorted(names & _MULTIPLY_INT8))} gives wrong numbers on this processor, "
            "in one process as well: it has no VNNI instructions, and torch's products of 8-bit integers overflow "
            "without; quantize the weights alone, with Int8WeightOnlyConfig"
        )


_MULTIPLY_INT8 = {"Int8DynamicActivationInt8WeightConfig"}
"""Configurations by which integers of 8 bits are multiplied."""


def multiplies_int8_rightly() -> bool:
    """Return whether torch's products of 8-bit integers are right on this processor.

    On x86-64, oneDNN adds pairs of products in 16 bits where the processor has no instruction that adds them in 32, and
    what does not fit is cut off (its developer guide, "Nuances of int8 Computations").
    """
    size, largest = 32, torch.iinfo(torch.int8).max
    full = torch.full((size, size), largest, dtype=torch.int8, device="cpu")
    return bool((torch._int_mm(full, full) == size * largest**2).all())


def check_borders(plan: ResolvedPlan, configs: Mapping[str, Any]) -> None:
    """Refuse to quantize a weight of which a block would lie on two ranks.

    Args:
        plan: How the weights lie on the ranks.
        configs: The configuration of torchao for each Linear that is to be quantized, by path.

    Raises:
        UnsupportedOption: naming the layers, and the sizes.
    """
    blocks = {path: block_of(config) for path, config in configs.items()}
    cut = list(_cut(plan, blocks))
    if cut:
        lines = [f"  {line}" for line, _ in cut[:_MAX_LINES]]
        lines += [f"  and {len(cut) - _MAX_LINES} more"] if len(cut) > _MAX_LINES else []
        fit = gcd(*(border for _, border in cut))
        raise UnsupportedOption(
            f"quantization_config cannot be combined with tensor parallelism of degree {plan.degree}: groups of "
            f"weights that share a scale would lie on two ranks, in {len(cut)} layers; use groups of a divisor of "
            f"{fit}, name the layers in modules_to_not_convert, or use another degree\n" + "\n".join(lines)
        )


def _cut(plan: ResolvedPlan, blocks: Mapping[str, Block]) -> Iterator[tuple[str, int]]:
    """Yield a line for each layer of which a block is cut, and a size that divides all borders of its slices."""
    for planned in plan.modules:
        shard = planned.layouts.get("weight")
        if planned.path not in blocks or not isinstance(shard, Shard):
            continue
        size = blocks[planned.path][shard.dim]
        spans = [span for rank in range(plan.degree) for span in shard.spans(rank, plan.degree)]
        common = gcd(*(border for span in spans for border in (span.start, span.length)))
        # What torchao makes of a weight whose size is no multiple of the groups, it makes of the slices as well.
        if size != WHOLE and shard.size % size == 0 and common % size:
            kind = "input" if shard.dim else "output"
            widths = " and ".join(
                str(n) for n in sorted({shard.local_size(r, plan.degree) for r in (0, plan.degree - 1)})
            )
            yield (
                f"{planned.path}: groups of {size}, slices of {widths} of {shard.size} {kind} features",
                common,
            )
