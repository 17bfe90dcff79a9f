"""The calls of a pipeline's denoisers, shared out over ranks: branches of guidance, or the parts of a batch.

Pipelines evaluate guidance by two calls, or by one call on a batch of both branches. Of the first kind each call is
dealt to one rank; of the second each rank computes a part. Which kind it is shows when the outputs are read, so no
pipeline is known here, and what is not shared out is computed by one rank and is right as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten

from shardwise.errors import UnsupportedOperation, UnsupportedState
from shardwise.runtime.agreement import PATIENCE
from shardwise.runtime.batches import Outputs, Share, distance, rounding
from shardwise.runtime.group import TensorParallelGroup
from shardwise.runtime.mesh import ranks_along
from shardwise.runtime.pending import GuidanceReport, Round, plain

logger = logging.getLogger(__name__)

DENOISERS = ("transformer", "unet")
"""What the names of a pipeline's denoisers begin with; Wan 2.2 has `transformer` and `transformer_2`."""

_STATE = "_shardwise_guidance"

_Forward = Callable[..., Any]


class Form(Enum):
    """How calls with inputs of some shapes are shared out."""

    NEW = auto()
    """One was made: it is not known whether another follows before its output is read."""
    DEALT = auto()
    """Each whole, to one rank."""
    UNPROVED = auto()
    """They come alone, with a batch that the ranks divide: the next is computed whole and in parts."""
    SPLIT = auto()
    """Each rank computes a part of the batch."""


@dataclass
class Kind:
    """Calls of one model with inputs of the same shapes: what they return, and how they are shared out."""

    outputs: Outputs
    share: Share | None
    form: Form = Form.NEW


