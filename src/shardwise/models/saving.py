"""`save_pretrained` of a sharded diffusers model: the checkpoint that diffusers would write of the whole one.

Owns what is diffusers' own: options, names, the configuration. What is another library's own is a subclass of the
options (`shardwise.encoders.saving`). Bytes and ranks are left to `checkpoint.save`.
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
from typing import Any, ClassVar

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
from shardwise.plan.layout import Layout
from shardwise.plan.styles import CONFIG_PREFIX
from shardwise.runtime.shard import Sharding, digest, sharding_of

STEM = "diffusion_pytorch_model"
_WHOLE_FILES = "10GB"
"""What diffusers takes for `max_shard_size` if it is not told."""

Refused = Mapping[str, tuple[tuple[Any, ...], str]]
"""Option -> values that ask for nothing; and the reason why others cannot be honoured."""

WRITTEN: Refused = {
    "is_main_process": ((True,), "all ranks call it, and the first one writes; leave it out"),
    "safe_serialization": ((True,), "only safetensors files can be written in pieces; leave it out"),
    "push_to_hub": ((False,), "upload the folder once it is saved"),
}
"""What both libraries know and no rank can do."""

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
    form = SaveOptions(variant, max_shard_size, sharded)
    save(model, save_directory, form, {"safe_serialization": safe_serialization, **options})


@dataclass(frozen=True)
class SaveOptions:
    """What files of a model are to be written, and what is diffusers' own of them."""

    variant: str | None
    max_shard_size: int | str
    sharded: bool = False

    stem: ClassVar[str] = STEM
    """Name of the weight files without suffixes."""
    refused: ClassVar[Refused] = {
        **WRITTEN,
        "save_function": ((None,), "files are written in pieces as they arrive; leave it out"),
        "use_flashpack": ((False,), "only safetensors files are written; leave it out"),
    }

    def keys(self, model: Any, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Return under which keys the tensors of a model are saved, by their names, in the order of the files."""
        return {name: name for name in tensors}

    def texts(self, model: Any, sharding: Sharding) -> dict[str, str]:
        """Return what is written beside the weights, by the names of the files."""
        return {"config.json": config_of(model, sharding)}

    def index_metadata(self, model: Any, stored: Mapping[str, Stored]) -> dict[str, object]:
        """Return what the index of several files says beside their size; given the model's whole tensors by name."""
        return {}

    def check(self, options: Mapping[str, Any]) -> None:
        """Refuse what cannot be honoured of it, and of the library's further options.

        Raises:
            UnsupportedOption: naming the option, and why.
        """
        for name, value in options.items():
            harmless, reason = self.refused.get(
                name, ((), "it is no option of saving a sharded model; leave it out")
            )
            if not any(value is allowed for allowed in harmless):
                raise UnsupportedOption(
                    f"{name}={value!r} cannot be combined with tensor parallelism: {reason}"
                )
        if self.sharded and self.max_shard_size != _WHOLE_FILES:
            raise UnsupportedOption("max_shard_size and sharded=True exclude each other: leave one out")


def save(
    model: Any,
    location: str | os.PathLike[str],
    form: SaveOptions,
    options: Mapping[str, Any],
) -> None:
    """Save a sharded model in the form that is asked for; every rank calls it.

    Raises:
        UnsupportedOption, UnsupportedOperation, CheckpointError, RankFailure: as `save_sharded`.
    """
    sharding = sharding_of(model)
    assert sharding is not None, "given to sharded models only"
    group, patience = sharding.group, timedelta(seconds=sharding.config.load_timeout)
    subject = f"saving {type(model).__name__} to {location}"
    folder = None
    with ExitStack() as stack:
        with group.agreement(subject) as step:
            form.check(options)
            contents = _contents(model, sharding, form)
            step.must_equal(folder=location, **_described(contents, form.sharded))
            if group.rank == 0:
                replaces = partial(superseded, stem=form.stem, variant=form.variant, texts=contents.texts)
                folder = stack.enter_context(NewFolder(Path(location), replaces))
                step.say(str(folder.path))
        path, progress = Path(step.heard[0]), stack.enter_context(progress_bar(subject, group))
        texts, checkpoint = dict(contents.texts), contents.checkpoint
        if form.sharded:
            listing = _write_shards(path, form, contents, sharding, progress)
            texts[manifest_name(form.stem, form.variant)] = listing
        else:
            here = path if group.rank == 0 else None
            write_gathered(checkpoint, here, contents.tensors, contents.layouts, group, patience, progress)
            texts |= {checkpoint.index_name: checkpoint.index} if checkpoint.index else {}
        with group.agreement(subject, patience):
            if folder is not None:
                for name, text in texts.items():
                    write_text(path / name, text)
                folder.publish()


@dataclass(frozen=True)
class _Contents:
    """What is to be saved of a model, by the keys of the files."""

    tensors: Mapping[str, Tensor]
    """This rank's slices."""
    stored: Mapping[str, Stored]
    """What the whole tensors are."""
    layouts: Mapping[str, Layout]
    """How they are cut."""
    checkpoint: NewCheckpoint
    texts: Mapping[str, str]


def _contents(model: nn.Module, sharding: Sharding, form: SaveOptions) -> _Contents:
    tensors, stored = _tensors(model, sharding)
    keys = form.keys(model, tensors)
    whole = {key: stored[name] for name, key in keys.items()}
    metadata = form.index_metadata(model, stored)
    return _Contents(
        {key: tensors[name] for name, key in keys.items()},
        whole,
        {key: sharding.plan.layout(name) for name, key in keys.items()},
        new_checkpoint(whole, form.stem, form.variant, form.max_shard_size, metadata),
        form.texts(model, sharding),
    )


def _write_shards(
    folder: Path, form: SaveOptions, contents: _Contents, sharding: Sharding, progress: Progress | None
) -> str:
    """Write a file for each rank, and return the manifest that names them."""
    group = sharding.group
    cuts = {key: Cut(what.shape, contents.layouts[key]) for key, what in contents.stored.items()}
    names = [rank_file(form.stem, form.variant, rank, group.degree) for rank in range(group.degree)]
    with group.agreement(f"writing {names[group.rank]}", timedelta(seconds=sharding.config.load_timeout)):
        if not folder.is_dir():
            raise CheckpointError(
                f"rank {group.rank} does not see the folder that rank 0 has made, {folder}: with sharded=True all "
                "ranks write into one folder, which they must share"
            )
        local = {key: Stored(tensor.dtype, tuple(tensor.shape)) for key, tensor in contents.tensors.items()}
        metadata = metadata_of(RankLayouts(group.rank, group.degree, cuts))
        write_own(folder, new_file(names[group.rank], local, metadata), contents.tensors, progress)
    return manifest(names)


def config_of(model: Any, sharding: Sharding) -> str:
    """Return the configuration of the whole model, as diffusers writes it; entries that are divided are whole in it."""
    config = json.loads(model.to_json_string()) | whole_entries(sharding)
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def whole_entries(sharding: Sharding) -> dict[str, int]:
    """Return the entries of a configuration that a sharded model has divided, as those of the whole one."""
    return {
        name.removeprefix(CONFIG_PREFIX): cut.size
        for planned in sharding.plan.modules
        if not planned.path
        for name, cut in planned.attributes.items()
        if name.startswith(CONFIG_PREFIX)
    }


def _tensors(model: nn.Module, sharding: Sharding) -> tuple[dict[str, Tensor], dict[str, Stored]]:
    """Return this rank's slices by name, and what the whole tensors are.

    Raises:
        UnsupportedOperation: the model is not as it was when it was sharded.
    """
    for path, module in model.named_modules():
        if any(base.__name__ == "BaseTunerLayer" for base in type(module).__mro__):
            raise _unsupported(model, f"{path} has an adapter", "unload it, or fuse it and unload it")
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
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


def _described(contents: _Contents, sharded: bool) -> dict[str, object]:
    """Return what must be equal on all ranks for their slices to make one checkpoint."""
    files = [(file.name, file.start) for file in contents.checkpoint.files]
    layouts = sorted((key, str(layout)) for key, layout in contents.layouts.items())
    return {
        "sharded": sharded,
        "files": f"{len(files)} files of {contents.checkpoint.nbytes} bytes ({digest(files)})",
        "layouts": f"{len(layouts)} layouts ({digest(layouts)})",
    }
