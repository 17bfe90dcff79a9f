"""Pass 2 of the check: the localised model, its shapes and constants compared with what the layouts predict.

Finds sizes baked into code: a reshape by an undivided head count, a constant made of a width, a fixed bound.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from shardwise.plan.findings import DIVIDE_FIX, CheckFinding, scalars, slice_starts, watched_shards
from shardwise.plan.layout import Shard, divisors
from shardwise.plan.repair import Divide
from shardwise.plan.resolve import ResolvedPlan
from shardwise.plan.rules import Call, tensors_in
from shardwise.plan.trace import Event, Tracer, model_source


class ShapeTracer(Tracer):
    """Pass 2: records what the localised model does, and whether a shard is involved."""

    def __init__(self, local: nn.Module, whole: nn.Module, plan: ResolvedPlan) -> None:
        super().__init__(local)
        self._whole = whole
        self._planned = {m.path: m for m in plan.modules if m.style.opaque or m.style.gathers}
        self._hot: dict[int, bool] = {}
        self._held: list[Tensor] = []  # so that no id is used twice
        for _, parameter, _ in watched_shards(local, plan):
            self._mark(parameter, True)

    def opaque_paths(self) -> Sequence[str]:
        """Return the planned modules whose style speaks for them."""
        return [path for path, m in self._planned.items() if m.style.opaque]

    def gathering_paths(self) -> Sequence[str]:
        """Return the planned modules whose slices are put together behind them."""
        return [path for path, m in self._planned.items() if m.style.gathers]

    def close_box(self, path: str, outputs: list[Tensor]) -> None:
        """Mark the outputs of a style that leaves a shard, and clear those of one that does not."""
        style, module = self._planned[path].style, self._whole.get_submodule(path)
        for output in outputs:
            self._mark(output, isinstance(style.leaves(module, tuple(output.shape)), Shard))
        self.events.append(Event("module", path, model_source(), _shapes(outputs), hot=True))

    def watch(self, name: str, full_name: str, args: Any, kwargs: Any, output: Any) -> None:
        """Record the shapes of a call, and whether a shard went in."""
        outputs = [args[0]] if name == "__setitem__" else list(tensors_in(output))
        if not outputs:
            return
        call = Call(name, args, kwargs, output, 1)
        hot = any(self._hot.get(id(tensor)) for tensor in call.tensors)
        for tensor in outputs:
            self._mark(tensor, hot)
        starts = slice_starts(call)
        self.events.append(
            Event(name, self.path, model_source(), _shapes(outputs), scalars(call), starts, hot)
        )

    def same_tag(self, real: Tensor, meta: Tensor) -> None:
        """Carry a mark over to the meta twin of a real tensor."""
        self._mark(meta, self._hot.get(id(real), False))

    def _mark(self, tensor: Tensor, hot: bool) -> None:
        self._hot[id(tensor)] = hot
        self._held.append(tensor)


def compare(
    whole: Sequence[Event], local: Sequence[Event], degree: int, complete: bool = True
) -> list[CheckFinding]:
    """Return where the localised run leaves what the layouts predict.

    Calls that a shard goes into must match one to one. Between two of them, caches and branches on a size may
    make the runs differ, so calls are compared where both runs made the same ones. A local run that is not
    `complete` was stopped by an error, and may end early.
    """
    findings: dict[str, CheckFinding] = {}
    for (cold, hot), (local_cold, local_hot) in zip(_stretches(whole), _stretches(local), strict=False):
        for a, b in _aligned(cold, local_cold):
            _compare_event(a, b, degree, findings)
        if hot is None or local_hot is None:
            rest = hot or local_hot
            if rest is not None and not findings and complete:
                _differs(rest, hot, local_hot, findings)
            break
        if (hot.name, hot.path) != (local_hot.name, local_hot.path):
            _differs(local_hot, hot, local_hot, findings)
            break
        _compare_event(hot, local_hot, degree, findings)
    return list(findings.values())


def _differs(at: Event, hot: Event | None, local: Event | None, findings: dict[str, CheckFinding]) -> None:
    names = [event.name if event else "nothing more" for event in (hot, local)]
    message = f"the whole model calls {names[0]} here, the localised one {names[1]}"
    fix = "control flow depends on a local size: divide the attribute it reads, or leave the module whole"
    findings.setdefault(
        at.path,
        CheckFinding(
            "TraceDiffers", at.path, message, fix, source=at.source, repair=Divide(at.path, None, None)
        ),
    )


def _compare_event(whole: Event, local: Event, degree: int, findings: dict[str, CheckFinding]) -> None:
    """Compare one call of the two runs; keep the first finding of each module."""
    wanted, seen = whole.shapes, local.shapes
    wrong = next((i for i, (w, s) in enumerate(zip(wanted, seen, strict=False)) if not _fits(w, s)), None)
    kind = message = ""
    fix, repair = DIVIDE_FIX, Divide(local.path, None, None)
    if len(wanted) != len(seen):
        kind, message = (
            "LocalShape",
            f"{local.name} gives {len(seen)} tensors on a rank and {len(wanted)} on the whole",
        )
    elif wrong is not None:
        kind = "LocalShape"
        message = f"{local.name} gives {_show(seen[wrong])} on a rank, the layouts say {_show(wanted[wrong])}"
        repair = Divide(local.path, wanted[wrong], seen[wrong])
    elif whole.scalars != local.scalars:
        kind = "LocalScalar"
        message = (
            f"{local.name} is called with {local.scalars} on a rank and {whole.scalars} on the whole model"
        )
        fix = (
            "a constant comes from a size that is divided or sharded: divide its attribute too, or not at all"
        )
    elif whole.hot and whole.starts and not _same_starts(whole.starts, local.starts, degree):
        kind = "LocalSlice"
        message = (
            f"a slice starts at {list(local.starts)} on a rank and at {list(whole.starts)} on the whole model"
        )
        fix = "the bounds of the slice are baked into the code: derive them from the local width"
    if kind:
        finding = CheckFinding(kind, local.path, message, fix, source=local.source, repair=repair)
        findings.setdefault(local.path, finding)


def _stretches(events: Iterable[Event]) -> list[tuple[list[Event], Event | None]]:
    """Return (calls without shards before it, call with a shard) in order; the last has none."""
    result: list[tuple[list[Event], Event | None]] = []
    cold: list[Event] = []
    for event in events:
        if event.hot:
            result.append((cold, event))
            cold = []
        else:
            cold.append(event)
    return [*result, (cold, None)]


def _aligned(whole: list[Event], local: list[Event]) -> list[tuple[Event, Event]]:
    """Return the pairs of equal calls of two stretches."""
    keys = [[(event.name, event.path, event.source) for event in events] for events in (whole, local)]
    if keys[0] == keys[1]:
        return list(zip(whole, local, strict=True))
    blocks = difflib.SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_matching_blocks()
    return [(whole[b.a + i], local[b.b + i]) for b in blocks for i in range(b.size)]


def _fits(wanted: tuple[Any, ...] | None, seen: tuple[int, ...]) -> bool:
    if wanted is None:
        return True
    pairs = zip(wanted, seen, strict=False)
    return len(wanted) == len(seen) and all(w == s or (isinstance(w, tuple) and s in w) for w, s in pairs)


def _show(shape: tuple[Any, ...] | None) -> list[Any]:
    return [size[0] if isinstance(size, tuple) else size for size in shape or ()]


def _same_starts(whole: tuple[int, ...], local: tuple[int, ...], degree: int) -> bool:
    """Return whether each start is the same, or divided by the number of pieces (fewer than ranks, if copied)."""
    return all(a in {b * pieces for pieces in divisors(degree)} for a, b in zip(whole, local, strict=False))


def _shapes(tensors: list[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors)
