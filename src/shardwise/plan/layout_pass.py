"""Pass 1 of the check: the layout of every value, followed through the forward of the whole model.

After a finding the value is unknown, and unknown values are not reported again, so that one run reports every
independent fault. Styles say what they need and leave; none is known here by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.plan.findings import CheckFinding, watched_shards
from shardwise.plan.layout import Activation, Replicated, Shard, followers
from shardwise.plan.numbers import places, scalars
from shardwise.plan.repair import KeepWhole, PlanRowwise, RefineBlocks, Repair, SplitInput
from shardwise.plan.resolve import PlannedModule, ResolvedPlan
from shardwise.plan.rules import RULES, WHOLE, Call, Mismatch, tensors_in
from shardwise.plan.rules.repeats import repeats
from shardwise.plan.rules.scatter import is_nothing
from shardwise.plan.slices import SliceInput
from shardwise.plan.style import StyleFault
from shardwise.plan.trace import Event, Tracer, model_source


@dataclass(frozen=True)
class _Tag:
    """What is known of a value: its layout (None is unknown), who made it, how it repeats, and whether it is zeros."""

    layout: Activation | None = WHOLE
    producers: tuple[str, ...] = ()
    repeats: tuple[int, ...] | None = None
    nothing: bool = False


_NO_TAG = _Tag()


class LayoutTracer(Tracer):
    """Pass 1: follows the layout of every value through the forward of the whole model."""

    def __init__(self, model: nn.Module, plan: ResolvedPlan, rank: int = 0) -> None:
        super().__init__(model)
        self.plan = plan
        self._rank, self._shares = rank, plan.shares(rank)
        self.findings: list[CheckFinding] = []
        self._planned = {m.path: m for m in plan.modules if m.style.opaque or m.style.gathers}
        self._slicing = {m.path: m for m in plan.modules if m.style.slices_input}
        self._tags: dict[int, tuple[Tensor, _Tag]] = {}  # holds the tensors, so that ids stay unique
        self._linears = {id(m.weight): p for p, m in model.named_modules() if isinstance(m, nn.Linear)}
        self._owned = {
            id(parameter): m
            for m in plan.modules
            if m.style.opaque
            for parameter in model.get_submodule(m.path).parameters(recurse=False)
        }
        for m, parameter, shard in watched_shards(model, plan):
            self._set(parameter, _Tag(shard, (m.path,)))

    def opaque_paths(self) -> Sequence[str]:
        """Return the planned modules whose style speaks for them."""
        return [m.path for m in self.plan.modules if m.style.opaque]

    def gathering_paths(self) -> Sequence[str]:
        """Return the planned modules whose slices or partial sums are made whole behind them."""
        return [m.path for m in self.plan.modules if m.style.gathers]

    def slicing_paths(self) -> Sequence[str]:
        """Return the planned modules whose code sees slices of what they are given."""
        return list(self._slicing)

    def hand_over(self, path: str, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Give a module other names of the tensors that its style cuts, with the layout of the slices."""
        planned, module = self._slicing[path], self.model.get_submodule(path)
        style, slices = planned.style, list[Tensor]()
        assert isinstance(style, SliceInput)

        def alias(tensor: Tensor) -> Tensor:
            with torch._C.DisableTorchFunction():
                slices.append(tensor.view_as(tensor))
            given = self._tag(tensor)
            if given.layout not in (None, WHOLE):
                self._found(_need_finding(planned, WHOLE, given))
            self._set(slices[-1], _Tag(self._cut(planned, style.cut, tensor), (path,)))
            return slices[-1]

        try:
            return style.each_argument(module, args, kwargs, alias)
        except StyleFault as fault:
            self._report(fault.kind, fault.message, fault.fix, None, planned)
            return None
        finally:
            self._record("input", path, slices, hot=True)

    def seal_box(self, path: str, outputs: list[Tensor]) -> None:
        """Check that what a module returns can be made whole."""
        planned = self._planned[path]
        for output in outputs:
            tag, takes = self._tag(output), planned.style.takes(output.ndim)
            if tag.layout is not None and tag.layout not in takes:
                wanted = " or ".join(map(str, takes))
                message = f"returns {tag.layout} from {_names(tag.producers)}, and {wanted} is needed"
                fix, repair = "leave its producer whole", KeepWhole(tag.producers, "output")
                self._report("LayoutMismatch", message, fix, repair, planned)

    def open_box(self, path: str, inputs: list[Tensor]) -> None:
        """Check that a planned module is given what its style needs."""
        planned = self._planned[path]
        if not inputs:
            return
        needed = planned.style.needs(self.model.get_submodule(path), inputs[0].ndim)
        given = self._tag(inputs[0])
        if needed is not None and given.layout is not None and given.layout != needed:
            self._found(_need_finding(planned, needed, given))

    def close_box(self, path: str, outputs: list[Tensor]) -> None:
        """Give the outputs of a planned module the layout that its style leaves."""
        planned = self._planned[path]
        for output in outputs:
            self._set(output, _Tag(self._cut(planned, planned.style.leaves, output), (path,)))
        self._record("module", path, outputs, hot=True)

    def _cut(
        self, planned: PlannedModule, by: Callable[[nn.Module, tuple[int, ...]], Activation], tensor: Tensor
    ) -> Activation | None:
        """Return the layout that a style gives a tensor; one that it cannot cut is a finding, and unknown."""
        try:
            layout = by(self.model.get_submodule(planned.path), tuple(tensor.shape))
        except StyleFault as fault:
            self._report(fault.kind, fault.message, fault.fix, None, planned)
            return None
        if isinstance(layout, Shard) and layout.indivisible(self.plan.degree):
            message = f"a tensor of {layout.size} along dim {layout.dim} is cut in {self.plan.degree}"
            self._report("IndivisibleSlice", message, "use a degree that divides it", None, planned)
            return None
        return layout

    def left(self, path: str, output: Any) -> None:
        """Remember the module that made a whole tensor behind which there is no Linear (a rotary table)."""
        for tensor in tensors_in(output) if path else ():
            tag = self._tag(tensor)
            if tag.layout == WHOLE and not tag.producers:
                self._set(tensor, replace(tag, producers=(path,)))

    def watch(self, name: str, full_name: str, args: Any, kwargs: Any, output: Any) -> None:
        """Ask the function's rule for the layout of what it returned."""
        call = self._call(name, args, kwargs, output)
        outputs = [args[0]] if name == "__setitem__" else list(tensors_in(output))
        if not outputs:
            return
        known = [self._tag(tensor) for tensor in call.tensors]
        hot = any(tag.layout != WHOLE for tag in known)
        layouts = self._layouts(call, full_name, known, len(outputs))
        producers = self._producers(call)
        rate = repeats(call) if len(outputs) == 1 and _may_repeat(layouts[0]) else None
        nothing = layouts[0] == WHOLE and is_nothing(call)
        for tensor, layout in zip(outputs, layouts, strict=True):
            self._set(tensor, _Tag(layout, producers, rate, nothing))
        self._record(name, self.path, outputs, call, hot)

    def check_output(self) -> None:
        """Report an output of the model that is not whole."""
        for tensor in tensors_in(self.output):
            tag = self._tag(tensor)
            if tag.layout is not None and tag.layout != WHOLE:
                self._found(
                    CheckFinding(
                        "OutputNotWhole",
                        tag.producers[0] if tag.producers else "",
                        f"the model returns {tag.layout} from {_names(tag.producers)}",
                        "add the rowwise layer that completes it, or leave its producer whole",
                        repair=KeepWhole(tag.producers, "output"),
                    )
                )

    def same_tag(self, real: Tensor, meta: Tensor) -> None:
        """Carry a tag over to the meta twin of a real tensor."""
        self._set(meta, self._tag(real))

    def _layouts(
        self, call: Call, full_name: str, known: list[_Tag], count: int
    ) -> Sequence[Activation | None]:
        """Return the layout of each output; a fault becomes a finding and unknown outputs."""
        owner = next((self._owned[id(t)] for t in call.tensors if id(t) in self._owned), None)
        if owner is not None and call.name not in ("detach", "data", "requires_grad_"):
            self._report(
                "PlannedWeightOutside",
                f"{call.name} reads a parameter of {owner.path} outside of that module's forward",
                "leave that module out of the plan",
                KeepWhole((owner.path,), call.name),
                owner,
            )
            return [None] * count
        if all(tag.layout == WHOLE for tag in known):
            return [WHOLE] * count
        if any(tag.layout is None for tag in known):
            return [None] * count
        if call.name not in RULES:
            layout = next(tag.layout for tag in known if tag.layout != WHOLE)
            self._report(
                "NoRule",
                f"there is no rule for {full_name} on {layout} from {_names(_hot_producers(known))}",
                "add a rule for it (shardwise.plan.rules), or leave the producer whole",
                KeepWhole(_hot_producers(known), call.name),
            )
            return [None] * count
        try:
            result = RULES[call.name](call)
        except Mismatch as mismatch:
            self._report("LayoutMismatch", mismatch.message, mismatch.fix, mismatch.repair)
            return [None] * count
        return result if isinstance(result, Sequence) else [result] * count

    def _report(
        self, kind: str, message: str, fix: str, repair: Repair | None, planned: PlannedModule | None = None
    ) -> None:
        path, key = (planned.path, planned.plan_key) if planned else (self.path, None)
        self._found(CheckFinding(kind, path, message, fix, key, model_source(), repair=repair))

    def _found(self, finding: CheckFinding) -> None:
        self.findings.append(finding)

    def _call(self, name: str, args: Any, kwargs: Any, output: Any) -> Call:
        call = Call(name, args, kwargs, output, self.plan.degree, rank=self._rank, shares=self._shares)
        for tensor in call.tensors:
            tag = self._tag(tensor)
            if tag.layout is not None:
                call.layouts[id(tensor)] = tag.layout
            call.producers[id(tensor)] = tag.producers
            if id(tensor) in self._linears:
                call.producers[id(tensor)] = (self._linears[id(tensor)],)
            if tag.repeats is not None:
                call.repeats[id(tensor)] = tag.repeats
            if tag.nothing:
                call.nothing.add(id(tensor))
        return call

    def _producers(self, call: Call) -> tuple[str, ...]:
        """Return who is behind the output: the Linear itself, or the producers of all arguments (a dozen at most)."""
        if call.name == "linear":
            weight = call.argument(1, "weight")
            if id(weight) in self._linears:
                return (self._linears[id(weight)],)
        merged = dict.fromkeys(p for tensor in call.tensors for p in self._tag(tensor).producers)
        return tuple(merged)[:12]

    def _tag(self, tensor: Tensor) -> _Tag:
        return self._tags[id(tensor)][1] if id(tensor) in self._tags else _NO_TAG

    def _set(self, tensor: Tensor, tag: _Tag) -> None:
        self._tags[id(tensor)] = (tensor, tag)

    def _record(
        self,
        name: str,
        path: str,
        outputs: list[Tensor],
        call: Call | None = None,
        hot: bool = False,
    ) -> None:
        event = Event(
            name,
            path,
            model_source(),
            shapes=tuple(self._predicted(tensor) for tensor in outputs),
            scalars=scalars(call) if call else (),
            places=places(call) if call else (),
            met=tuple((self._piece(t), self._predicted(t)) for t in self.met),
            hot=hot,
            weightless=not any(tensor.is_meta for tensor in outputs),
        )
        self.events.append(event)

    def _predicted(self, tensor: Tensor) -> tuple[Any, ...] | None:
        """Return the shape of a value on the rank; a size that follows a divided one may be either."""
        tag, shape, degree = self._tag(tensor), tuple(tensor.shape), self.plan.degree
        if tag.layout is None:
            return None
        local, parts, shares = shape, degree, self._shares
        if isinstance(tag.layout, Shard):
            local, parts, shares = tag.layout.local_shape(shape, self._rank, degree), tag.layout.copies, set()
        rate = tag.repeats or (1,) * len(shape)
        return tuple(
            followers(size, parts, shares) if r > 1 and size == whole else size
            for size, whole, r in zip(local, shape, rate, strict=True)
        )

    def _piece(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor that the rank has."""
        layout = self._tag(tensor).layout
        if not isinstance(layout, Shard):
            return tensor
        spans = layout.spans(self._rank, self.plan.degree)
        return torch.cat([tensor.narrow(layout.dim, span.start, span.length) for span in spans], layout.dim)


class Found(BaseException):
    """Ends a forward at its first finding; no error that a model's code may catch."""


class FirstFinding(LayoutTracer):
    """Pass 1 for a plan that is being searched: it ends at its first finding, and no second pass compares with it."""

    def _found(self, finding: CheckFinding) -> None:
        super()._found(finding)
        raise Found

    def _record(self, *args: Any, **kwargs: Any) -> None:
        return


def _need_finding(planned: PlannedModule, needed: Activation, given: _Tag) -> CheckFinding:
    """Return the finding of a planned module whose input is not what its style needs."""
    style, layout, path = planned.style.label, given.layout, planned.path
    made = _names(given.producers)
    repair: Repair | None = None
    if isinstance(needed, Replicated):
        kind = "WholeInputNeeded"
        fix = f"leave {made} whole, or make this layer rowwise"
        if isinstance(layout, Shard):
            repair = PlanRowwise(path, layout.blocks)
            fix = f"make it rowwise with blocks {list(layout.blocks)}, or leave {made} whole"
    elif isinstance(layout, Replicated):
        kind, repair = "ShardedInputNeeded", SplitInput(path)
        fix = f'use "rowwise_split_input", or shard {made} with a colwise style'
    else:
        kind = "BlocksDiffer"
        fix = "give both layers the same blocks"
        if isinstance(layout, Shard) and layout.copies > 1:
            fix = f"leave {made} whole, or use a degree up to its number of heads"
        elif isinstance(layout, Shard) and isinstance(needed, Shard) and layout.dim == needed.dim:
            fix = f"declare blocks {list(layout.blocks)}"
            repair = RefineBlocks((path,), needed.blocks, layout.blocks)
    message = f"{style} needs {_describe(needed)} input and is given {_describe(layout)} from {made}"
    return CheckFinding(kind, path, message, fix, planned.plan_key, model_source(), repair=repair)


def _may_repeat(layout: Activation | None) -> bool:
    """Return whether a value may follow a size that is divided on a rank: whole ones, and heads held in copies."""
    return layout == WHOLE or (isinstance(layout, Shard) and layout.copies > 1)


def _describe(layout: Activation | None) -> str:
    return "a whole" if isinstance(layout, Replicated) else str(layout)


def _names(producers: tuple[str, ...]) -> str:
    return ", ".join(producers[:4]) or "an input"


def _hot_producers(known: list[_Tag]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(p for tag in known if tag.layout != WHOLE for p in tag.producers))
