"""Rules of functions that run along dims, which must then be whole: reductions, softmax, norms, filters."""

from __future__ import annotations

from torch import Tensor

from shardwise.plan.layout import Partial, Shard
from shardwise.plan.rules import Call, Result, rule
from shardwise.plan.rules.elementwise import (
    always,
    dims_argument,
    elementwise,
    keep_whole,
    operand,
    operand_rule,
    refuse_partial,
    whole_rest,
)

# ---------------------------------------------------------------- reductions


def reduced(call: Call, x: Tensor, shard: Shard, position: int) -> Shard:
    """Return where the shard lies when the dims that the argument at `position` names are reduced."""
    dims = dims_argument(call, x, position, "dim", "axis")
    keep_whole(call, x, shard, dims, "reduces over")
    output = call.output if isinstance(call.output, Tensor) else call.output[0]
    kept = output.ndim == x.ndim
    return shard if kept else shard.at(shard.dim - sum(dim < shard.dim for dim in dims))


@operand_rule("sum", "mean", linear=always)
def total(call: Call, x: Tensor, shard: Shard) -> Result:
    """Drop the reduced dims."""
    return reduced(call, x, shard, 1)


@operand_rule(
    "all", "amax", "amin", "any", "argmax", "argmin", "count_nonzero", "logsumexp", "median", "prod", "std",
    "std_mean", "var", "var_mean",
)  # fmt: skip
def reduction(call: Call, x: Tensor, shard: Shard) -> Result:
    """Drop the reduced dims."""
    return reduced(call, x, shard, 1)


@operand_rule("norm", "vector_norm")
def norm(call: Call, x: Tensor, shard: Shard) -> Result:
    """Drop the reduced dims, which come after the order of the norm."""
    return reduced(call, x, shard, 2)


@rule("max", "min")
def extreme(call: Call) -> Result:
    """Compare two tensors element by element, or reduce one."""
    x = operand(call)
    if isinstance(call.argument(1, "other"), Tensor):
        return elementwise(call, call.tensors)
    whole_rest(call, x)
    layout = call.layout(x)
    if isinstance(layout, Partial):
        raise refuse_partial(call, x)
    assert isinstance(layout, Shard)  # a rule sees no call of whole tensors only
    return reduced(call, x, layout, 1)


# ---------------------------------------------------------------- functions along a dim


def along(
    call: Call, x: Tensor, shard: Shard, position: int, name: str = "dim", default: int | None = None
) -> Shard:
    """Keep the shard if the function runs along other dims."""
    return keep_whole(call, x, shard, dims_argument(call, x, position, name, default=default), "runs along")


@operand_rule("softmax", "log_softmax", "cumprod", "cummax", "logcumsumexp")
def softmax(call: Call, x: Tensor, shard: Shard) -> Result:
    """Keep the shard of another dim."""
    return along(call, x, shard, 1)


@operand_rule("cumsum", "cumsum_", linear=always)
def cumsum(call: Call, x: Tensor, shard: Shard) -> Result:
    """Keep the shard of another dim."""
    return along(call, x, shard, 1)


@operand_rule("sort", "argsort")
def sort(call: Call, x: Tensor, shard: Shard) -> Result:
    """Keep the shard of another dim."""
    return along(call, x, shard, 1, default=-1)


@operand_rule("topk")
def topk(call: Call, x: Tensor, shard: Shard) -> Result:
    """Keep the shard of another dim."""
    return along(call, x, shard, 2, default=-1)


@operand_rule("normalize")
def normalize(call: Call, x: Tensor, shard: Shard) -> Result:
    """Keep the shard of another dim."""
    return along(call, x, shard, 2, default=1)


@operand_rule("flip", linear=always)
def flip(call: Call, x: Tensor, shard: Shard) -> Result:
    """Keep the shard of another dim."""
    return along(call, x, shard, 1, "dims")


@operand_rule("roll", linear=always)
def roll(call: Call, x: Tensor, shard: Shard) -> Result:
    """Keep the shard of another dim."""
    return along(call, x, shard, 2, "dims")


@operand_rule("diff", linear=always)
def diff(call: Call, x: Tensor, shard: Shard) -> Result:
    """Keep the shard of another dim."""
    return along(call, x, shard, 2, default=-1)


# ---------------------------------------------------------------- norms


@operand_rule("layer_norm", "rms_norm")
def layer_norm(call: Call, x: Tensor, shard: Shard) -> Result:
    """Keep the shard of a dim in front of those that are normalised."""
    normalised = len(call.argument(1, "normalized_shape"))
    return keep_whole(call, x, shard, range(x.ndim - normalised, x.ndim), "normalises over")


@operand_rule("group_norm", "instance_norm")
def group_norm(call: Call, x: Tensor, shard: Shard) -> Result:
    """Keep a shard of the batch."""
    return keep_whole(call, x, shard, range(1, x.ndim), "normalises over")


@operand_rule("batch_norm")
def batch_norm(call: Call, x: Tensor, shard: Shard) -> Result:
    """Keep the shard where the statistics are given, except one of the channels, whose parameters are whole."""
    training = call.argument(5, "training", False)
    return keep_whole(call, x, shard, range(x.ndim) if training else [1], "normalises over")


# ---------------------------------------------------------------- filters


def pads_linearly(call: Call) -> bool:
    """Say that padding is linear unless it adds a number other than 0."""
    return call.argument(2, "mode", "constant") != "constant" or not call.argument(3, "value")


@operand_rule("pad", linear=pads_linearly)
def pad(call: Call, x: Tensor, shard: Shard) -> Result:
    """Keep the shard of a dim that is not padded; the padding is listed from the last dim on."""
    sizes = call.argument(1, "pad")
    padded = [x.ndim - 1 - i // 2 for i, size in enumerate(sizes) if size]
    return keep_whole(call, x, shard, padded, "pads")


@operand_rule("tril", "triu", linear=always)
def triangle(call: Call, x: Tensor, shard: Shard) -> Result:
    """Keep the shard of a dim in front of the matrices."""
    return keep_whole(call, x, shard, (x.ndim - 2, x.ndim - 1), "masks")


@operand_rule("view_as_complex", linear=always)
def view_as_complex(call: Call, x: Tensor, shard: Shard) -> Result:
    """Keep the shard of a dim in front of the pairs."""
    return keep_whole(call, x, shard, [x.ndim - 1], "pairs the indices of")


@operand_rule("view_as_real", linear=always)
def view_as_real(call: Call, x: Tensor, shard: Shard) -> Result:
    """Keep the shard: the pairs come last."""
    return shard


@operand_rule(
    "interpolate", "avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d"
)
def filtered(call: Call, x: Tensor, shard: Shard) -> Result:
    """Keep the shard of the batch or the channels, each of which is filtered on its own."""
    unbatched = call.name != "interpolate" and x.ndim == int(call.name[-2]) + 1
    return keep_whole(call, x, shard, range(1 if unbatched else 2, x.ndim), "filters along")


@operand_rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def pooled(call: Call, x: Tensor, shard: Shard) -> Result:
    """Keep the shard of the batch or the channels."""
    return keep_whole(call, x, shard, range(x.ndim - int(call.name[-2]), x.ndim), "filters along")


@operand_rule("pixel_shuffle", "pixel_unshuffle", linear=always)
def pixel_shuffle(call: Call, x: Tensor, shard: Shard) -> Result:
    """Keep a shard of the batch: channels and places are mixed."""
    return keep_whole(call, x, shard, range(x.ndim - 3, x.ndim), "mixes")
