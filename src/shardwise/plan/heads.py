"""Attention heads: which attributes count them, and whether a degree can share them.

An attention reshapes its projections by a head count that it keeps as an attribute. On a rank that holds
some of the heads the attribute must be divided too: left at the full count, the code makes as many heads of
half the width, and several model classes then give wrong numbers without any error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from torch import nn

from shardwise.errors import Finding
from shardwise.plan.styles import (
    QUERIES_PER_KEY,
    AcrossHeadNorm,
    ColwiseParallel,
    DivideAttributes,
    PerHead,
    Style,
    StyleFault,
    indivisible_heads,
    is_count,
)

HEAD_COUNTS = (
    "heads",
    "num_heads",
    "num_head",
    "n_heads",
    "n_head",
    "nheads",
    "nhead",
    "num_attention_heads",
    "num_q_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "n_kv_head",
    "kv_heads",
    "sliceable_head_dim",  # diffusers' older attention class: a second record of the head count
)
"""Attribute names under which attentions keep a number of heads."""

WIDTHS = ("inner_dim", "inner_kv_dim", "kv_inner_dim", "mlp_hidden_dim")
"""Widths kept beside a head count; code uses their ratio to it, so they are divided together or not at all."""

HEAD_WIDTHS = ("head_dim", "dim_head", "dim_heads", "attention_head_dim", "d_head")
"""Attributes that hold the width of one head, which no degree changes."""

_ORDINALS = ("layer_idx", "layer_id")
"""Attributes that say which of the blocks an attention is in: one of them equals any number of heads."""

CONFIG_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
CONFIG_HEADS = ("num_attention_heads", *CONFIG_KEY_HEADS)
"""Entries of a model's config that count heads."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_PROJECTION = re.compile(r"(?:^|_)w?(q|k|v|qkv|kv|query|key|value)(?=_|$)")
_LETTERS = {"query": "q", "key": "k", "value": "v"}


