"""Leaves single checks out of a module's source, and puts what remains in its place."""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardwise.checkpoint import untrusted

NOT_CHECKS = [
    "call os.close(descriptor)",
    "call super().__init__(f'{what}; {fix}')",
    "part isinstance(files, WeightFiles)",  # whether there is an index to check by
    "part files.weight_map is not None",
    "part units",  # whether there are units beside the copies: copies alone may be
]


def left_out(module: ModuleType) -> dict[str, ast.Module]:
    """Return the source of a module without each of its checks, by what is left out."""
    tree = source_of(module)
    sources: dict[str, ast.Module] = {}
    for number, node in enumerate(ast.walk(tree)):
        for what, change in _changes(node):
            if what not in NOT_CHECKS:
                sources[what] = copy.deepcopy(tree)
                change(list(ast.walk(sources[what]))[number])
    return sources


def source_of(module: ModuleType) -> ast.Module:
    """Return the source of a module with nothing left out."""
    return ast.parse(Path(str(module.__file__)).read_text("utf-8"))


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], None]]]:
    if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
        yield f"if {ast.unparse(node.test)}", lambda n: setattr(n, "test", ast.Constant(False))
    elif isinstance(node, ast.BoolOp):
        neutral = ast.Constant(isinstance(node.op, ast.And))
        for part, value in enumerate(node.values):
            yield f"part {ast.unparse(value)}", partial(lambda p, n: n.values.__setitem__(p, neutral), part)
    elif isinstance(node, ast.ExceptHandler):
        nothing = ast.Tuple([], ast.Load())
        yield f"except {ast.unparse(node.type or nothing)}", lambda n: setattr(n, "type", nothing)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "json.loads":
        for hook in range(len(node.keywords)):
            yield f"hook {node.keywords[hook].arg}", partial(lambda h, n: n.keywords.pop(h), hook)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield f"call {ast.unparse(node)}", lambda n: setattr(n, "value", ast.Constant(None))


def put(monkeypatch: pytest.MonkeyPatch, module: ModuleType, source: ast.Module) -> None:
    """Put the functions of a source in place of those of its module, wherever they were imported."""
    changed = ModuleType(module.__name__)
    exec(compile(ast.fix_missing_locations(source), str(module.__file__), "exec"), vars(changed))
    users = [
        user for name, user in sys.modules.items() if name.startswith(("shardwise.checkpoint", "tools.fuzz"))
    ]
    for name, value in list(vars(changed).items()):
        if getattr(value, "__module__", None) == module.__name__ and name != "Invalid":
            original = getattr(module, name)
            for user in users:
                if getattr(user, name, None) is original:
                    monkeypatch.setattr(user, name, value)
    if module is untrusted:  # the class stays the one that the other modules catch
        vars(changed)["Invalid"] = untrusted.Invalid
