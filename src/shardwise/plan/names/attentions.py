"""Attentions by their names: queries, keys and values, gates, norms of them, and the Linear that reads the heads."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd

from torch import nn

from shardwise.plan import adapters
from shardwise.plan.heads import HEAD_COUNTS, HEAD_WIDTHS
from shardwise.plan.linears import (
    ColwiseParallel,
    PackedColwiseParallel,
    PackedRowwiseParallel,
    RowwiseParallel,
)
from shardwise.plan.names.reading import (
    Claim,
    Told,
    Unclear,
    declared,
    has_parameters,
    inputs_style,
    is_norm,
    linear_at,
    norm_width,
    own_modules,
    told,
    words,
)
from shardwise.plan.style import is_count
from shardwise.plan.subject import Outline

_LETTERS = {"query": "q", "key": "k", "value": "v"} | {word: word for word in ("q", "k", "v", "qkv", "kv")}
_AROUND = {"to", "add", "added", "proj", "linear", "img", "txt", "attn", "w", "t", "c", "context"}
"""Words beside q, k and v that say nothing of what else a projection holds: a stream, or a verb."""

_GATES = {"gate", "g"}
_OUTPUTS = {"out", "o", "wo"}


def attention(outline: Outline, path: str) -> Claim | None:
    """Claim the Linears of a module that makes queries and keys, and the Linear that reads its heads."""
    found = _Attention(outline, path)
    if not {"q", "k"} <= set("".join(map(_letters, found.linears))):
        return None
    linears = [f"{path}.{name}" for name in found.linears] + found.closing
    return Claim("attention", path, tuple(linears), *told(found.tell), found.width)


def _letters(name: str) -> str:
    """Return which of q, k and v a Linear makes: `add_k_proj` gives "k", `to_qkv` gives "qkv"."""
    return "".join(_LETTERS.get(word.removeprefix("w"), "") for word in words(name))


@dataclass
class _Attention:
    """A module of a block, read as an attention."""

    outline: Outline
    path: str
    module: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.module = self.outline.modules[self.path]

    @cached_property
    def linears(self) -> dict[str, nn.Linear]:
        """Its own Linears by name, also those in its lists."""
        return {name: m for name, m in own_modules(self.module) if isinstance(m, nn.Linear)}

    @property
    def heads(self) -> int | None:
        """How many query heads it has; None if no attribute of a known name counts them."""
        values = (vars(self.module).get(name) for name in HEAD_COUNTS)
        return max((value for value in values if is_count(value)), default=None)

    @property
    def head_width(self) -> int | None:
        """The width of one head, if it can be told."""
        values = (vars(self.module).get(name) for name in HEAD_WIDTHS)
        width = next((value for value in values if is_count(value)), None)
        return width or (self.width // self.heads if self.heads else None)

    @cached_property
    def width(self) -> int:
        """Features of all query heads."""
        name = min((n for n in self.linears if "q" in _letters(n)), key=lambda n: len(_letters(n)))
        blocks = declared(self.linears[name], ColwiseParallel)
        return blocks[0] if blocks else self.linears[name].out_features // len(_letters(name))

    @property
    def outputs(self) -> list[str]:
        """Names of the Linears that read its heads."""
        others = [name for name in self.linears if not _letters(name) and _GATES.isdisjoint(words(name))]
        return [n for n in others if _OUTPUTS & set(words(n)) or re.search(r"(^|attn_)proj$", n)]

    @property
    def closing(self) -> list[str]:
        """Paths of the MLP beside it and the projection that reads both, where it has no output of its own."""
        around = self.path.rpartition(".")[0]
        beside = [f"{around}.proj_mlp", f"{around}.proj_out"]
        return beside if not self.outputs and all(linear_at(self.outline, p) for p in beside) else []

    def tell(self) -> Told:
        """Return its entries, and the reason for them.

        Raises:
            Unclear: it cannot be told how to share it.
        """
        self._refuse_unknown()
        own = {name: self._style(name) for name in self.linears} | self._norms()
        entries = {f"{self.path}.{name}": style for name, style in own.items()}
        reason = f"an attention of {self.width} features: each rank has some of its heads"
        if self.outputs:
            return entries, reason
        return entries | self._closed(), f"{reason}; proj_out is taken to read it first, and then the MLP"

    def _refuse_unknown(self) -> None:
        """Raise for a parameter that each rank may need a part of."""
        for name, _ in self.module.named_parameters(recurse=False):
            raise Unclear(f"it has a parameter of its own, {name}")
        around = self.path
        while around:
            around = around.rpartition(".")[0]
            for name, p in self.outline.modules[around].named_parameters(recurse=False):
                # A table over all features, such as [6, width], is no such thing, whatever its number of rows.
                if self.heads != 1 and self.heads in p.shape and p.shape[-1] != self.width:
                    raise Unclear(
                        f"{name} {list(p.shape)}, outside of it, may hold a part for each of its {self.heads} heads"
                    )

    def _style(self, name: str) -> object:
        linear = self.linears[name]
        if _letters(name):
            return self._projection(name, linear, _letters(name))
        if _GATES & set(words(name)) and linear.out_features in (self.width, self.heads):
            return "colwise"
        if name not in self.outputs:
            raise Unclear(f"what its {name} is for cannot be told")
        if declared(linear, RowwiseParallel):
            return PackedRowwiseParallel()
        if linear.in_features != self.width:
            raise Unclear(f"its {name} reads {linear.in_features} features, and its heads have {self.width}")
        return "rowwise"

    def _projection(self, name: str, linear: nn.Linear, letters: str) -> object:
        if declared(linear, ColwiseParallel):
            return PackedColwiseParallel()
        if not all(word in _AROUND or word.isdigit() or _letters(word) for word in words(name)):
            raise Unclear(f"its {name} may make more than {' and '.join(letters)}, and declares no blocks")
        size, several = linear.out_features, len(letters) > 1
        if several and size == len(letters) * self.width:
            return PackedColwiseParallel([1] * len(letters))
        if not several and (size == self.width or (letters != "q" and self.width % size == 0)):
            return "colwise"
        raise Unclear(
            f"its {name} makes {size} features, and its heads have {self.width}: "
            f"they are not {' and '.join(letters)} alone"
        )

    def _norms(self) -> dict[str, object]:
        """Return the entries of its norms over all heads; norms over one head at a time need none."""
        found: dict[str, object] = {}
        for name, module in own_modules(self.module):
            if isinstance(module, nn.Linear) or adapters.is_known(module):  # an adapter follows from the plan
                continue
            if not is_norm(module) or not _letters(name):
                if is_norm(module) or has_parameters(module):
                    raise Unclear(f"what its {name} is for, a {type(module).__name__}, cannot be told")
            elif not name.startswith("pre"):  # such a norm is in front of the projections, where all is whole
                found |= self._across(name, norm_width(module))
        return found

    def _across(self, name: str, width: int | None) -> dict[str, object]:
        """Return the entry of a norm over as many features as a projection of the same letter makes."""
        if width is not None and width == self.head_width:
            return {}
        made = {lin.out_features for other, lin in self.linears.items() if _letters(other) == _letters(name)}
        if width not in made | {self.width}:
            raise Unclear(
                f"its {name} is over {width or 'unknown'} features, not those of a head or of all heads"
            )
        return {name: "across_head_norm"}

    def _closed(self) -> dict[str, object]:
        """Return the entries of the MLP beside it, and of the projection that reads both."""
        if not self.closing:
            raise Unclear("none of its Linears reads its heads")
        mlp, out = (self.outline.linear_at(path) for path in self.closing)
        rest = out.in_features - self.width
        if rest <= 0:
            raise Unclear(f"proj_out reads {out.in_features} features, and its heads have {self.width}")
        block = self.outline.modules[self.path.rpartition(".")[0]]
        style = inputs_style(block, {"proj_mlp": mlp}, rest)
        unit = gcd(self.width, rest)
        blocks = None if declared(out, RowwiseParallel) else [self.width // unit, rest // unit]
        return dict(zip(self.closing, (style, PackedRowwiseParallel(blocks)), strict=True))
