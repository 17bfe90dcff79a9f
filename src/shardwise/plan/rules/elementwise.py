"""Rules of functions that treat each element on its own, and of broadcasting.

Also what the other themes build on: `operand_rule` for functions of one tensor, `keep_whole` for dims that must
not be cut, and `agree` for tensors that meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from shardwise.plan.layout import Activation, Partial, Shard
from shardwise.plan.repair import Align, KeepWhole, Repair, ShardToo
from shardwise.plan.rules import WHOLE, Call, Mismatch, Result, Rule, rule

Test = Callable[[Call], bool]
OperandRule = Callable[[Call, Tensor, Shard], Result]

ONE_SHARD = "shard both the same way, or neither"


def always(call: Call) -> bool:
    """Say that a function is linear in its operand whatever its arguments are."""
    return True


def never(call: Call) -> bool:
    """Say that a function is not linear in its operand."""
    return False


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape as a plain tuple, as messages show it."""
    return tuple(tensor.shape)


def operand(call: Call) -> Any:
    """Return the first argument, which most functions call `input`."""
    return call.argument(0, "input")


def whole_rest(call: Call, x: Any, tensors: Iterable[Tensor] | None = None) -> None:
    """Refuse a call in which another tensor than `x` is not whole: an index, a weight, a number of repeats."""
    for other in call.tensors if tensors is None else tensors:
        if other is not x and call.layout(other) != WHOLE:
            raise Mismatch(
                f"{call.name} is given {call.layout(other)} from {call.source(other)} "
                f"beside its operand of shape {tuple(x.shape)} from {call.source(x)}",
                f"leave {call.source(other)} out of the plan",
                KeepWhole(call.made_by(other), call.name),
            )


def refuse_partial(call: Call, x: Tensor) -> Mismatch:
    """Return the fault of a function that is not linear and is given a partial sum."""
    return Mismatch(
        f"{call.name} is not linear and is given a partial sum from {call.source(x)}",
        f"leave {call.source(x)} out of the plan, or plan what multiplies it as rowwise, which sums it up",
        KeepWhole(call.made_by(x), call.name),
    )


def operand_rule(*names: str, linear: Test = never) -> Callable[[OperandRule], Rule]:
    """Register the rule of functions of one tensor, which sees a call only when that tensor is a shard.

    A partial sum stays one where `linear` says so of the call. All other tensors must be whole.
    """

    def register(function: OperandRule) -> Rule:
        @rule(*names)
        def checked(call: Call) -> Result:
            x = operand(call)
            whole_rest(call, x)
            layout = call.layout(x)
            if isinstance(layout, Shard):
                return function(call, x, layout)
            if isinstance(layout, Partial) and not linear(call):
                raise refuse_partial(call, x)
            return layout

        return checked

    return register


def dims_argument(call: Call, x: Tensor, position: int, *names: str, default: Any = None) -> tuple[int, ...]:
    """Return the dims that an argument names, counted from the front; all of them if it is left out."""
    value = call.argument(position, names[0])
    if value is None:
        value = next((call.kwargs[name] for name in names if name in call.kwargs), default)
    if isinstance(value, int) and not isinstance(value, bool):
        value = [v for v in call.args[position:] if type(v) is int] if names[0] == "dims" else [value]
    if not isinstance(value, (list, tuple)) or not value:
        return tuple(range(x.ndim))
    return tuple(dim % x.ndim for dim in value)


def keep_whole(call: Call, x: Tensor, shard: Shard, dims: Iterable[int], does: str) -> Shard:
    """Return `shard` if it is along none of `dims`, which the function needs whole."""
    if shard.dim in dims:
        raise Mismatch(
            f"{call.name} {does} the sharded dim of {shape_of(x)}, {shard} from {call.source(x)}",
            f"leave {call.source(x)} out of the plan, or give the module a style that handles its sharded input",
            KeepWhole(call.made_by(x), call.name),
        )
    return shard


# ---------------------------------------------------------------- one tensor


