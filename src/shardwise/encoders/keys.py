"""The names that transformers gives to the tensors of a checkpoint: what they are saved under may be older names.

The only place that knows transformers' renaming of keys, of which only names are asked and no tensor is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key, revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from shardwise.errors import CheckpointError, UnsupportedOperation, UnsupportedOption


def model_names(model: Any, keys: Iterable[str]) -> dict[str, str]:
    """Return what a model of transformers calls the tensors of a checkpoint, by their keys there.

    A key that the model has no place for keeps a name that it does not have. The model remembers which rules applied,
    which is what transformers turns round when it is saved.

    Args:
        model: A model whose tensors have their full shapes, for instance on the meta device.
        keys: The checkpoint's keys.

    Raises:
        CheckpointError: two keys mean the same tensor.
        UnsupportedOption: tensors would be put together from several, or cut, when they are loaded.
    """
    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    own = model.state_dict()
    names: dict[str, str] = {}
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, own)
        if (
            name not in own and key in own
        ):  # as transformers does: a rule has taken a good name for an old one
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, own)
        if pattern is not None:
            raise UnsupportedOption(
                f"{key} is stored in another form than {type(model).__name__} holds it ({pattern}): load the model "
                "whole, save it with save_pretrained(save_original_format=False), and load that folder"
            )
        names[key] = name
    _refuse_twice(names)
    model._weight_conversions = [rule for rule in rules if rule.was_used()]
    return names


def stored_names(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return under which keys transformers saves a model, by the model's names, in the order of its files.

    Of names of one tensor, it is one. Values are not looked at: each may be a slice.

    Raises:
        UnsupportedOperation: tensors would be put together, or cut, when they are saved.
    """
    once = remove_tied_weights_from_state_dict(dict(tensors), model)
    names = {id(tensor): name for name, tensor in once.items()}
    saved = revert_weight_conversion(model, once)
    if names.keys() != {id(tensor) for tensor in saved.values()}:
        raise UnsupportedOperation(
            f"{type(model).__name__} is sharded with tensor parallelism and cannot be saved: its checkpoints hold "
            "weights in another form than it does; save the model before sharding it"
        )
    return {names[id(tensor)]: key for key, tensor in saved.items()}


def _refuse_twice(names: Mapping[str, str]) -> None:
    keys: dict[str, str] = {}
    for key, name in names.items():
        if (other := keys.setdefault(name, key)) != key:
            raise CheckpointError(
                f"{other} and {key} both mean {name}: files of two checkpoints are mixed; fetch it again into an "
                "empty folder"
            )
