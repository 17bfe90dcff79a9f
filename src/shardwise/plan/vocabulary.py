"""The styles of a vocabulary: the table that tokens are looked up in, and the Linear that scores every token.

Both cut the dim of the tokens, so that a table and a Linear that share one weight are cut alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from shardwise.plan.layout import Activation, Layout, Replicated, Shard
from shardwise.plan.linears import ColwiseParallel
from shardwise.plan.style import Style, StyleFault


@dataclass(frozen=True)
class EmbeddingRowwiseParallel(Style):
    """Shard the rows of a vocabulary: a rank looks up the tokens whose rows it holds, and the sum is the whole.

    `weight` is cut along dim 0; one all-reduce of the looked-up rows, of which all but one are zero, so that no number
    is rounded. Needs whole tokens, leaves whole rows. Stays whole where the degree does not divide the vocabulary.
    """

    may_stay_whole: ClassVar[bool] = True
    plan_name: ClassVar[str] = "embedding_rowwise"

    def layouts(self, module: nn.Module) -> dict[str, Layout]:
        """Cut the rows."""
        return {"weight": self.shard_of(module)}

    def shard_of(self, module: nn.Module) -> Shard:
        """Return how the rows are cut.

        Raises:
            StyleFault: the module is no embedding, or one that changes its weight when it is called.
        """
        if not isinstance(module, nn.Embedding) or module.max_norm is not None:
            kind = type(module).__name__ + (" with max_norm" if isinstance(module, nn.Embedding) else "")
            raise StyleFault(
                "NotAnEmbedding",
                f"the style {self.label} shards an nn.Embedding, this module is a {kind}",
                "name the embedding inside it, or leave the module out of the plan",
            )
        return self.shard(0, (module.num_embeddings,))

    def attributes(self, module: nn.Module, degree: int) -> dict[str, Shard]:
        """Return the module's own record of the number of rows."""
        return {"num_embeddings": self.shard_of(module)}

    def sums(self, module: nn.Module) -> int:
        """Sum the rows that each rank has found."""
        return 1

    def needs(self, module: nn.Module, ndim: int) -> Layout:
        """Ask for whole tokens."""
        return Replicated()

    def faults(self, module: nn.Module, degree: int) -> Iterator[StyleFault]:
        """Yield a fault if the rows cannot be cut for `degree` ranks."""
        if self.shard_of(module).indivisible(degree):
            yield StyleFault(
                "IndivisibleVocabulary",
                f"the vocabulary has {self.shard_of(module).size} rows, which tp_degree {degree} does not divide",
                "leave the module out of the plan",
            )

    @property
    def label(self) -> str:
        """The plain name of the style."""
        return f'"{self.plan_name}"'


@dataclass(frozen=True)
class ColwiseGatherOutputParallel(ColwiseParallel):
    """Shard the output features of a Linear whose output every rank needs whole, such as the scores of all tokens.

    `weight` and `bias` are cut along dim 0; one all-reduce puts the slices together. Needs a whole input, leaves a
    whole output. Stays whole where the degree does not divide the output, as a vocabulary does that shares its weight.
    """

    leaves_shard: ClassVar[bool] = False
    may_stay_whole: ClassVar[bool] = True
    works_inside: ClassVar[bool] = False
    plan_name: ClassVar[str] = "colwise_gather_output"

    def sums(self, module: nn.Module) -> int:
        """Put the slices together by a sum."""
        return 1

    def leaves(self, module: nn.Module, shape: tuple[int, ...]) -> Activation:  # type: ignore[override]
        """Leave a whole output."""
        return Replicated()
