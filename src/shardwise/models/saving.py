"""`save_pretrained` of a sharded diffusers model: the checkpoint that diffusers would write of the whole one.

Owns what is diffusers' own: options, names, the configuration. Bytes and ranks are left to `checkpoint.save`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from diffusers import ModelMixin
from torch import Tensor, nn

from shardwise.checkpoint.files import manifest_name
from shardwise.checkpoint.folder import NewFolder
from shardwise.checkpoint.layouts import Cut, RankLayouts, manifest, metadata_of
from shardwise.checkpoint.read import Progress
from shardwise.checkpoint.save import write_gathered, write_own
from shardwise.checkpoint.write import (
    CODES,
    NewCheckpoint,
    Stored,
    new_checkpoint,
    new_file,
    rank_file,
    superseded,
    write_text,
)
from shardwise.compose.offload import with_data
from shardwise.errors import CheckpointError, UnsupportedOperation, UnsupportedOption
from shardwise.models.progress import progress_bar
from shardwise.plan.styles import CONFIG_PREFIX
from shardwise.runtime.shard import Sharding, digest, sharding_of

STEM = "diffusion_pytorch_model"
_WHOLE_FILES = "10GB"
"""What diffusers takes for `max_shard_size` if it is not told."""

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    # option -> (values that ask for nothing; reason)
    "is_main_process": ((True,), "all ranks call it, and the first one writes; leave it out"),
    "save_function": ((None,), "files are written in pieces as they arrive; leave it out"),
    "safe_serialization": ((True,), "only safetensors files can be written in pieces; leave it out"),
    "push_to_hub": ((False,), "upload the folder once it is saved"),
    "use_flashpack": ((False,), "only safetensors files are written; leave it out"),
}

_QUANTIZED = (
    "each rank has scales of its own, which no checkpoint has room for; save it before quantizing, "
    "and quantize it when it is loaded"
)


def let_save(model: nn.Module) -> None:
    """Give a sharded model of diffusers, whatever its class, the `save_pretrained` below."""
    if isinstance(model, ModelMixin):
        vars(model)["save_pretrained"] = partial(save_sharded, model)


def save_sharded(
    model: Any,
    save_directory: str | os.PathLike[str],
    safe_serialization: bool = True,
    variant: str | None = None,
    max_shard_size: int | str = _WHOLE_FILES,
    sharded: bool = False,
    **options: Any,
) -> None:
    """Save a sharded model as diffusers saves the whole one, or a file for each rank; every rank calls it.

    The files are those that `save_pretrained` of the whole model would write, and the first rank writes them. No rank
    holds a whole tensor: slices are brought to it in pieces. The folder is complete or absent; one with an older
    checkpoint of the same names is replaced when the new one is complete.

    Args:
        model: The sharded model.
        save_directory: Folder for the files, on the first rank's machine; if `sharded`, one that all ranks share.
        safe_serialization: True: safetensors is what is written.
        variant: Infix of the file names, such as `"fp16"`.
        max_shard_size: Size from which weights are split into several files.
        sharded: Whether each rank writes a file of its own slices. `from_pretrained` of the classes of
            `shardwise.models` reads them, fastest at this degree, and at any other too; diffusers does not.
        options: Further options of diffusers, at values that ask for nothing.

    Raises:
        UnsupportedOption: an option that cannot be honoured; before anything is written.
        UnsupportedOperation: the model has an adapter, is quantized, or is no longer as it was sharded.
        CheckpointError: the folder cannot be written, or holds something else; on every rank.
        RankFailure: another rank failed; nothing is left of the folder.
    """
    sharding = sharding_of(model)
    assert sharding is not None, "given to sharded models only"
    form = _Form(variant, max_shard_size, sharded)
    _save(model, sharding, save_directory, form, {"safe_serialization": safe_serialization, **options})


@dataclass(frozen=True)
class _Form:
    """What files are to be written."""

    variant: str | None
    max_shard_size: int | str
    sharded: bool

    def check(self, options: Mapping[str, Any]) -> None:
        """Refuse what cannot be honoured of it, and of the `options` of diffusers."""
        for name, value in options.items():
            harmless, reason = _REFUSED.get(
                name, ((), "it is no option of saving a sharded model; leave it out")
            )
            if not any(value is allowed for allowed in harmless):
                raise UnsupportedOption(
                    f"{name}={value!r} cannot be combined with tensor parallelism: {reason}"
                )
        if self.sharded and self.max_shard_size != _WHOLE_FILES:
            raise UnsupportedOption("max_shard_size and sharded=True exclude each other: leave one out")


def _save(
    model: Any,
    sharding: Sharding,
    location: str | os.PathLike[str],
    form: _Form,
    options: Mapping[str, Any],
) -> None:
    group, patience = sharding.group, timedelta(seconds=sharding.config.load_timeout)
    subject = f"saving {type(model).__name__} to {location}"
    folder = None
    with ExitStack() as stack:
        with group.agreement(subject) as step:
            form.check(options)
            tensors, stored = _tensors(model, sharding)
            checkpoint = new_checkpoint(stored, STEM, form.variant, form.max_shard_size)
            step.must_equal(folder=location, **_described(checkpoint, sharding, form.sharded))
            if group.rank == 0:
                replaces = partial(superseded, stem=STEM, variant=form.variant)
                folder = stack.enter_context(NewFolder(Path(location), replaces))
                step.say(str(folder.path))
        path, progress = Path(step.heard[0]), stack.enter_context(progress_bar(subject, group))
        texts = {}
        if form.sharded:
            listing = _write_shards(path, form.variant, tensors, stored, sharding, progress)
            texts[manifest_name(STEM, form.variant)] = listing
        else:
            here = path if group.rank == 0 else None
            write_gathered(checkpoint, here, tensors, sharding.plan.layouts, group, patience, progress)
            texts |= {checkpoint.index_name: checkpoint.index} if checkpoint.index else {}
        with group.agreement(subject, patience):
            if folder is not None:
                for name, text in {"config.json": config_of(model, sharding), **texts}.items():
                    write_text(path / name, text)
                folder.publish()


def _write_shards(
    folder: Path,
    variant: str | None,
    tensors: Mapping[str, Tensor],
    stored: Mapping[str, Stored],
    sharding: Sharding,
    progress: Progress | None,
) -> str:
    """Write a file for each rank, and return the manifest that names them."""
    group, plan = sharding.group, sharding.plan
    cuts = {name: Cut(what.shape, plan.layout(name)) for name, what in stored.items()}
    names = [rank_file(STEM, variant, rank, group.degree) for rank in range(group.degree)]
    with group.agreement(f"writing {names[group.rank]}", timedelta(seconds=sharding.config.load_timeout)):
        if not folder.is_dir():
            raise CheckpointError(
                f"rank {group.rank} does not see the folder that rank 0 has made, {folder}: with sharded=True all "
                "ranks write into one folder, which they must share"
            )
        local = {name: Stored(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        metadata = metadata_of(RankLayouts(group.rank, group.degree, cuts))
        write_own(folder, new_file(names[group.rank], local, metadata), tensors, progress)
    return manifest(names)


def config_of(model: Any, sharding: Sharding) -> str:
    """Return the configuration of the whole model, as diffusers writes it; entries that are divided are whole in it."""
    config = json.loads(model.to_json_string())
    for planned in sharding.plan.modules:
        if not planned.path:
            whole = {name: cut.size for name, cut in planned.attributes.items()}
            config |= {
                name.removeprefix(CONFIG_PREFIX): n
                for name, n in whole.items()
                if name.startswith(CONFIG_PREFIX)
            }
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def _tensors(model: nn.Module, sharding: Sharding) -> tuple[dict[str, Tensor], dict[str, Stored]]:
    """Return this rank's slices by name, and what the whole tensors are.

    Raises:
        UnsupportedOperation: the model is not as it was when it was sharded.
    """
    for path, module in model.named_modules():
        if any(base.__name__ == "BaseTunerLayer" for base in type(module).__mro__):
            raise _unsupported(model, f"{path} has an adapter", "unload it, or fuse it and unload it")
    if getattr(model, "config", {}).get("quantization_config") is not None:
        raise _unsupported(model, "its weights were quantized while it was loaded", _QUANTIZED)
    tensors = with_data(model, model.state_dict(keep_vars=True))
    plan, rank, stored = sharding.plan, sharding.group.rank, {}
    for name in plan.layouts.keys() & sharding.shapes.keys() - tensors.keys():
        raise _unsupported(model, f"it has no {name} any more", "undo what was changed since it was sharded")
    for name, tensor in tensors.items():
        shape = sharding.shapes.get(name, tuple(tensor.shape))
        local = plan.layout(name).local_shape(shape, rank, plan.degree)
        if hasattr(tensor, "__tensor_flatten__"):
            raise _unsupported(model, f"{name} is a {type(tensor).__name__}, quantized", _QUANTIZED)
        if type(tensor) not in (nn.Parameter, Tensor) or tensor.is_meta or tensor.dtype not in CODES:
            raise _unsupported(
                model,
                f"{name} is not a plain tensor in memory",
                "a quantized model is not gathered, nor one without weights",
            )
        if tuple(tensor.shape) != local:
            raise _unsupported(
                model,
                f"{name} is {list(tensor.shape)} on rank {rank} and was {list(local)} when it was sharded",
                "undo what was changed since",
            )
        stored[name] = Stored(tensor.dtype, shape)
    return tensors, stored


def _unsupported(model: nn.Module, what: str, fix: str) -> UnsupportedOperation:
    return UnsupportedOperation(
        f"{type(model).__name__} is sharded with tensor parallelism and cannot be saved: {what}; {fix}"
    )


def _described(checkpoint: NewCheckpoint, sharding: Sharding, sharded: bool) -> dict[str, object]:
    """Return what must be equal on all ranks for their slices to make one checkpoint."""
    files = [(file.name, file.start) for file in checkpoint.files]
    layouts = sorted((name, str(layout)) for name, layout in sharding.plan.layouts.items())
    return {
        "sharded": sharded,
        "files": f"{len(files)} files of {checkpoint.nbytes} bytes ({digest(files)})",
        "layouts": f"{len(layouts)} layouts ({digest(layouts)})",
    }