LINEAR = ("contiguous", "clone", "detach", "neg", "negative", "positive", "data", "requires_grad_")
LINEAR_COMPLEX = ("real", "imag", "conj", "resolve_conj", "resolve_neg")
LINEAR_IN_PLACE = ("neg_", "zero_")
CASTS = ("to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "bool", "cpu")
LIKE = ("zeros_like", "ones_like", "full_like", "empty_like")
NEW = ("new_zeros", "new_ones", "new_full", "new_empty")
UNARY = (
    "abs", "acos", "alpha_dropout", "angle", "asin", "atan", "bitwise_not", "ceil", "celu", "cos",
    "cosh", "deg2rad", "dropout", "elu", "erf", "exp", "exp2", "expm1", "floor", "frac", "gelu",
    "hardsigmoid", "hardswish", "hardtanh", "__invert__", "isfinite", "isinf", "isnan",
    "leaky_relu", "log", "log10", "log1p", "log2", "logical_not", "logit", "logsigmoid", "mish",
    "nan_to_num", "reciprocal", "relu", "relu6", "round", "rsqrt", "selu", "sigmoid", "sign",
    "silu", "sin", "sinc", "sinh", "softplus", "softsign", "sqrt", "square", "tan", "tanh", "trunc",
)  # fmt: skip
UNARY_IN_PLACE = (
    "abs_", "cos_", "exp_", "fill_", "nan_to_num_", "reciprocal_", "relu_", "round_", "rsqrt_",
    "sigmoid_", "sin_", "sqrt_", "square_", "tanh_",
)  # fmt: skip


@operand_rule(*LINEAR, *LINEAR_COMPLEX, *LINEAR_IN_PLACE, linear=always)
def linear_unary(call: Call, x: Tensor, shard: Shard) -> Result:
    """Keep the layout."""
    return shard


@operand_rule(*UNARY, *UNARY_IN_PLACE)
def unary(call: Call, x: Tensor, shard: Shard) -> Result:
    """Keep the layout, unless the function draws random numbers: no rank draws those of the whole tensor."""
    if call.name in ("dropout", "alpha_dropout"):
        p, training = call.argument(1, "p", 0.5), call.argument(2, "training", call.name == "dropout")
        if p and training:
            raise Mismatch(
                f"{call.name} draws random numbers for {shard} from {call.source(x)}",
                "put the model in eval mode, or set the dropout to 0",
                KeepWhole(call.made_by(x), call.name),
            )
    return shard


@rule(*CASTS)
def cast(call: Call) -> Result:
    """Keep the layout; a second tensor only lends its dtype and device. Rounding to integers is not linear."""
    x = operand(call)
    if isinstance(call.layout(x), Partial) and not (
        call.output.is_floating_point() or call.output.is_complex()
    ):
        raise refuse_partial(call, x)
    return call.layout(x)


@rule(*LIKE)
def like(call: Call) -> Result:
    """Keep a shard; of the values of a partial sum nothing is left."""
    layout = call.layout(operand(call))
    return layout if isinstance(layout, Shard) else WHOLE


@rule(*NEW)
def new(call: Call) -> Result:
    """Return a whole tensor: the first one only lends its dtype and device."""
    whole_rest(call, operand(call))
    return WHOLE


# ---------------------------------------------------------------- tensors that meet


SUMS = ("add", "sub", "subtract", "__rsub__", "rsub", "add_", "sub_")
PRODUCTS = ("mul", "multiply", "mul_")
QUOTIENTS = ("div", "divide", "true_divide", "div_")
BINARY = (
    "addcdiv", "addcmul", "__and__", "atan2", "bitwise_and", "bitwise_or", "clamp", "clamp_max",
    "clamp_min", "clip", "complex", "__eq__", "eq", "float_power", "floor_divide", "__floordiv__",
    "fmod", "ge", "gt", "heaviside", "hypot", "isclose", "le", "lerp", "logaddexp", "logical_and",
    "logical_or", "logical_xor", "lt", "masked_fill", "maximum", "minimum", "__ne__", "ne",
    "__or__", "polar", "__pow__", "pow", "remainder", "__rfloordiv__", "__rmod__", "__rpow__",
    "__rtruediv__", "where", "xlogy", "__xor__",
)  # fmt: skip
BINARY_IN_PLACE = (
    "addcdiv_", "addcmul_", "clamp_", "copy_", "floor_divide_", "__ipow__", "lerp_", "logical_and_",
    "logical_or_", "masked_fill_", "pow_", "remainder_",
)  # fmt: skip


def agree(call: Call, operands: Sequence[tuple[Tensor, Activation]], ndim: int) -> Activation:
    """Return the layout of a result of `ndim` dims whose operands, none partial, are aligned at the last dim.

    All shards must be equal. A whole operand passes if it lacks the sharded dim, has size 1 there, or repeats its
    values all along it, or at least all along each block: then the code makes it as large as the rank's piece.
    """
    sharded = [(x, s.at(s.dim + ndim - x.ndim)) for x, s in operands if isinstance(s, Shard)]
    if not sharded:
        return WHOLE
    first, shard = sharded[0]
    for other, its in sharded:
        if its != shard:
            raise unequal(call, first, shard, other, its)
    for other, layout in operands:
        dim = shard.dim - (ndim - other.ndim)
        if isinstance(layout, Shard) or dim < 0 or follows(call, other, dim):
            continue
        if not repeats_along_blocks(shard.blocks, call.repeated(other)[dim]):
            raise whole_beside(call, first, shard, other, dim)
    return shard


def follows(call: Call, whole: Tensor, dim: int) -> bool:
    """Return whether a whole tensor can meet a shard along `dim`."""
    return whole.shape[dim] == 1 or call.repeated(whole)[dim] == whole.shape[dim]


def repeats_along_blocks(blocks: Sequence[int], run: int) -> bool:
    """Return whether each block lies in one run of equal values: a mask, repeated for each head of a sample."""
    ends = accumulate(blocks)
    return all((end - block) // run == (end - 1) // run for block, end in zip(blocks, ends, strict=True))


def unequal(call: Call, x: Tensor, shard: Shard, other: Tensor, its: Shard) -> Mismatch:
    """Return the fault of two shards that meet and differ."""
    return Mismatch(
        f"{call.name} combines {shard} from {call.source(x)} with {its} from {call.source(other)}",
        "give both the same blocks",
        Align(call.made_by(x), shard, call.made_by(other), its),
    )


def whole_beside(call: Call, x: Tensor, shard: Shard, whole: Tensor, dim: int) -> Mismatch:
    """Return the fault of a shard that meets a whole tensor; `dim` is the one of `whole` that must be cut."""
    return Mismatch(
        f"{call.name} combines {shard} from {call.source(x)} "
        f"with a whole tensor of {shape_of(whole)} from {call.source(whole)}",
        f"shard {call.source(whole)} the same way, or leave {call.source(x)} out of the plan",
        ShardToo(call.made_by(whole), dim, whole.ndim, shard.at(dim)),
    )


def broadcast(call: Call, tensors: Sequence[Tensor], ndim: int) -> Activation:
    """Return the layout of a function that is linear in none of its operands."""
    operands = [(x, call.layout(x)) for x in tensors]
    for x, layout in operands:
        if isinstance(layout, Partial):
            raise refuse_partial(call, x)
    return agree(call, operands, ndim)


def elementwise(call: Call, tensors: Sequence[Tensor]) -> Activation:
    """Return the layout of a broadcasting function; one that writes in place must not write into a whole tensor."""
    target = tensors[0]
    in_place = call.name.endswith("_") and (not call.name.endswith("__") or call.name == "__ipow__")
    written = next((t for t in tensors if isinstance(call.layout(t), Shard)), None)
    if in_place and written is not None and call.layout(target) == WHOLE:
        raise writes_into_whole(call, target, written)
    return broadcast(call, tensors, call.output.ndim)


def writes_into_whole(call: Call, target: Tensor, written: Tensor) -> Mismatch:
    """Return the fault of a function that writes something sharded into a whole tensor."""
    shard = call.layout(written)
    repair: Repair = KeepWhole(call.made_by(written), call.name)
    if isinstance(shard, Shard) and call.name != "__setitem__":
        dim = shard.dim + target.ndim - written.ndim
        repair = ShardToo(call.made_by(target), dim, target.ndim, shard.at(dim))
    return Mismatch(
        f"{call.name} writes {shard} from {call.source(written)} into {call.layout(target)} "
        f"of {shape_of(target)} from {call.source(target)}",
        "create the target from a sharded tensor (empty_like), or leave the producer out of the plan",
        repair,
    )


@rule(*BINARY, *BINARY_IN_PLACE)
def binary(call: Call) -> Result:
    """Broadcast; a partial sum is refused."""
    tensors = call.tensors
    if call.name == "where" and not isinstance(call.output, Tensor):
        raise Mismatch(
            f"where lists the indices of {call.layout(tensors[0])} from {call.source(tensors[0])}",
            ONE_SHARD,
            KeepWhole(call.made_by(tensors[0]), call.name),
        )
    return elementwise(call, tensors)


@rule(*SUMS)
def add(call: Call) -> Result:
    """Broadcast; a sum of partial sums is one. A whole term would be added once per rank."""
    terms = [call.argument(0, "input"), call.argument(1, "other")]
    partial = [isinstance(call.layout(term), Partial) for term in terms]
    if all(partial):
        return Partial()
    if any(partial):
        whole = terms[partial.index(False)]
        raise Mismatch(
            f"{call.name} adds {whole_name(call, whole)} on each rank to a partial sum "
            f"from {call.source(terms[partial.index(True)])}",
            "plan what makes the partial sum as rowwise, which adds the bias once",
            KeepWhole(call.made_by(terms[partial.index(True)]), call.name),
        )
    return elementwise(call, call.tensors)


def whole_name(call: Call, value: Any) -> str:
    """Return a term's name in a message: a number, or a tensor with its layout and producer."""
    if not isinstance(value, Tensor):
        return str(value)
    return f"a {call.layout(value)} tensor of {shape_of(value)} from {call.source(value)}"


@rule(*PRODUCTS)
def multiply(call: Call) -> Result:
    """Broadcast; a partial sum times whatever is whole stays one."""
    return scaled(call, call.argument(0, "input"), call.argument(1, "other"), either=True)


@rule(*QUOTIENTS)
def divide(call: Call) -> Result:
    """Broadcast; a partial sum through whatever is whole stays one, unless the quotient is rounded."""
    exact = call.kwargs.get("rounding_mode") is None
    return scaled(call, call.argument(0, "input"), call.argument(1, "other"), either=False, exact=exact)


def scaled(call: Call, x: Any, y: Any, *, either: bool, exact: bool = True) -> Activation:
    """Return the layout of a product; a partial second operand passes only where `either` may be scaled."""
    first, second = call.layout(x), call.layout(y)
    if exact and (first, second) == (Partial(), WHOLE):
        return Partial()
    in_place = call.name.endswith("_")
    if exact and either and not in_place and (first, second) == (WHOLE, Partial()):
        return Partial()
    return elementwise(call, call.tensors)


@rule("expand_as")
def expand_as(call: Call) -> Result:
    """Broadcast against the shape of the second tensor, whose values do not matter."""
    x, other = operand(call), call.argument(1, "other")
    layout, shape = call.layout(x), call.layout(other)
    if not isinstance(layout, Partial):
        return agree(
            call, [(x, layout), (other, WHOLE if isinstance(shape, Partial) else shape)], call.output.ndim
        )
    if isinstance(shape, Shard):
        raise refuse_partial(call, x)
    return layout


@rule("broadcast_tensors")
def broadcast_tensors(call: Call) -> Result:
    """Broadcast all: each result is as large as the others."""
    return broadcast(call, call.tensors, call.output[0].ndim)
