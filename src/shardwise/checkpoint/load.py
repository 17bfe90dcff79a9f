"""From a checkpoint's index to a rank's tensors: which key goes where, in which dtype, and what does not fit.

`match_keys` is a pure function of names and shapes; `load_tensors` reads what it decided. No collective is
called here: the callers agree before and after.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from shardwise.checkpoint.index import TensorEntry
from shardwise.checkpoint.read import SliceReader
from shardwise.checkpoint.read_plan import Wanted, plan_reads
from shardwise.checkpoint.report import LoadReport, total
from shardwise.errors import CheckpointError
from shardwise.plan.resolve import ResolvedPlan

logger = logging.getLogger(__name__)

DtypeRule = Callable[[str, torch.dtype, torch.dtype], torch.dtype]
"""(name, dtype in the file, dtype in the model) -> dtype on the device."""

Arrival = Callable[[str, Tensor], Tensor | None]
"""(name, this rank's slice) -> what takes its place in the model, such as a quantized parameter; None: the slice."""


@dataclass(frozen=True)
class KeyReport:
    """How the keys of a checkpoint meet the tensors of a model.

    Attributes:
        sources: For each tensor of the model that the checkpoint holds, under each of its names: the key.
        missing: Parameters that the checkpoint does not hold under any of their names.
        computed: Persistent buffers that it does not hold; they keep the value the model computed.
        unexpected: Keys that the model does not have.
        mismatched: (name, shape in the checkpoint, shape in the model) where the two differ.
        no_floats: (name, dtype in the checkpoint) where the model computes with floats and the file has none.
    """

    sources: Mapping[str, str]
    missing: tuple[str, ...]
    computed: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    no_floats: tuple[tuple[str, torch.dtype], ...] = ()

    def raise_for_errors(self, subject: str) -> None:
        """Raise if a weight would be left without a value, listing all of them.

        Raises:
            CheckpointError: parameters are missing, have another shape, or are no floats.
        """
        lines = [f"  missing: {name}" for name in self.missing]
        lines += [
            f"  shape: {name} is {list(found)} in the checkpoint, {list(wanted)} in the model"
            for name, found, wanted in self.mismatched
        ]
        lines += [
            f"  dtype: {name} is {str(found).removeprefix('torch.')} in the checkpoint, and floats in the model"
            for name, found in self.no_floats
        ]
        if lines:
            listing = "\n".join(lines)
            hint = "is it the checkpoint of this model class and configuration?"
            raise CheckpointError(f"{subject}: {len(lines)} weights do not fit the model; {hint}\n{listing}")


def match_keys(
    model: nn.Module, index: Mapping[str, TensorEntry], ignored: Iterable[str] | None = None
) -> KeyReport:
    """Return how the keys of `index` meet the parameters and persistent buffers of `model`.

    Args:
        model: A model whose tensors have their full shapes, for instance on the meta device.
        index: The checkpoint's tensors by key.
        ignored: Patterns of keys that may be in the checkpoint without being used.
    """
    tensors = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = defaultdict(list)  # tied weights: one tensor, several names
    for name, tensor in tensors.items():
        names[id(tensor)].append(name)
    sources: dict[str, str] = {}
    absent: list[str] = []
    for aliases in names.values():
        key = next((name for name in aliases if name in index), None)
        if key is None:
            absent.append(aliases[0])
        else:
            sources |= dict.fromkeys(aliases, key)
    mismatched = [
        (name, index[key].shape, tuple(tensors[name].shape))
        for name, key in sources.items()
        if index[key].shape != tuple(tensors[name].shape)
    ]
    patterns = list(ignored or ())
    unexpected = [k for k in index if k not in tensors and not any(re.search(p, k) for p in patterns)]
    return KeyReport(
        sources,
        missing=tuple(name for name in absent if isinstance(tensors[name], nn.Parameter)),
        computed=tuple(name for name in absent if not isinstance(tensors[name], nn.Parameter)),
        unexpected=tuple(unexpected),
        mismatched=tuple(mismatched),
        no_floats=tuple(
            (name, index[key].dtype)
            for name, key in sources.items()
            if tensors[name].is_floating_point() and not index[key].dtype.is_floating_point
        ),
    )


def load_tensors(
    model: nn.Module,
    index: Mapping[str, TensorEntry],
    keys: KeyReport,
    plan: ResolvedPlan,
    reader: SliceReader,
    dtype: DtypeRule,
    arrival: Arrival | None = None,
) -> tuple[dict[str, Tensor], LoadReport]:
    """Read this rank's part of every tensor of `model`, and return it by name, with what was read.

    Tensors that share a key share memory. Buffers that no checkpoint holds come back on the reader's device.
    With `arrival`, which makes slices smaller, they are read in parts, and few are here as they were read.

    Raises:
        CheckpointError: a file cannot be read, ends early or has changed.
    """
    tensors = model.state_dict(keep_vars=True)
    wanted: dict[str, Wanted] = {}
    holders: dict[str, Tensor] = {}
    for name, key in keys.sources.items():
        if key not in wanted:
            entry, holders[key] = index[key], tensors[name]
            wanted[key] = Wanted(entry, plan.layout(name), dtype(name, entry.dtype, tensors[name].dtype))
    by_key: dict[str, Tensor] = {}
    reports: list[LoadReport] = []
    parts = [wanted]
    if arrival is not None:
        parts, reader = list(_parts(wanted, reader)), _telling_of_all(wanted, reader)
    for part in parts:
        slices, report = reader.read(part)
        reports.append(report)
        for key in part:
            by_key[key] = _arrived(key, slices, holders[key], arrival)
    loaded = {name: by_key[key] for name, key in keys.sources.items()}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        loaded.setdefault(name, buffer.to(reader.device))
    report = replace(total(reports), file_bytes=sum(entry.nbytes for entry in index.values()))
    logger.debug(
        "%s: %s; reading took %.2f s and converting %.2f s, over all threads",
        *(type(model).__name__, report, report.read_seconds, report.convert_seconds),
    )
    return loaded, report


def _parts(wanted: Mapping[str, Wanted], reader: SliceReader) -> Iterator[dict[str, Wanted]]:
    """Yield what is wanted in file order, in parts of which none has more bytes than the largest slice."""
    sizes = {
        key: prod(want.local_shape(reader.rank, reader.degree)) * want.dtype.itemsize
        for key, want in wanted.items()
    }
    part: dict[str, Wanted] = {}
    held, most = 0, max(sizes.values(), default=0)
    for key in sorted(wanted, key=lambda key: (str(wanted[key].entry.file), wanted[key].entry.offset)):
        if part and held + sizes[key] > most:
            yield part
            part, held = {}, 0
        part[key] = wanted[key]
        held += sizes[key]
    yield part


def _telling_of_all(wanted: Mapping[str, Wanted], reader: SliceReader) -> SliceReader:
    """Return a reader of parts that tells of bytes as of all that is wanted."""
    tell = reader.progress
    if tell is None:
        return reader
    total = plan_reads(wanted, reader.rank, reader.degree).nbytes
    return replace(reader, progress=lambda arrived, _: tell(arrived, total))


def _arrived(key: str, slices: dict[str, Tensor], holder: Tensor, arrival: Arrival | None) -> Tensor:
    """Return what the model gets of a slice that was read; nothing else holds the slice any more."""
    if arrival is not None and (made := arrival(key, slices[key])) is not None:
        del slices[key]
        return made
    return _like(holder, slices.pop(key))


def _like(old: Tensor, data: Tensor) -> Tensor:
    """Return `data` as what the model holds in its place: a parameter, or a buffer."""
    return nn.Parameter(data, old.requires_grad) if isinstance(old, nn.Parameter) else data
