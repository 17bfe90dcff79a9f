"""Rules of products that sum over a dim: Linears, convolutions, matrix products, attention.

Where both operands are cut alike along the dim that is summed over, each rank has one term: a partial sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwise.plan.layout import Activation, Partial, Shard
from shardwise.plan.repair import Align, KeepWhole, PlanRowwise, ShardToo
from shardwise.plan.rules import WHOLE, Call, Mismatch, Result, rule
from shardwise.plan.rules.elementwise import (
    agree,
    follows,
    keep_whole,
    operand,
    operand_rule,
    refuse_partial,
    shape_of,
    unequal,
    whole_beside,
)

# ---------------------------------------------------------------- weights


def no_bias(call: Call) -> bool:
    """Say that a product with a weight is linear if no bias is added, once on each rank."""
    return call.argument(2, "bias") is None


@operand_rule("linear", linear=no_bias)
def linear(call: Call, x: Tensor, shard: Shard) -> Result:
    """Keep the shard of another dim than the last: the Linear is not planned, its weight is whole."""
    if shard.dim < x.ndim - 1:
        return shard
    weight = call.argument(1, "weight")
    path = next(iter(call.made_by(weight)), "")
    raise Mismatch(
        f"unplanned Linear {path} is fed {shard} from {call.source(x)}",
        f"plan {path or 'it'} as rowwise with blocks {list(shard.blocks)}, or leave {call.source(x)} out of the plan",
        PlanRowwise(path, shard.blocks) if path else KeepWhole(call.made_by(x), call.name),
    )


@operand_rule(
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", linear=no_bias
)
def convolution(call: Call, x: Tensor, shard: Shard) -> Result:
    """Keep a shard of the batch."""
    places = int(call.name[-2])
    return keep_whole(call, x, shard, range(x.ndim - places - 1, x.ndim), "filters along")


# ---------------------------------------------------------------- contractions


Labelled = Sequence[tuple[Tensor, str]]
"""Tensors with one letter for each of their dims, as in einsum."""


def contraction(call: Call, operands: Labelled, output: str) -> Activation:
    """Return the layout of a sum of products: one letter is cut, in all operands that have it."""
    if any(isinstance(call.layout(t), Partial) for t, _ in operands):
        return one_partial(call, operands)
    cut = [(t, letters[s.dim], s) for t, letters in operands if isinstance(s := call.layout(t), Shard)]
    assert cut  # a rule sees no call of whole tensors only
    first, letter, shard = cut[0]
    for other, its_letter, its in cut:
        if its_letter != letter or its.at(shard.dim) != shard:
            raise unequal(call, first, shard, other, its)
    for t, letters in operands:
        refuse_uncut(call, (first, shard), t, letters, letter)
    if letter in output:
        return shard.at(output.index(letter))
    keep_single(call, first, shard)
    return Partial()


def keep_single(call: Call, x: Tensor, shard: Shard) -> None:
    """Refuse a sum over a dim whose pieces several ranks hold: each of them would add the same terms."""
    if shard.copies > 1:
        raise Mismatch(
            f"{call.name} sums over {shard} from {call.source(x)}: its copies would be added several times",
            f"leave {call.source(x)} out of the plan, or use a degree up to its number of heads",
            KeepWhole(call.made_by(x), call.name),
        )


def refuse_uncut(call: Call, first: tuple[Tensor, Shard], t: Tensor, letters: str, letter: str) -> None:
    """Refuse an operand that has the cut dim whole, or twice (a diagonal)."""
    x, shard = first
    if letters.count(letter) > 1:
        raise Mismatch(
            f"{call.name} takes the diagonal of {shard} from {call.source(x)}",
            f"leave {call.source(x)} out of the plan",
            KeepWhole(call.made_by(x), call.name),
        )
    if letter in letters and call.layout(t) == WHOLE and not follows(call, t, letters.index(letter)):
        raise whole_beside(call, x, shard, t, letters.index(letter))


def one_partial(call: Call, operands: Labelled) -> Activation:
    """Return the layout of a product with a partial sum: all the rest must be whole."""
    partial = [t for t, _ in operands if isinstance(call.layout(t), Partial)]
    if len(partial) > 1 or any(isinstance(call.layout(t), Shard) for t, _ in operands):
        raise refuse_partial(call, partial[0])
    return Partial()


BATCH = "abcdefghij"


def product(call: Call, x: Tensor, y: Tensor) -> Activation:
    """Return the layout of a matrix product: batch dims are aligned at the last, vectors lack one dim."""
    left, right = "m" * (x.ndim > 1), "n" * (y.ndim > 1)
    width = max(x.ndim, y.ndim) - 2
    x_batch, y_batch = (BATCH[width - max(t.ndim - 2, 0) : width] if width > 0 else "" for t in (x, y))
    operands = [(x, x_batch + left + "k"), (y, y_batch + "k" + right)]
    return contraction(call, operands, BATCH[: max(width, 0)] + left + right)


@rule("matmul", "bmm", "mm", "mv", "__matmul__")
def matmul(call: Call) -> Result:
    """Contract the last dim of the first with the last but one of the second."""
    names = {"bmm": "mat2", "mm": "mat2", "mv": "vec"}
    return product(call, operand(call), call.argument(1, names.get(call.name, "other")))


@rule("__rmatmul__")
def rmatmul(call: Call) -> Result:
    """Multiply in the other order."""
    return product(call, call.args[1], call.args[0])


@rule("baddbmm", "addmm")
def add_product(call: Call) -> Result:
    """Add a tensor to a product, which must not be a partial sum: it would be added on each rank."""
    added = operand(call)
    x, y = (call.argument(i, f"{'batch' if call.name == 'baddbmm' else 'mat'}{i}") for i in (1, 2))
    if call.layout(x) == call.layout(y) == WHOLE:
        result: Activation = WHOLE
    else:
        result = product(call, x, y)
    if isinstance(result, Partial) or isinstance(call.layout(added), Partial):
        raise refuse_partial(call, x)
    return agree(call, [(call.output, result), (added, call.layout(added))], call.output.ndim)


@rule("einsum")
def einsum(call: Call) -> Result:
    """Read the letters off the equation."""
    equation, operands = call.args[0], call.args[1:]
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "." in equation:
        x = next(t for t in call.tensors if call.layout(t) != WHOLE)
        raise Mismatch(
            f"einsum with an ellipsis or lists of dims has no rule for {call.layout(x)} from {call.source(x)}",
            "spell out the equation",
            KeepWhole(call.made_by(x), call.name),
        )
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow:
        output = "".join(sorted(c for c in set(inputs) - {","} if inputs.count(c) == 1))
    return contraction(call, list(zip(operands, inputs.split(","), strict=True)), output)


# ---------------------------------------------------------------- attention


@rule("scaled_dot_product_attention")
def attention(call: Call) -> Result:
    """Keep a shard of the heads (or the batch) that q, k and v share, in proportion to their numbers of heads."""
    q, k, v = (call.argument(i, name) for i, name in enumerate(("query", "key", "value")))
    for t in call.tensors:
        if isinstance(call.layout(t), Partial):
            raise refuse_partial(call, t)
    shard = attention_shard(call, q, k, v)
    keep_whole(call, q, shard, (q.ndim - 2, q.ndim - 1), "attends over")
    heads, kv_heads = q.shape[shard.dim], k.shape[shard.dim]
    for t in (k, v):
        its = call.layout(t)
        assert isinstance(its, Shard)  # checked in attention_shard
        alike = tuple(b * kv_heads for b in shard.blocks) == tuple(b * heads for b in its.blocks)
        single = shard.division == (1, 0) and its.pieces_are_single(call.degree)
        read = its.division == shard.division or single
        if its.dim != shard.dim or not alike or not read:
            raise unequal(call, q, shard, t, its)
    if call.argument(4, "dropout_p", 0.0):
        raise Mismatch(
            f"{call.name} draws random numbers for {shard} from {call.source(q)}",
            "put the model in eval mode, or set the dropout to 0",
            KeepWhole(call.made_by(q), call.name),
        )
    check_mask(call, q, shard, call.argument(3, "attn_mask"))
    return shard


def attention_shard(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Shard:
    """Return the shard of q; all three must be sharded."""
    layouts = [(name, t, call.layout(t)) for name, t in (("q", q), ("k", k), ("v", v))]
    cut = [(t, layout) for _, t, layout in layouts if isinstance(layout, Shard)]
    whole = [(name, t) for name, t, layout in layouts if layout == WHOLE]
    if not cut:
        mask: Any = call.argument(3, "attn_mask")
        raise Mismatch(
            f"{call.name}: the mask is {call.layout(mask)} from {call.source(mask)}, q, k and v are whole",
            f"leave {call.source(mask)} out of the plan",
            KeepWhole(call.made_by(mask), call.name),
        )
    if whole:
        source, shard = cut[0]
        makers = tuple(path for _, t in whole for path in call.made_by(t))
        raise Mismatch(
            f"{call.name} combines {shard} from {call.source(source)} with whole "
            + ", ".join(f"{name} from {call.source(t)}" for name, t in whole),
            "plan q, k and v the same way",
            ShardToo(makers, shard.dim, q.ndim, shard),
        )
    return cut[0][1]


def check_mask(call: Call, q: Tensor, shard: Shard, mask: Tensor | None) -> None:
    """Refuse a mask that is cut otherwise than the heads, or differs between heads and is whole."""
    if mask is None:
        return
    dim, layout = shard.dim - (q.ndim - mask.ndim), call.layout(mask)
    if isinstance(layout, Shard) and (dim < 0 or layout != shard.at(dim)):
        raise Mismatch(
            f"{call.name} combines {shard} from {call.source(q)} with a mask that is {layout} "
            f"from {call.source(mask)}",
            "give both the same blocks",
            Align(call.made_by(q), shard, call.made_by(mask), layout),
        )
    if layout == WHOLE and dim >= 0 and not follows(call, mask, dim):
        raise Mismatch(
            f"{call.name} combines {shard} from {call.source(q)} with a whole mask of {shape_of(mask)} "
            f"from {call.source(mask)}",
            f"shard {call.source(mask)} by heads",
            ShardToo(call.made_by(mask), dim, mask.ndim, shard.at(dim)),
        )
