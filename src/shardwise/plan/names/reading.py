"""What all rules of `plan.names` share: the claim they make, and how names, classes and sizes are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from shardwise.plan.linears import ColwiseParallel, PackedColwiseParallel, RowwiseParallel
from shardwise.plan.subject import Outline


class Unclear(Exception):
    """What cannot be told from names; its text is the reason to leave it whole."""


@dataclass(frozen=True)
class Claim:
    """Modules of one block that belong together by their names.

    Attributes:
        kind: `"attention"`, `"feed-forward"` or `"modulation"`.
        owner: Path of the module that they belong to.
        linears: Paths of its Linears.
        entries: Path -> style; empty if it cannot be told how to share them.
        reason: Why they are shared like this, or why they cannot be.
        width: Features of all heads, of an attention.
    """

    kind: str
    owner: str
    linears: tuple[str, ...]
    entries: Mapping[str, object]
    reason: str
    width: int = 0


Told = tuple[dict[str, object], str]
"""Entries, and the reason for them."""


def told(tell: Callable[[], Told]) -> Told:
    """Return the entries that `tell` gives and their reason, or none and why it is not clear."""
    try:
        return tell()
    except Unclear as why:
        return {}, str(why)


def words(name: str) -> list[str]:
    """Return the words of a name in lower case: `img_mod.1` gives img, mod and 1."""
    return re.split(r"[._]", name.lower())


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class in lower case."""
    return type(module).__name__.lower()


def linear_at(outline: Outline, path: str) -> nn.Linear | None:
    """Return the Linear at a path, if there is one."""
    module = outline.modules.get(path)
    return module if isinstance(module, nn.Linear) else None


def own_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of a module by name, those in its lists in place of the lists."""
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            yield from own_modules(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def has_parameters(module: nn.Module) -> bool:
    """Return whether there is anything learnt in a module."""
    return next(module.parameters(), None) is not None


def declared(linear: nn.Linear, style: type[ColwiseParallel | RowwiseParallel]) -> tuple[int, ...]:
    """Return the blocks that a model declares on a Linear."""
    return tuple(getattr(linear, style.declared_attribute, None) or ())


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is called a norm."""
    return "norm" in class_name(module)


def norm_width(module: nn.Module) -> int | None:
    """Return over how many features a norm is: by its parameters, or else by what it was made with."""
    shapes = {tuple(p.shape) for p in module.parameters()}
    made = (getattr(module, name, None) for name in ("normalized_shape", "dim"))
    shape = next(iter(shapes), None) or next((value for value in made if value is not None), ())
    sizes = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    return sizes[0] if len(shapes) < 2 and len(sizes) == 1 and isinstance(sizes[0], int) else None


def inputs_style(module: nn.Module, linears: Mapping[str, nn.Linear], hidden: int) -> object:
    """Return the style of Linears of a module of whose output an activation leaves `hidden` features.

    Raises:
        Unclear: their sizes do not fit, or do not fit what the activation is.
    """
    sizes = {linear.out_features for linear in linears.values()}
    gated = _gated(module, linears) if len(linears) == 1 else None
    if sizes == {hidden} and not gated:
        return "colwise"
    if sizes == {2 * hidden} and gated:
        return PackedColwiseParallel([1, 1])
    made = f"{', '.join(linears)}: {', '.join(map(str, sorted(sizes)))} features, of which"
    if sizes == {2 * hidden}:
        raise Unclear(f"{made} half are read, and nothing is called a gated unit")
    raise Unclear(f"{made} {hidden} are read{f' after {gated}' if gated else ''}")


def _gated(module: nn.Module, linears: Mapping[str, nn.Linear]) -> str | None:
    """Return the name that says that a Linear makes a gate and a value: of a class (SwiGLU), or its own."""
    (name,) = linears
    if {"gate", "up"} <= set(words(name)):
        return name
    owner, _, _ = name.rpartition(".")
    makers = [module, *(m for m in module.children() if not has_parameters(m)), module.get_submodule(owner)]
    return next((type(m).__name__ for m in makers if "glu" in class_name(m)), None)
