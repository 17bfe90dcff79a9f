"""`save_pretrained` of a sharded text encoder: the checkpoint that transformers would write of the whole one."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar

from torch import Tensor

from shardwise.checkpoint.write import Stored
from shardwise.encoders.keys import stored_names
from shardwise.models.saving import WRITTEN, Refused, SaveOptions, save, whole_entries
from shardwise.runtime.shard import Sharding

_WHOLE_FILES = "50GB"
"""What transformers takes for `max_shard_size` if it is not told."""


def let_save(model: Any) -> None:
    """Give a sharded text encoder the `save_pretrained` below."""
    vars(model)["save_pretrained"] = partial(save_encoder, model)


def save_encoder(
    model: Any,
    save_directory: str | os.PathLike[str],
    variant: str | None = None,
    max_shard_size: int | str = _WHOLE_FILES,
    **options: Any,
) -> None:
    """Save a sharded text encoder as transformers saves the whole one; every rank calls it.

    The files are those that `save_pretrained` of the whole model would write, tied weights once and under the keys of
    older checkpoints where it goes back to them, and the first rank writes them. No rank holds a whole tensor. The
    folder is complete or absent; one with an older checkpoint of the same names is replaced.

    Args:
        model: The sharded model.
        save_directory: Folder for the files, on the first rank's machine.
        variant: Infix of the file names, such as `"fp16"`.
        max_shard_size: Size from which weights are split into several files.
        options: Further options of transformers, at values that ask for nothing.

    Raises:
        UnsupportedOption: an option that cannot be honoured; before anything is written.
        UnsupportedOperation: the model has an adapter, or is no longer as it was sharded.
        CheckpointError: the folder cannot be written, or holds something else; on every rank.
        RankFailure: another rank failed; nothing is left of the folder.
    """
    save(model, save_directory, EncoderSaveOptions(variant, max_shard_size), options)


@dataclass(frozen=True)
class EncoderSaveOptions(SaveOptions):
    """What files of a text encoder are to be written, and what is transformers' own of them."""

    stem: ClassVar[str] = "model"
    refused: ClassVar[Refused] = {
        **WRITTEN,
        "state_dict": ((None,), "each rank saves the slices that it holds; leave it out"),
        "token": ((None,), "nothing is uploaded; leave it out"),
        "save_peft_format": ((True, False), "there is no adapter; leave it out"),
        "save_original_format": (
            (True,),
            "the keys are those that transformers writes by default; leave it out",
        ),
        "distributed_checkpoint": ((False,), "it is transformers' own way to save slices; leave it out"),
        "sharded": ((False,), "a file for each rank is what models of diffusers are saved as; leave it out"),
    }

    def keys(self, model: Any, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Return under which keys the tensors of a model are saved, by their names, in the order of the files.

        Raises:
            UnsupportedOperation: they are not saved as the model holds them.
        """
        return stored_names(model, tensors)

    def texts(self, model: Any, sharding: Sharding) -> dict[str, str]:
        """Return the configurations, by the names of their files."""
        config = copy.deepcopy(model.config)
        for name, size in whole_entries(sharding).items():
            setattr(config, name, size)
        config.dtype = str(model.dtype).removeprefix("torch.")
        config.architectures = [type(model).__name__]
        texts = {"config.json": config.to_json_string()}
        if model.can_generate():
            generation = model.generation_config
            texts["generation_config.json"] = generation.to_json_string(keys_to_pop=["compile_config"])
        return texts

    def index_metadata(self, model: Any, stored: Mapping[str, Stored]) -> dict[str, object]:
        """Return the number of parameters of the whole model, tied ones counted once."""
        return {"total_parameters": sum(prod(stored[name].shape) for name, _ in model.named_parameters())}
