"""Feed-forwards by their names: Linears that make hidden features, and one that reads what an activation leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from shardwise.plan.names.reading import (
    Claim,
    Told,
    Unclear,
    has_parameters,
    inputs_style,
    is_norm,
    linear_at,
    norm_width,
    own_modules,
    told,
    words,
)
from shardwise.plan.subject import Outline

Names = tuple[tuple[str, ...], str]
"""Of the Linears that read the input, and of the last."""

FEED_FORWARDS: tuple[Names, ...] = (
    (("net.0.proj",), "net.2"),
    (("w1", "w3"), "w2"),
    (("linear_1", "linear_3"), "linear_2"),
    (("linear_1", "linear_2"), "out_projection"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_proj", "up_proj"), "linear_fc2"),
    (("gate_up_proj",), "down_proj"),
    (("up_proj",), "down_proj"),
    (("gate", "up"), "down"),
    (("gate_layer", "proj"), "out"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("fc1",), "fc2"),
    (("ff_in",), "ff_out"),
)
"""What diffusers and transformers call the Linears of a feed-forward."""

ONLY_INSIDE: tuple[Names, ...] = (
    (("linear_in",), "linear_out"),
    (("in_layer",), "out_layer"),
    (("proj_in",), "proj_out"),
)
"""Names that other pairs have too: taken only inside of a module that is called a feed-forward."""

_CALLED_SO = {"ff", "ffn", "mlp", "feedforward", "forward"}


def feed_forward(outline: Outline, path: str) -> Claim | None:
    """Claim the Linears of a feed-forward: by their names, or two in a sequence that is called one."""
    called_so = not _CALLED_SO.isdisjoint(words(path.rpartition(".")[2]))
    named = (*FEED_FORWARDS, *ONLY_INSIDE, *_sequence(outline, path)) if called_so else FEED_FORWARDS
    for firsts, last in named:
        if all(linear_at(outline, f"{path}.{name}") for name in (*firsts, last)):
            return _claim(outline, path, firsts, last)
    return None


def _sequence(outline: Outline, path: str) -> Iterator[Names]:
    """Yield the names of the two Linears of a sequence, with nothing learnt between them."""
    module = outline.modules[path]
    if isinstance(module, nn.Sequential):
        learnt = [name for name, child in module.named_children() if has_parameters(child)]
        if len(learnt) == 2:
            yield (learnt[0],), learnt[1]


def _claim(outline: Outline, path: str, firsts: tuple[str, ...], last: str) -> Claim:
    module, linears = outline.modules[path], {name: outline.linear_at(f"{path}.{name}") for name in firsts}
    hidden = outline.linear_at(f"{path}.{last}").in_features

    def tell() -> Told:
        _refuse_norm_between(module, hidden, linears)
        style = inputs_style(module, linears, hidden)
        entries = {f"{path}.{name}": style for name in firsts} | {f"{path}.{last}": "rowwise"}
        return entries, f"a feed-forward: each rank has some of its {hidden} features"

    return Claim("feed-forward", path, tuple(f"{path}.{name}" for name in (*firsts, last)), *told(tell))


def _refuse_norm_between(module: nn.Module, hidden: int, linears: Mapping[str, nn.Linear]) -> None:
    """Raise for a norm over the features between the Linears, which would be over a part of them."""
    if any(linear.in_features == hidden for linear in linears.values()):
        return  # a norm of that width may as well be of the input
    for name, child in own_modules(module):
        if is_norm(child) and norm_width(child) == hidden:
            raise Unclear(f"its {name} looks at all {hidden} features between its Linears")