@dataclass(frozen=True)
class Owner:
    """A module that owns Linears whose output the plan shards.

    `linears` are its own Linears by path, also those inside its lists; `key` is the plan key of one of them.
    """

    path: str
    module: nn.Module
    key: str
    linears: Mapping[str, nn.Linear]
    planned: Mapping[str, tuple[str, Style]]

    @cached_property
    def projections(self) -> list[str]:
        """Paths of its query, key and value projections, as far as their names say that there are some."""
        found = {path: _PROJECTION.findall(_own_name(self.path, path)) for path in self.linears}
        letters = {
            letter for words in found.values() for word in words for letter in _LETTERS.get(word, word)
        }
        return [path for path, words in found.items() if words] if {"q", "k"} <= letters else []

    @cached_property
    def sharded(self) -> list[str]:
        """Paths of its Linears whose output is sharded."""
        return [path for path in self.linears if path in self.planned and self.planned[path][1].leaves_shard]

    @cached_property
    def counts(self) -> dict[str, int]:
        """Its head counts and the widths that go with them."""
        own = vars(self.module)
        return {name: own[name] for name in (*HEAD_COUNTS, *WIDTHS) if is_count(own.get(name))}

    @cached_property
    def head_width(self) -> int | None:
        """The width of one head, if an attribute tells it."""
        widths = (vars(self.module).get(name) for name in HEAD_WIDTHS)
        return next((width for width in widths if is_count(width)), None)

    @cached_property
    def width(self) -> int:
        """The width of one head, told by an attribute or by the number of heads; 0 if neither is known."""
        counted = max((v for n, v in self.counts.items() if n in HEAD_COUNTS), default=0)
        features = max((self.linears[path].weight.shape[0] for path in self.sharded), default=0)
        return self.head_width or (features // counted if counted else 0)

    @cached_property
    def keys_and_values(self) -> tuple[list[str], int]:
        """Paths of the projections that make keys or values only, and their number of heads; 0 if it is not known."""
        paths = [path for path in self.projections if set(_letters(_own_name(self.path, path))) <= {"k", "v"}]
        counts = {n for path in paths for n in head_counts(self, path, self.width, whole=True)}
        return paths, counts.pop() if len(counts) == 1 else 0

    @cached_property
    def counts_by_projection(self) -> dict[str, list[int]]:
        """Path of each projection -> its numbers of heads, if an attribute tells the width of one."""
        return {path: head_counts(self, path, self.head_width or 0) for path in self.projections}

    @property
    def is_settled(self) -> bool:
        """Whether the plan itself says what is divided here."""
        return isinstance(self.planned.get(self.path, ("", None))[1], DivideAttributes)

    @property
    def reads_heads(self) -> bool:
        """Whether its projections are sharded, so that its code sees a part of the heads."""
        return bool(set(self.projections) & set(self.sharded)) or not self.projections


def shared(owners: Iterable[Owner], degree: int) -> dict[str, int]:
    """Return path -> copies for what belongs to key and value heads that are fewer than the ranks.

    Each of `degree / heads` neighbouring ranks then holds the one head that its queries read. Named are the
    projections, their attention, and the norms over all of their heads.
    """
    found: dict[str, int] = {}
    for owner in owners:
        paths, heads = owner.keys_and_values
        if heads and heads < degree and degree % heads == 0:
            norms = norms_over(owner, heads * owner.width)
            found |= dict.fromkeys([*paths, *norms, owner.path], degree // heads)
    return found


def norms_over(owner: Owner, width: int) -> Iterator[str]:
    """Yield the planned norms of an attention that look at `width` features together."""
    for name, module in owner.module.named_children():
        style = owner.planned.get(path := f"{owner.path}.{name}".lstrip("."), ("", None))[1]
        if isinstance(style, AcrossHeadNorm) and _is_over(style, module, width):
            yield path


def _is_over(style: AcrossHeadNorm, module: nn.Module, width: int) -> bool:
    try:
        return style.shard_of(module).size == width
    except StyleFault:
        return False  # reported where the style is applied


def derive(owners: Iterable[Owner], shared: Mapping[str, int]) -> Iterator[tuple[str, str, Style]]:
    """Yield (path, plan key, style) for what follows from a plan without being in it.

    An attention whose projections are sharded divides its head count, and sums the gradients of the norms
    that it applies to each head. What has its own entry in the plan is left to it.

    Args:
        owners: What `owners_of` returns.
        shared: What `shared` returns: such attentions divide how many queries read a key, too.
    """
    for owner in owners:
        if not owner.reads_heads:
            continue
        own = vars(owner.module) if owner.path in shared else {}
        counts = owner.counts if any(name in HEAD_COUNTS for name in owner.counts) else {}
        names = [*counts, *(name for name in QUERIES_PER_KEY if is_count(own.get(name)))]
        if names and not owner.is_settled:
            yield owner.path, owner.key, DivideAttributes(*names)
        for path in _per_head_modules(owner):
            if path not in owner.planned:
                yield path, owner.key, PerHead()


def faults(owners: Iterable[Owner]) -> Iterator[Finding]:
    """Yield a finding for each attention that the plan would leave with the wrong idea of its heads."""
    for owner in owners:
        fault = None if owner.is_settled else _half_planned(owner) or _unclear(owner)
        if fault is not None:
            yield Finding(fault.kind, owner.path, fault.message, fault.fix, owner.key)


def indivisible(
    owners: Collection[Owner],
    config: object,
    degree: int,
    uneven: Collection[str] = (),
) -> Iterator[Finding]:
    """Yield a finding for each head count, of the config or seen in the projections, that `degree` does not divide.

    Key and value heads may also be fewer than the ranks, if `degree` is a multiple of them. `uneven` are paths of
    modules whose heads are shared unevenly: where there are some, the configuration is not asked.
    """
    copied = shared(owners, degree)
    for name in () if uneven else CONFIG_HEADS:
        count = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if not isinstance(count, int) or not is_count(count):
            continue
        fits_in_copies = copied and name in CONFIG_KEY_HEADS and degree % count == 0
        if count % degree and not fits_in_copies:
            fault = indivisible_heads(name, count, degree)
            yield Finding(fault.kind, f"config.{name}", fault.message, fault.fix)
    for owner in owners:
        for path, counts in owner.counts_by_projection.items():
            for count in counts if path not in copied and path not in uneven else ():
                if count % degree:
                    fault = indivisible_heads("its number of heads", count, degree)
                    yield Finding(fault.kind, path, fault.message, fault.fix, owner.planned[path][0])


def head_counts(owner: Owner, path: str, width: int, whole: bool = False) -> list[int]:
    """Return how many heads of a known `width` each part of a colwise projection makes.

    Of a fused projection only the blocks that its name counts as queries, keys and values are made of heads; with
    `whole` it must have no others.
    """
    style = owner.planned.get(path, ("", None))[1]
    if not width or not isinstance(style, ColwiseParallel):
        return []
    try:
        blocks = style.shard_of(owner.linears[path]).blocks
    except StyleFault:
        return []  # reported where the style is applied
    letters = _letters(_own_name(owner.path, path))
    if whole and len(blocks) != len(letters):
        return []
    return [rows // width for rows in blocks[: len(letters)] if rows % width == 0]


def _half_planned(owner: Owner) -> StyleFault | None:
    """Return the fault of an attention some of whose projections are sharded while others are whole."""
    whole = [path for path in owner.projections if path not in owner.planned]
    if not whole or not set(owner.projections) & set(owner.sharded):
        return None
    return StyleFault(
        "HalfPlanned",
        f"{', '.join(owner.sharded)} are sharded, {', '.join(whole)} are whole: they would meet in the attention",
        "shard all query, key and value projections of an attention, or none",
    )


def _unclear(owner: Owner) -> StyleFault | None:
    """Return the fault of a module whose sharded Linears may or may not change a head count."""
    name = type(owner.module).__name__
    counts = [n for n in owner.counts if n in HEAD_COUNTS]
    entry = owner.path if "*" not in owner.key else _parent_key(owner)
    if counts and not owner.projections and set(owner.linears) - set(owner.planned):
        return StyleFault(
            "AmbiguousHeads",
            f"{name} has {counts[0]}, and only some of its Linears are in the plan: "
            "whether they change its heads cannot be seen from their names",
            f'add "{entry}": DivideAttributes({counts[0]!r}) to the plan, or DivideAttributes() if they do not',
        )
    is_attention = bool(set(owner.projections) & set(owner.sharded)) or "attention" in name.lower()
    if not is_attention or counts:
        return None
    suspect = _unknown_count(owner)
    if owner.head_width is not None and suspect is None:
        return None  # it can only split by the width of a head
    return StyleFault(
        "HeadsNotFound",
        f"its projections are sharded, but {name} keeps its head count under none of the known names"
        + (f"; {suspect} looks like it" if suspect else ""),
        f'add "{entry}": DivideAttributes({suspect!r}) to the plan, or DivideAttributes() if its code never '
        "reads a head count"
        if suspect
        else f'name the attribute: "{entry}": DivideAttributes("..."), or DivideAttributes() if there is none',
    )


def _unknown_count(owner: Owner) -> str | None:
    """Return an integer attribute that equals the number of heads which the projections show."""
    heads = {_heads_of(owner, path) for path in owner.projections} - {None}
    known = (*HEAD_WIDTHS, *WIDTHS, *QUERIES_PER_KEY, *_ORDINALS)
    own = {n: v for n, v in vars(owner.module).items() if is_count(v) and n not in known}
    return next((name for name, value in own.items() if value in heads), None)


def _heads_of(owner: Owner, path: str) -> int | None:
    """Return how many heads a projection makes, if the width of a head is known."""
    rows = owner.linears[path].weight.shape[0]
    width = owner.head_width
    return rows // width if width is not None and rows % width == 0 else None


def _per_head_modules(owner: Owner) -> Iterator[str]:
    """Yield the modules of an attention that work on each head alike: their parameters are one head wide."""
    for name, child in owner.module.named_children():
        own = list(child.parameters(recurse=False))
        if own and not isinstance(child, nn.Linear) and all(p.shape == (owner.width,) for p in own):
            yield f"{owner.path}.{name}".lstrip(".")


def owners_of(
    modules: Mapping[str, nn.Module], planned: Mapping[str, tuple[str, Style]]
) -> tuple[Owner, ...]:
    """Return the modules whose own Linears leave a shard."""
    keys: dict[str, str] = {}
    for path, (key, style) in planned.items():
        if style.leaves_shard and isinstance(modules[path], nn.Linear):
            keys.setdefault(owner_path(modules, path), key)
    linears: dict[str, dict[str, nn.Linear]] = {path: {} for path in keys}
    for path, module in modules.items():
        if isinstance(module, nn.Linear) and (owner := owner_path(modules, path)) in linears:
            linears[owner][path] = module
    return tuple(Owner(path, modules[path], key, linears[path], planned) for path, key in keys.items())


def owner_path(modules: Mapping[str, nn.Module], path: str) -> str:
    """Return the path of the module that a Linear belongs to, lists and sequences left out."""
    owner = path.rpartition(".")[0]
    while owner and isinstance(modules[owner], _CONTAINERS):
        owner = owner.rpartition(".")[0]
    return owner


def _letters(name: str) -> str:
    """Return which of q, k and v a Linear makes, by the words of its name: `add_k_proj` gives "k", `to_qkv` "qkv"."""
    return "".join(_LETTERS.get(word, word) for word in _PROJECTION.findall(name))


def _own_name(owner: str, path: str) -> str:
    return path.removeprefix(f"{owner}.").partition(".")[0]


def _parent_key(owner: Owner) -> str:
    """Return the owner's path as a pattern, by the plan key of one of its Linears."""
    path, key = owner.path.split("."), owner.key.split(".")
    pairs = zip_longest(path, key[: len(path)])  # the key of what is inside of SumOnce is shorter
    return ".".join("*" if pattern == "*" else part for part, pattern in pairs)
