"""What a user may name a model by, and what is known of it: its class, its skeleton, example inputs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

from shardwise import models
from shardwise.errors import ConfigError
from shardwise.plan.meta import meta_parameters

EXAMPLE_SEED = 0


def family_of(cls: type) -> Any | None:
    """Return the module of `shardwise.models` that knows this class, by its name or that of a base class."""
    for base in cls.__mro__:
        if base.__name__ in models.FAMILIES:
            return import_module(f"shardwise.models.families.{models.FAMILIES[base.__name__]}")
    return None


def model_class(name: str) -> type[Any]:
    """Return a model class by its name: that of `shardwise.models`, or else that of diffusers.

    Raises:
        ConfigError: neither has a model class of this name.
    """
    if name in models.FAMILIES:
        return getattr(models, name)  # type: ignore[no-any-return]
    cls = getattr(diffusers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, diffusers.ModelMixin)):
        raise ConfigError(
            f"{name!r} is neither a folder nor a model class; classes with a plan: {', '.join(models.FAMILIES)}"
        )
    return cls


def skeleton(target: Any, **overrides: Any) -> nn.Module:
    """Return a model without weights, in evaluation mode.

    Args:
        target: A model (its parameters are taken to the meta device in a copy), a model class or its name (its
            default configuration), or a folder or hub id with a `config.json`.
        overrides: Changes of the configuration.

    Raises:
        ConfigError: nothing is known by this name, or the class cannot be made with its default configuration.
    """
    if isinstance(target, nn.Module):
        from shardwise.runtime.shard import meta_twin

        return meta_twin(target)
    config: Mapping[str, Any] = {}
    if isinstance(target, (str, Path)):
        target, config = _named(str(target))
    with meta_parameters():
        if config:
            model = target.from_config({**config, **overrides})
        else:
            model = target(**overrides) if overrides else _with_defaults(target)
    return model.eval()  # type: ignore[no-any-return]


def _with_defaults(cls: type[Any]) -> nn.Module:
    """Return a model of a class in its default configuration, completed where its family's file does so."""
    try:
        return cls(**getattr(family_of(cls), "RELEASED_CONFIG", {}))  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:  # what None does where a size is needed
        raise ConfigError(
            f"{cls.__name__} has no default configuration that works ({error}): "
            "pass a model, or a folder or hub id with a config.json"
        ) from error


def _named(name: str) -> tuple[type[Any], Mapping[str, Any]]:
    """Return the class and the configuration that a name stands for; a class name has its defaults."""
    looks_like_a_path = "/" in name or Path(name).exists()
    if not looks_like_a_path:
        return model_class(name), {}
    try:
        config = diffusers.AutoModel.load_config(name)  # any class that has a config.json would do
    except OSError as error:
        raise ConfigError(f"{name} has no readable config.json of a model: {error}") from error
    if "_class_name" not in config:
        raise ConfigError(f"the config.json of {name} does not say which class it is of")
    return model_class(config["_class_name"]), config


def tiny_case(family: Any, variant: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tiny configuration of a family's module, or one of its variants, and inputs for it."""
    changes, arguments = family.TINY_VARIANTS[variant] if variant else ({}, {})
    config = {**family.TINY_CONFIG, **changes}
    generator = torch.Generator().manual_seed(EXAMPLE_SEED)
    return config, family.example_inputs(config, generator, **arguments)


def example_inputs(model: nn.Module) -> dict[str, Any] | None:
    """Return example inputs for a model of a known class, or None."""
    family = family_of(type(model))
    if family is None:
        return None
    generator = torch.Generator().manual_seed(EXAMPLE_SEED)
    inputs: dict[str, Any] = family.example_inputs(model.config, generator)
    if hasattr(family, "adapter_inputs"):
        inputs |= family.adapter_inputs(model, generator)
    return inputs
