"""Attention heads: which attributes count them, and whether a degree can share them.

An attention reshapes its projections by a head count that it keeps as an attribute. On a rank that holds
some of the heads the attribute must be divided too: left at the full count, the code makes as many heads of
half the width, and several model classes then give wrong numbers without any error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from shardwise.errors import Finding
from shardwise.plan.styles import DivideAttributes, Style, indivisible_heads, is_count

HEAD_COUNTS = (
    "heads",
    "num_heads",
    "n_heads",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "kv_heads",
    "sliceable_head_dim",  # diffusers' older attention class: a second record of the head count
)
"""Attribute names under which diffusers' and transformers' attentions keep a number of heads."""

WIDTHS = ("inner_dim", "inner_kv_dim", "kv_inner_dim", "mlp_hidden_dim")
"""Widths kept beside a head count; the code uses their ratio to it, so they are divided together or not at all."""

HEAD_WIDTHS = ("head_dim", "dim_head", "attention_head_dim", "d_head")
"""Attributes that say the code can split by head width, which no degree changes."""

CONFIG_HEADS = ("num_attention_heads", "num_key_value_heads", "num_kv_heads")
"""Entries of a model's config that count heads."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def derive(
    modules: Mapping[str, nn.Module], planned: Mapping[str, tuple[str, Style]]
) -> Iterator[tuple[str, str, Style]]:
    """Yield (path, plan key, style) for each attention whose sharded projections change its head count.

    `modules` are all modules of the model by path, `planned` the planned ones with their key and style. A
    module that has its own `DivideAttributes` entry is left to it.
    """
    for owner, key in _owners(modules, planned).items():
        names = [n for n in (*HEAD_COUNTS, *WIDTHS) if is_count(vars(modules[owner]).get(n))]
        if owner not in planned and any(name in HEAD_COUNTS for name in names):
            yield owner, key, DivideAttributes(*names)


def undivided(
    modules: Mapping[str, nn.Module], planned: Mapping[str, tuple[str, Style]]
) -> Iterator[Finding]:
    """Yield a finding for each attention that is sharded while nothing tells how it splits its heads."""
    for owner, key in _owners(modules, planned).items():
        module = modules[owner]
        name = type(module).__name__
        is_attention = "attention" in name.lower() or "attn" in name.lower()
        known = any(is_count(vars(module).get(n)) for n in (*HEAD_COUNTS, *HEAD_WIDTHS))
        if is_attention and not known and owner not in planned:
            yield Finding(
                kind="HeadsNotFound",
                module=owner,
                plan_key=key,
                message=f"its projections are sharded, but {name} has none of the known head attributes",
                fix=f'name the attribute in the plan: "{_parent(key)}": DivideAttributes("..."), '
                "or DivideAttributes() if its code never reads a head count",
            )


def indivisible(config: object, degree: int) -> Iterator[Finding]:
    """Yield a finding for each head count of the model's config that `degree` does not divide."""
    for name in CONFIG_HEADS:
        count = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if isinstance(count, int) and is_count(count) and count % degree:
            fault = indivisible_heads(name, count, degree)
            yield Finding(fault.kind, f"config.{name}", fault.message, fault.fix)


def _owners(modules: Mapping[str, nn.Module], planned: Mapping[str, tuple[str, Style]]) -> dict[str, str]:
    """Return the modules whose own projections leave a shard, each with the plan key of the first."""
    owners: dict[str, str] = {}
    for path, (key, style) in planned.items():
        if not style.leaves_shard:
            continue
        owner = _parent(path)
        while owner and isinstance(modules[owner], _CONTAINERS):
            owner = _parent(owner)
        owners.setdefault(owner, key)
    return owners


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
