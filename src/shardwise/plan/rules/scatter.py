"""Rules of functions that add rows of one tensor to rows of another, as experts are put together.

Nothing is a partial sum too: a tensor of zeros has the sum that its terms on the ranks have, which are zeros.
"""

from __future__ import annotations

from torch import Tensor

from shardwise.plan.layout import Activation, Partial, Shard
from shardwise.plan.repair import KeepWhole
from shardwise.plan.rules import WHOLE, Call, Mismatch, Result, rule
from shardwise.plan.rules.elementwise import (
    CASTS,
    follows,
    keep_whole,
    operand,
    refuse_partial,
    unequal,
    whole_beside,
    whole_rest,
)
from shardwise.plan.rules.shape import PERMUTATIONS, VIEWS

ZEROS = frozenset(["zeros", "zeros_like", "new_zeros", "zero_"])
KEEP_ZEROS = frozenset(
    ["contiguous", "clone", "detach", "squeeze", "unsqueeze", *CASTS, *VIEWS, *PERMUTATIONS]
)


def is_nothing(call: Call) -> bool:
    """Return whether a call gives a tensor of zeros, or one without elements."""
    if not isinstance(call.output, Tensor):
        return False
    kept = call.name in KEEP_ZEROS and call.is_nothing(operand(call))
    return call.name in ZEROS or kept or not call.output.numel()


@rule("scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_add", "index_add_")
def add_rows(call: Call) -> Result:
    """Add partial sums to partial sums, or shards to shards that are cut along a dim whose places are kept."""
    target, index = operand(call), call.argument(2, "index")
    by_rows = call.name.startswith("index")
    source = call.argument(3, "source" if by_rows else "src")
    partial = any(isinstance(call.layout(t), Partial) for t in call.tensors)
    if partial or by_rows:
        whole_rest(call, target, [index])
    if partial:
        return summed(call, target, source)
    cut = [(t, layout) for t in call.tensors if isinstance(layout := call.layout(t), Shard)]
    first, shard = cut[0]
    keep_whole(call, first, shard, [call.argument(1, "dim") % target.ndim], "moves rows along")
    for t in (target, source) if by_rows else (target, source, index):
        layout = call.layout(t)
        if isinstance(layout, Shard) and layout != shard:
            raise unequal(call, first, shard, t, layout)
        as_large = t is index and follows(call, t, shard.dim) and t.shape[shard.dim] == shard.size
        if layout == WHOLE and not as_large:
            raise whole_beside(call, first, shard, t, shard.dim)
    return shard


def summed(call: Call, target: Tensor, source: Tensor) -> Activation:
    """Return the layout of rows that are added where one of the two is a partial sum: the other must be one too."""
    linear = not call.name.startswith("scatter_reduce") or call.argument(4, "reduce") == "sum"
    for t, other in ((target, source), (source, target)):
        layout = call.layout(t)
        if isinstance(layout, Partial) and not linear:
            raise refuse_partial(call, t)
        if not isinstance(layout, Partial) and not call.is_nothing(t):
            raise Mismatch(
                f"{call.name} adds a partial sum from {call.source(other)} and {layout} from {call.source(t)}, "
                "which would count once on each rank",
                f"make both partial sums, or sum up {call.source(other)} first",
                KeepWhole(call.made_by(other), call.name),
            )
    return Partial()
