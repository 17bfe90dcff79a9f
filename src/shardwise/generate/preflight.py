"""What is wrong with a request and can be known without weights: asked before any rank is started. Needs no torch.

What needs the libraries of the models (plans, checkpoints, what is on the hub) is asked by the ranks, before they read
a weight.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardwise.checkpoint.adapters import check_adapter_file
from shardwise.checkpoint.configuration import read_object
from shardwise.errors import CheckpointError, ConfigError
from shardwise.generate.request import OURS, Request

INDEX = "model_index.json"
_DENOISERS = ("transformer", "unet")
_WEIGHTS = (".safetensors", ".bin", ".pt")


def check(request: Request) -> None:
    """Check the files that a request names, and what it asks of the pipeline and of the ranks.

    Raises:
        CheckpointError: a folder or file is missing, or is not what it should be.
        ConfigError: a component that the pipeline lacks, or degrees that do not divide its heads.
        UnsupportedOption: an argument that the pipeline does not take.
    """
    _check_adapter(request)
    folder = Path(request.location)
    if not folder.is_dir():
        if names_a_path(request.location):
            raise CheckpointError(f"{request.location}: there is no such folder")
        return  # of the hub
    index = read_index(folder)
    accepted = arguments_of(index["_class_name"])
    if accepted is not None:
        request.call(index["_class_name"], accepted)
    components = {name for name, entry in index.items() if isinstance(entry, list)}
    for name in request.components or ():
        if name not in components:
            raise ConfigError(
                f"--components: {name} is no component of this pipeline; it has {', '.join(sorted(components))}"
            )
    for name in sorted(components & set(request.components or components)):
        if name.startswith(_DENOISERS):
            _check_heads(request, name, folder / name / "config.json")


def names_a_path(location: str) -> bool:
    """Return whether a location cannot be the id of a hub repository."""
    return location.endswith(_WEIGHTS) or location.startswith((".", "/", "~")) or location.count("/") != 1


def read_index(folder: Path) -> Mapping[str, Any]:
    """Return what the index of a pipeline's folder says; its `_class_name` is a text.

    Raises:
        CheckpointError: there is none, or it is not what it should be.
    """
    file = folder / INDEX
    if not file.exists():
        raise CheckpointError(
            f"{folder} is no pipeline's folder: it has no {INDEX}; name the folder that has"
        )
    index = read_object(file)
    if not isinstance(index.get("_class_name"), str):
        raise CheckpointError(f"{file} names no pipeline (_class_name); fetch it again")
    return index


def _check_adapter(request: Request) -> None:
    if request.lora is None or not names_a_path(request.lora):
        return
    file = Path(request.lora).expanduser()
    if not file.exists():
        raise CheckpointError(f"--lora {request.lora}: there is no such file")
    if file.is_file():
        check_adapter_file(file)


def _check_heads(request: Request, name: str, config: Path) -> None:
    """Check that the ranks which share an attention can share its heads, where the configuration says how many."""
    shared = request.tp * request.ulysses
    if shared == 1 or not config.exists():
        return
    heads = read_object(config).get("num_attention_heads")
    if isinstance(heads, int) and heads % shared:
        degrees = [str(degree) for degree in range(1, heads + 1) if heads % degree == 0]
        asked = f"--tp {request.tp}" + (f" --ulysses {request.ulysses}" if request.ulysses > 1 else "")
        raise ConfigError(
            f"{asked}: the {name} has {heads} attention heads, which {shared} ranks cannot share; "
            f"use one of {', '.join(degrees[:12])}"
        )


@cache
def arguments_of(pipeline: str) -> frozenset[str] | None:
    """Return the arguments that a pipeline of diffusers is called with, None if that cannot be told from its source."""
    library = find_spec("diffusers")
    if library is None or library.origin is None:
        return None
    mark = f"class {pipeline}("
    for file in sorted(Path(library.origin).parent.glob("pipelines/**/pipeline*.py")):
        source = file.read_text("utf-8")
        if mark in source:
            return _arguments_in(ast.parse(source), pipeline)
    return None


def _arguments_in(tree: ast.Module, pipeline: str) -> frozenset[str] | None:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == pipeline:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__call__":
                    given = method.args
                    names = {
                        argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)
                    }
                    return frozenset(names - OURS - {"self"}) if given.kwarg is None else None
    return None
