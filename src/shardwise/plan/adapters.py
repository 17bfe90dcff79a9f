"""IP adapters: what follows for the weights that one puts into an attention, when a plan shares the heads.

An adapter lives in the attention's processor: more keys and values, made of an image, for the same queries. A
declared plan does not name it. It comes into a model whose plan is there already, several of them stand in a list
inside of a list of blocks, and a key holds one `*`. So it follows from the plan, as a divided head count does: where
the query projection is sharded, the adapter's keys and values are made for the same heads.

Two processors of diffusers are known, by name, because what else is in them had to be read. FLUX.1's adds what its
heads give to the attention's output, without a projection in between. It makes room for that by the shape of the
output, so the output is cut too, and both are put together again where the attention returns them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from shardwise.plan.linears import ColwiseParallel
from shardwise.plan.styles import GatherOutput, PerHead, SliceOutput, Style

_PROJECTIONS = ("to_k_ip", "to_v_ip")


@dataclass(frozen=True)
class _Adapter:
    """What a processor holds beside its projections.

    `per_head` are norms over one head. `beside` is the last module of the attention's output, if what the adapter
    gives is added beside it and not in front of it.
    """

    per_head: tuple[str, ...] = ()
    beside: str | None = None


_KNOWN = {
    "diffusers.models.transformers.transformer_flux.FluxIPAdapterAttnProcessor": _Adapter(beside="to_out.1"),
    "diffusers.models.attention_processor.SD3IPAdapterJointAttnProcessor2_0": _Adapter(
        per_head=("norm_q", "norm_k", "norm_ip_k")
    ),
}


def is_known(processor: nn.Module) -> bool:
    """Return whether the weights of an attention processor can follow the heads of its attention."""
    return _kind(processor) is not None


def derive(
    modules: Mapping[str, nn.Module], planned: Mapping[str, tuple[str, Style]]
) -> Iterator[tuple[str, str, Style]]:
    """Yield (path, plan key, style) for each part of an adapter whose attention has sharded queries.

    What has its own entry in the plan is left to it.
    """
    done: set[int] = set()  # one processor may serve several attentions
    for path, processor in modules.items():
        adapter, attention = _kind(processor), path.rpartition(".")[0]
        key, style = planned.get(f"{attention}.to_q", ("", None))
        if adapter is None or style is None or not style.leaves_shard:
            continue  # a whole attention has a whole adapter
        for part, its_style in _parts(modules, path, attention, adapter):
            # An entry of the attention itself is about its heads.
            if (part == attention or part not in planned) and id(modules[part]) not in done:
                done.add(id(modules[part]))
                yield part, key, its_style


def _parts(
    modules: Mapping[str, nn.Module], path: str, attention: str, adapter: _Adapter
) -> Iterator[tuple[str, Style]]:
    """Yield (path, style) for each module that takes part."""
    for name, module in modules[path].named_modules():
        if isinstance(module, nn.Linear) and name.partition(".")[0] in _PROJECTIONS:
            yield f"{path}.{name}", ColwiseParallel()
    for name in adapter.per_head:
        yield f"{path}.{name}", PerHead()
    queries = modules[f"{attention}.to_q"]
    if adapter.beside is not None and isinstance(queries, nn.Linear):
        yield f"{attention}.{adapter.beside}", SliceOutput(-1)
        yield attention, GatherOutput(queries.out_features)


def _kind(processor: nn.Module) -> _Adapter | None:
    cls = type(processor)
    return _KNOWN.get(f"{cls.__module__}.{cls.__qualname__}")
