"""Pass 2 of the check: the localised model, its shapes and constants compared with what the layouts predict.

Finds sizes baked into code: a reshape by an undivided head count, a constant made of a width, a fixed bound.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.plan.findings import CONSTANT_FIX, DIVIDE_FIX, CheckFinding, watched_shards
from shardwise.plan.layout import Replicated
from shardwise.plan.numbers import places, scalars
from shardwise.plan.repair import Divide
from shardwise.plan.resolve import ResolvedPlan
from shardwise.plan.rules import Call, tensors_in
from shardwise.plan.slices import SliceInput
from shardwise.plan.trace import Event, Tracer, model_source


class ShapeTracer(Tracer):
    """Pass 2: records what the localised model does, and whether a shard is involved."""

    def __init__(self, local: nn.Module, whole: nn.Module, plan: ResolvedPlan) -> None:
        super().__init__(local)
        self._whole = whole
        self._planned = {m.path: m for m in plan.modules if m.style.opaque or m.style.gathers}
        self._slicing = {m.path: m.style for m in plan.modules if isinstance(m.style, SliceInput)}
        self._hot: dict[int, bool] = {}
        self._held: list[Tensor] = []  # so that no id is used twice
        for _, parameter, _ in watched_shards(local, plan):
            self._mark(parameter, True)

    def opaque_paths(self) -> Sequence[str]:
        """Return the planned modules whose style speaks for them."""
        return [path for path, m in self._planned.items() if m.style.opaque]

    def gathering_paths(self) -> Sequence[str]:
        """Return the planned modules whose slices or partial sums are made whole behind them."""
        return [path for path, m in self._planned.items() if m.style.gathers]

    def slicing_paths(self) -> Sequence[str]:
        """Return the planned modules whose code sees slices of what they are given."""
        return list(self._slicing)

    def hand_over(self, path: str, args: Any, kwargs: Any) -> None:
        """Mark the slices that a module is given."""
        slices: list[Tensor] = []

        def mark(tensor: Tensor) -> Tensor:
            self._mark(tensor, True)
            slices.append(tensor)
            return tensor

        self._slicing[path].each_argument(self._whole.get_submodule(path), args, kwargs, mark)
        self._record("input", path, slices, hot=True)

    def close_box(self, path: str, outputs: list[Tensor]) -> None:
        """Mark the outputs of a style that leaves a shard or a partial sum, and clear those of one that does not."""
        style, module = self._planned[path].style, self._whole.get_submodule(path)
        for output in outputs:
            self._mark(output, style.leaves(module, tuple(output.shape)) != Replicated())
        self._record("module", path, outputs, hot=True)

    def watch(self, name: str, full_name: str, args: Any, kwargs: Any, output: Any) -> None:
        """Record the shapes of a call, and whether a shard went in."""
        outputs = [args[0]] if name == "__setitem__" else list(tensors_in(output))
        if not outputs:
            return
        call = Call(name, args, kwargs, output, 1)
        hot = any(self._hot.get(id(tensor)) for tensor in call.tensors)
        for tensor in outputs:
            self._mark(tensor, hot)
        self._record(name, self.path, outputs, call, hot)

    def same_tag(self, real: Tensor, meta: Tensor) -> None:
        """Carry a mark over to the meta twin of a real tensor."""
        self._mark(meta, self._hot.get(id(real), False))

    def _record(
        self, name: str, path: str, outputs: list[Tensor], call: Call | None = None, hot: bool = False
    ) -> None:
        event = Event(
            name,
            path,
            model_source(),
            shapes=_shapes(outputs),
            scalars=scalars(call) if call else (),
            places=places(call) if call else (),
            met=tuple((tensor, tuple(tensor.shape)) for tensor in self.met),
            hot=hot,
            weightless=not any(tensor.is_meta for tensor in outputs),
        )
        self.events.append(event)

    def _mark(self, tensor: Tensor, hot: bool) -> None:
        self._hot[id(tensor)] = hot
        self._held.append(tensor)


def compare(whole: Sequence[Event], local: Sequence[Event], complete: bool = True) -> list[CheckFinding]:
    """Return where the localised run leaves what the layouts predict.

    Calls that a shard goes into must match one to one, those of weights alone too, unless their size follows a
    divided one. What is computed without weights may come from a cache, and may be thrown away: its calls are
    compared, but say nothing unless other values meet the weights. A local run that is not `complete` was stopped
    by an error, and may end early.
    """
    findings: dict[str, CheckFinding] = {}
    suspects: dict[str, CheckFinding] = {}
    for (cold, hot), (local_cold, local_hot) in zip(_stretches(whole), _stretches(local), strict=False):
        pairs = _aligned(cold, local_cold)
        for a, b in pairs:
            _compare_event(a, b, suspects if a.weightless else findings)
        if complete or local_hot is not None:
            _compare_paths(pairs, cold, local_cold, findings)
        if hot is None or local_hot is None:
            rest = hot or local_hot
            if rest is not None and not findings and complete:
                _differs(rest, hot, local_hot, findings)
            break
        if (hot.name, hot.path) != (local_hot.name, local_hot.path):
            _differs(local_hot, hot, local_hot, findings)
            break
        _compare_event(hot, local_hot, findings)
    consequences = [path for path, finding in findings.items() if finding.kind == "LocalValue"]
    if suspects and (consequences or not complete):
        findings = suspects | {path: f for path, f in findings.items() if path not in consequences}
    return list(findings.values())


def compare_outputs(whole: Any, local: Any) -> list[CheckFinding]:
    """Return whether the model gives back a tensor that no weight was met by, with other values on a rank."""
    pairs = [pair for pair in zip(tensors_in(whole), tensors_in(local), strict=False) if not pair[0].is_meta]
    if all(wanted.shape == seen.shape and _same_values(wanted, seen) for wanted, seen in pairs):
        return []
    message = "the model returns a tensor with other values than the whole model does"
    return [CheckFinding("LocalValue", "", message, CONSTANT_FIX, repair=Divide("", None, None))]


def _compare_paths(
    pairs: list[tuple[Event, Event]],
    whole: list[Event],
    local: list[Event],
    findings: dict[str, CheckFinding],
) -> None:
    """Report the first call of weights that only one of the runs made."""
    paired = {id(event) for pair in pairs for event in pair}
    first, second = (
        next((e for e in events if id(e) not in paired and not e.weightless and not _follows(e)), None)
        for events in (whole, local)
    )
    if first or second:
        _differs(second or first, first, second, findings)


def _differs(
    at: Event | None, whole: Event | None, local: Event | None, findings: dict[str, CheckFinding]
) -> None:
    assert at is not None
    names = [event.name if event else "nothing" for event in (whole, local)]
    message = f"the whole model calls {names[0]} here, the localised one {names[1]}"
    fix = "control flow depends on a local size: divide the attribute it reads, or leave the module whole"
    findings.setdefault(
        at.path,
        CheckFinding(
            "TraceDiffers", at.path, message, fix, source=at.source, repair=Divide(at.path, None, None)
        ),
    )


def _compare_event(whole: Event, local: Event, findings: dict[str, CheckFinding]) -> None:
    """Compare one call of the two runs; keep the first finding of each module."""
    fault = _shape_fault(whole, local) or _number_fault(whole, local) or _value_fault(whole, local)
    if fault:
        findings.setdefault(local.path, fault)


def _shape_fault(whole: Event, local: Event) -> CheckFinding | None:
    wanted, seen = whole.shapes, local.shapes
    if len(wanted) != len(seen):
        return _finding(
            "LocalShape",
            local,
            f"{local.name} gives {len(seen)} tensors on a rank and {len(wanted)} on the whole",
        )
    for w, s in zip(wanted, seen, strict=True):
        if not _fits(w, s):
            message = f"{local.name} gives {_show(s)} on a rank, the layouts say {_show(w)}"
            return replace(_finding("LocalShape", local, message), repair=Divide(local.path, w, s))
    return None


def _number_fault(whole: Event, local: Event) -> CheckFinding | None:
    wanted, seen = whole.scalars, local.scalars
    if wanted != seen:
        if len(wanted) == len(seen):
            wanted, seen = zip(*((w, s) for w, s in zip(wanted, seen, strict=True) if w != s), strict=True)
        message = f"{local.name} is called with {seen} on a rank and {wanted} on the whole model"
        return _finding("LocalScalar", local, message, CONSTANT_FIX)
    for w, s in zip(whole.places, local.places, strict=False):
        if _fits((w,), (s,)):
            continue
        message = f"an index or the start of a slice is {s} on a rank, the layouts say {_show((w,))[0]}"
        fix = "the bounds of the slice are baked into the code: derive them from the local width"
        return _finding("LocalSlice", local, message, fix)
    return None


def _value_fault(whole: Event, local: Event) -> CheckFinding | None:
    for (wanted, shape), (seen, own) in zip(whole.met, local.met, strict=False):
        if not _fits(shape, own):
            message = f"{local.name} is given {_show(own)} on a rank, the layouts say {_show(shape)}"
            return replace(_finding("LocalShape", local, message), repair=Divide(local.path, shape, own))
        if not _same_values(wanted, seen):
            message = (
                f"{local.name} is given a tensor of {_show(own)} with other values than on the whole model"
            )
            return _finding("LocalValue", local, message, CONSTANT_FIX)
    return None


def _finding(kind: str, at: Event, message: str, fix: str = DIVIDE_FIX) -> CheckFinding:
    return CheckFinding(kind, at.path, message, fix, source=at.source, repair=Divide(at.path, None, None))


def _same_values(whole: Tensor, local: Tensor) -> bool:
    """Return whether a rank computed what the whole model did, or its part along dims that repeat their values."""
    if (whole.ndim, whole.dtype, whole.is_meta) != (local.ndim, local.dtype, local.is_meta):
        return False
    if not local.numel() or any(own > size for size, own in zip(whole.shape, local.shape, strict=True)):
        return whole.numel() == local.numel()
    part = whole
    for dim, (size, own) in enumerate(zip(whole.shape, local.shape, strict=True)):
        if size != own:  # of equal runs, as many as the rank has
            part = part.index_select(dim, torch.arange(own) * size // own)
    if part.is_floating_point() or part.is_complex():
        return torch.allclose(part, local, rtol=1e-4, atol=1e-6, equal_nan=True)
    return torch.equal(part, local)


def _follows(event: Event) -> bool:
    """Return whether an output has a size that is a part of the whole one on a rank, or may be."""
    return any(isinstance(size, tuple) for shape in event.shapes for size in shape or ())


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


def _fits(wanted: tuple[Any, ...] | None, seen: tuple[Any, ...] | None) -> bool:
    if wanted is None or seen is None:
        return True
    pairs = zip(wanted, seen, strict=False)
    return len(wanted) == len(seen) and all(w == s or (isinstance(w, tuple) and s in w) for w, s in pairs)


def _show(shape: tuple[Any, ...] | None) -> list[Any]:
    return [size[0] if isinstance(size, tuple) else size for size in shape or ()]


def _shapes(tensors: list[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors)
