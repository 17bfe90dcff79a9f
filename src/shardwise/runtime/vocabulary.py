"""A vocabulary of which each rank holds some rows."""

from __future__ import annotations

from torch import Tensor, nn

from shardwise.plan.layout import Shard, Span
from shardwise.plan.resolve import PlannedModule
from shardwise.runtime.collectives import leave_layer
from shardwise.runtime.group import TensorParallelGroup


class Vocabulary(nn.Embedding):
    """Holds some rows of a vocabulary: maps whole tokens (...) to whole rows (..., features).

    Attributes:
        tp_group: The ranks that hold the other rows.
        tp_shard: The layout of the whole weight.
        tp_span: The tokens whose rows this rank holds.
    """

    tp_group: TensorParallelGroup
    tp_shard: Shard
    tp_span: Span

    @classmethod
    def adopt(cls, module: nn.Module, group: TensorParallelGroup, planned: PlannedModule) -> None:
        """Make `module`, an embedding whose rows are local already, look up the tokens of all ranks."""
        assert isinstance(module, nn.Embedding)
        shard = planned.layouts["weight"]
        assert isinstance(shard, Shard)
        (span,) = shard.spans(group.rank, group.degree)
        module.__class__ = _of(type(module))
        vars(module).update(tp_group=group, tp_shard=shard, tp_span=span)
        padding = module.padding_idx
        if padding is not None:
            module.padding_idx = padding - span.start if span.start <= padding < span.stop else None

    def forward(self, input: Tensor) -> Tensor:
        """Return the row of each token; one all-reduce of numbers of which all but one are zero.

        Raises:
            IndexError: a token that no rank holds; on every rank alike, where one process has it.
        """
        own = input - self.tp_span.start
        elsewhere = ((own < 0) | (own >= self.tp_span.length)) & (input >= 0) & (input < self.tp_shard.size)
        rows = super().forward(own.masked_fill(elsewhere, 0))
        return leave_layer(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.tp_group)

    def extra_repr(self) -> str:
        """Return the local sizes, the layout of the weight, and the rank."""
        return f"{super().extra_repr()}, {self.tp_shard}, rank {self.tp_group.rank} of {self.tp_group.degree}"


_CLASSES: dict[type[nn.Embedding], type[Vocabulary]] = {nn.Embedding: Vocabulary}


def _of(base: type[nn.Embedding]) -> type[Vocabulary]:
    """Return the class that looks up tokens as `base` does: one may scale its rows."""
    if base not in _CLASSES:
        _CLASSES[base] = type(f"Vocabulary{base.__name__}", (Vocabulary, base), {"__module__": __name__})
    return _CLASSES[base]
