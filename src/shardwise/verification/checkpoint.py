"""The reference for models that fit no single device: one block's full weights at a time, from the checkpoint.

The sharded model runs once. Before one of its blocks runs, the same block is filled with its full weights and given
the input that has arrived there, on the ranks and in one process; then its weights are freed. A rank holds its slices,
one full block (and that block in fp32, in half precision), and the activations of one forward.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import models
from shardwise.checkpoint.files import Source, locate
from shardwise.checkpoint.index import read_index
from shardwise.checkpoint.load import match_keys
from shardwise.checkpoint.read import SliceReader
from shardwise.checkpoint.read_plan import Wanted
from shardwise.config import TensorParallelConfig
from shardwise.errors import CheckpointError
from shardwise.models.lookup import model_class
from shardwise.models.mixin import TensorParallelMixin
from shardwise.plan.layout import Replicated
from shardwise.plan.meta import meta_parameters
from shardwise.plan.resolve import Plan
from shardwise.runtime.shard import assign, named_tensors
from shardwise.verification.bound import HALF
from shardwise.verification.compare import Call, Trio, compare
from shardwise.verification.report import ModuleError


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk or on the hub, and what its configuration says."""

    location: str
    subfolder: str | None
    config: Mapping[str, Any]

    @classmethod
    def find(cls, location: str, subfolder: str | None) -> Checkpoint:
        """Return the checkpoint of this name; of a pipeline's folder, its transformer.

        Raises:
            CheckpointError: it has no configuration of a model.
        """
        if subfolder is None and (Path(location) / "model_index.json").exists():
            subfolder = "transformer"
        reader = model_class(next(iter(models.FAMILIES)))  # any class reads any configuration
        try:
            config = reader.load_config(location, subfolder=subfolder)
        except OSError as error:
            raise CheckpointError(f"the configuration of {location} cannot be read: {error}") from error
        if "_class_name" not in config:
            raise CheckpointError(f"the config.json of {location} does not say which class it is of")
        return cls(location, subfolder, config)

    @property
    def model_class(self) -> type[Any]:
        """The class that the configuration names."""
        return model_class(self.config["_class_name"])

    def load(self, config: TensorParallelConfig, plan: Plan | None, dtype: torch.dtype | None) -> nn.Module:
        """Return the model with this rank's slices."""
        cls = self.model_class
        if plan is not None:
            bases = (cls,) if issubclass(cls, TensorParallelMixin) else (TensorParallelMixin, cls)
            cls = type(cls.__name__, bases, {"_tp_plan": plan, "__module__": __name__})
        model: nn.Module = cls.from_pretrained(
            self.location, subfolder=self.subfolder, parallel_config=config, dtype=dtype
        )
        return model

    def skeleton(self, dtype: torch.dtype) -> nn.Module:
        """Return the whole model without weights, its buffers computed in `dtype` as a load would."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with meta_parameters():
                model: nn.Module = self.model_class.from_config(dict(self.config))
        finally:
            torch.set_default_dtype(before)
        return model.eval()


class WholeBlocks:
    """A model without weights that takes those of one block at a time from its checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, sharded: nn.Module, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.model, self.device = checkpoint.skeleton(dtype), device
        self._index = read_index(locate(Source(checkpoint.location, checkpoint.subfolder)))
        rename = getattr(
            self.model, "_fix_state_dict_keys_on_load", None
        )  # diffusers', of old attention keys
        if callable(rename):
            rename(self._index)
        self._sources = match_keys(self.model, self._index).sources
        self._dtypes = {name: tensor.dtype for name, tensor in named_tensors(sharded)}

    @contextmanager
    def filled(self, path: str) -> Iterator[nn.Module]:
        """Give one block all its weights inside the context.

        Raises:
            CheckpointError: a file cannot be read.
        """
        block = self.model.get_submodule(path)
        before = dict(named_tensors(block))
        assign(block, self._read(path, before))
        try:
            yield block
        finally:
            assign(block, before)

    def _read(self, path: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        full = {name: ".".join(filter(None, (path, name))) for name in tensors}
        keys = {name: self._sources[full[name]] for name in tensors if full[name] in self._sources}
        wanted = {
            key: Wanted(self._index[key], Replicated(), self._dtypes[full[name]])
            for name, key in keys.items()
        }
        read, _ = SliceReader(0, 1, self.device).read(wanted)
        # Buffers that no checkpoint holds, and what it does hold.
        filled = {name: old.to(self.device) for name, old in tensors.items() if name not in keys}
        for name, key in keys.items():
            is_parameter = isinstance(tensors[name], nn.Parameter)
            filled[name] = nn.Parameter(read[key], False) if is_parameter else read[key]
        return filled


def blocks(model: nn.Module, path: str = "", limit: int | None = None) -> Iterator[str]:
    """Yield the paths of the parts that are compared: each module no larger than the largest block, not its children.

    Blocks are the elements of `nn.ModuleList`s. A module without weights is no part of its own, and one that holds a
    parameter itself is not taken apart.
    """
    if limit is None:
        lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
        limit = max((_size(block) for blocks in lists for block in blocks), default=_size(model))
    children = [(name, child) for name, child in model.named_children() if _size(child)]
    for name, child in children:
        full = ".".join(filter(None, (path, name)))
        atom = not any(child.children()) or any(True for _ in child.parameters(recurse=False))
        if not isinstance(child, nn.ModuleList) and (_size(child) <= limit or atom):
            yield full
        else:
            yield from blocks(child, full, limit)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def compare_by_block(
    checkpoint: Checkpoint, sharded: nn.Module, call: Call, dtype: torch.dtype, degree: int
) -> list[ModuleError]:
    """Return a row for every call of a module that sees whole tensors, block after block.

    Raises:
        Exception: what the sharded model raises, unless a row tells of it.
    """
    device = next(sharded.parameters()).device
    whole = WholeBlocks(checkpoint, sharded, device, dtype)
    rows: list[ModuleError] = []
    running: list[str] = []  # the sharded block is called in the comparison, too

    def arrived(path: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if running:
            return
        running.append(path)
        with whole.filled(path) as reference:
            exact = copy.deepcopy(reference).float() if dtype in HALF else None
            rows.extend(compare(Trio(path, reference, block, exact, dtype, degree), Call(args, kwargs)))
        running.pop()

    handles = [
        sharded.get_submodule(path).register_forward_pre_hook(partial(arrived, path), with_kwargs=True)
        for path in blocks(whole.model)
    ]
    try:
        with torch.no_grad():
            call.of(sharded)
    except Exception:
        if all(row.ok for row in rows):
            raise
    finally:
        for handle in handles:
            handle.remove()
    return rows