class Branches:
    """Shares out the calls of all denoisers of one pipeline; one queue, as outputs of one may be read after another's.

    Attributes:
        report: What has become of the calls.
    """

    def __init__(self, group: TensorParallelGroup, names: Sequence[str], patience: timedelta) -> None:
        self.group, self.patience = group, patience
        self.subject = f"guidance of {' and '.join(dict.fromkeys(names))}"
        self.report = GuidanceReport()
        self._kinds: dict[Any, Kind] = {}
        self._begin_round()

    def call(
        self, model: nn.Module, forward: _Forward, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return what a model returns, or what stands for it until it is read.

        Raises:
            UnsupportedOperation: gradients are asked for.
            RankFailure: another rank failed, or did not make the call.
        """
        if torch.is_grad_enabled():
            raise UnsupportedOperation(
                f"{self.subject} that is spread over ranks has no gradients: call under torch.no_grad(), as pipelines "
                "do, or take it off with close()"
            )
        args, kwargs = plain((args, kwargs))
        self.report.calls += 1
        if self._round.is_over:
            self._judge_round()
            self._begin_round()
        signature = (id(model), *signature_of(args, kwargs))
        kind = self._kinds.get(signature)
        if kind is None:
            return self._learn(signature, model, forward, args, kwargs)
        cached = getattr(
            model, "is_cache_enabled", False
        )  # what is kept from step to step is of the whole batch
        if kind.form is Form.SPLIT and not cached:
            return self._split(kind, forward, args, kwargs)
        if kind.form is Form.UNPROVED and not cached:
            return self._prove(model, kind, forward, args, kwargs)
        return self._deal(kind, forward, args, kwargs)

    def _begin_round(self) -> None:
        self._round = Round(self.group, self.subject, self.patience, self.report)
        self._asked: list[Kind] = []

    def _judge_round(self) -> None:
        """Note which kinds of calls come alone, now that their outputs have been read."""
        alone = len(self._asked) == 1
        for kind in self._asked:
            if kind.form is Form.NEW:
                kind.form = Form.UNPROVED if alone and kind.share is not None else Form.DEALT

    def _learn(
        self,
        signature: Any,
        model: nn.Module,
        forward: _Forward,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Compute a call everywhere: from then on the ranks know what such a call returns."""
        with self.group.agreement(self.subject, self.patience) as step:
            outputs = forward(*args, **kwargs)
            kind = Kind(Outputs.of(outputs), Share.of(args, kwargs, self.group))
            step.must_equal(**{f"what {type(model).__name__} returns": kind.outputs})
        self._kinds[signature] = kind
        self.report.everywhere += 1
        return self._stand_in(kind, kind.outputs.tensors(outputs))

    def _stand_in(self, kind: Kind, mine: Sequence[Tensor]) -> Any:
        """Return what stands for the outputs of a call that every rank has computed; those of its owner count."""
        self._asked.append(kind)
        tensors = mine if self._round.next_owner == self.group.rank else kind.outputs.empty()
        return kind.outputs.build(self._round.add(tensors, dealt=False))

    def _deal(self, kind: Kind, forward: _Forward, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._asked.append(kind)
        if self._round.next_owner == self.group.rank:
            with self._telling_errors():
                tensors = kind.outputs.tensors(forward(*args, **kwargs))
        else:
            tensors = kind.outputs.empty()
        return kind.outputs.build(self._round.add(tensors, dealt=True))

    @contextmanager
    def _telling_errors(self) -> Iterator[None]:
        """Raise an error of this rank at once; the others hear of it where they would wait for this rank."""
        try:
            yield
        except BaseException as error:
            self._round.fail(error)
            raise

    def _split(self, kind: Kind, forward: _Forward, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        share = kind.share
        assert share is not None  # else it would not have been proved
        with self.group.agreement(self.subject, self.patience):
            parts = share.parts(forward(*share.cut(args), **share.cut(kwargs)), kind.outputs)
        self.report.split += 1
        return kind.outputs.build(self._join(kind, share, parts))

    def _join(self, kind: Kind, share: Share, parts: Sequence[Tensor]) -> list[Tensor]:
        joined = share.join(parts, kind.outputs, self.group)
        self.report.exchanged_bytes += sum(tensor.nbytes for tensor in joined)
        return joined

    def _prove(
        self, model: nn.Module, kind: Kind, forward: _Forward, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Compute a batch whole and in parts, and split such batches from now on if both are the same."""
        share = kind.share
        assert share is not None
        self.report.everywhere += 1
        with self.group.agreement(self.subject, self.patience) as step:
            whole = kind.outputs.tensors(forward(*args, **kwargs))
            parts, fault = _attempt(kind, share, forward, args, kwargs)
            step.say(fault)
        fault = next(filter(None, step.heard), None)
        if fault is None:
            joined = self._join(kind, share, parts)
            with self.group.agreement(self.subject, self.patience) as step:
                step.say(distance(joined, whole))
            if max(step.heard) <= rounding(whole):
                kind.form = Form.SPLIT
                return kind.outputs.build(joined)
            fault = (
                f"computed in parts it returns something else (apart by {max(step.heard):.1e} of its size)"
            )
        kind.form = Form.DEALT
        if self.group.rank == 0:
            logger.warning("a batch of %s is not split over the ranks: %s", type(model).__name__, fault)
        return self._stand_in(kind, whole)


class GuidanceSpread:
    """Denoisers whose calls are shared out over ranks, until `close()`; also a context manager that closes.

    Attributes:
        report: What has become of the calls.
    """

    def __init__(self, models: Iterable[nn.Module], branches: Branches | None) -> None:
        self._branches = branches
        self._models = list(models) if branches is not None else []
        for model in self._models:
            _share_out_calls(model, branches)

    @property
    def report(self) -> GuidanceReport:
        """What has become of the calls so far."""
        return self._branches.report if self._branches is not None else GuidanceReport()

    def close(self) -> None:
        """Let every rank compute all calls again, and warn if ranks have only waited for each other.

        Raises:
            UnsupportedState: a model's forward was replaced meanwhile, by offloading for example.
        """
        for model in self._models:
            ours, before = vars(model)[_STATE]
            if vars(model).get("forward") is not ours:
                raise UnsupportedState(
                    f"the forward of {type(model).__name__} was replaced after spread_guidance: undo that first"
                )
            del vars(model)["forward"], vars(model)[_STATE]
            vars(model).update(before)
        if self._models and self.report.gains_nothing:
            logger.warning("%s", self.report)
        self._models = []

    def __enter__(self) -> GuidanceSpread:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def spread_guidance(
    target: Any, *, mesh: DeviceMesh, timeout: float = PATIENCE.total_seconds()
) -> GuidanceSpread:
    """Share out the two branches of classifier-free guidance over the axis "cfg" of a mesh.

    Every rank runs the whole pipeline with the same arguments and an equally seeded generator, and draws the same
    picture. Of the calls of the denoiser each rank computes some: those of one branch where the pipeline makes a call
    for each, to the last bit what one process computes; its part of the batch where the pipeline makes one call for
    both, which is the same but for rounding and proved on the second such call. Without guidance one rank computes and
    the others wait. Nothing is changed but the `forward` of the denoisers; load, shard and compile them, and enable
    their caches, before.

    Args:
        target: A pipeline, of which all components named `transformer...` and `unet...` are meant, or those models.
        mesh: That of `shardwise.init_mesh(config)`, or its axis.
        timeout: Seconds that a rank waits for the slowest one.

    Raises:
        ConfigError: `mesh` has no such axis.
        UnsupportedState: there are no such models, or one is spread already or compiled as a whole; on every rank.
        GroupError: there is no process group, or this process is not in the mesh.
        RankFailure: another rank failed, or has other models.
    """
    group, patience = ranks_along(mesh, "cfg"), timedelta(seconds=timeout)
    models = denoisers(target)
    names = [type(model).__name__ for model in models]
    if group.degree == 1:
        return GuidanceSpread((), None)
    with group.agreement(f"spreading guidance of {type(target).__name__}") as step:
        _check(target, models)
        step.must_equal(models=", ".join(names))
    return GuidanceSpread(models, Branches(group, names, patience))


def denoisers(target: Any) -> list[nn.Module]:
    """Return the models that a pipeline calls at each step, or `target` as a list if it is no pipeline."""
    components = getattr(target, "components", None)
    if isinstance(components, Mapping):
        named = {name: m for name, m in sorted(components.items()) if name.startswith(DENOISERS)}
        return [model for model in named.values() if isinstance(model, nn.Module)]
    return [target] if isinstance(target, nn.Module) else list(target)


def signature_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what tells calls apart that return other shapes; the same on every rank that is given the same."""
    leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
    return str(spec), *map(_trait, leaves)


def _trait(value: object) -> object:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    # Other numbers change at each step, and the text of an object may be its address.
    return value if isinstance(value, int | str | torch.dtype | None) else type(value).__name__


def _attempt(
    kind: Kind, share: Share, forward: _Forward, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Tensor], str | None]:
    """Return what a model returns for a part of the batch, and what is wrong with that."""
    try:
        return share.parts(forward(*share.cut(args), **share.cut(kwargs)), kind.outputs), None
    except Exception as error:
        return [], f"{type(error).__name__}: {error}"


def _check(target: Any, models: Sequence[nn.Module]) -> None:
    if not models:
        raise UnsupportedState(
            f"{type(target).__name__} has no component named transformer or unet: pass its denoisers as a list"
        )
    for model in models:
        name = type(model).__name__
        if _STATE in vars(model):
            raise UnsupportedState(f"guidance of {name} is spread already: close() that first")
        if getattr(model, "_compiled_call_impl", None) is not None:
            raise UnsupportedState(
                f"{name} is compiled as a whole, and exchanges cannot be compiled: use compile_repeated_blocks(), or "
                "torch.compile(model) in place of the component"
            )


def _share_out_calls(model: nn.Module, branches: Branches | None) -> None:
    assert branches is not None
    original = model.forward

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # of the ranks' talk; blocks are compiled as ever
    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return branches.call(model, original, args, kwargs)

    state = vars(model)
    state[_STATE] = forward, {"forward": state["forward"]} if "forward" in state else {}
    state["forward"] = forward
