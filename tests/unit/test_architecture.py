"""The shape of the source: who may import whom, who may talk to the ranks, how long things are, what is public.

Each rule is a function over the syntax tree of one file, so that it is tried on a small file that breaks it as
well as on the package.
"""

import ast
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from pathlib import Path
from statistics import median, quantiles

import pytest

import shardwise
from shardwise import models

PACKAGE = Path(shardwise.__file__).parent
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text("utf-8")) for name, path in FILES.items()}

LOWER = {"errors", "config", "plan", "runtime", "checkpoint", "compose"}
MAY_IMPORT = {
    "errors": set[str](),
    "config": {"errors"},
    "plan": {"errors", "plan"},
    "runtime": LOWER,
    "checkpoint": LOWER,
    "compose": LOWER,
    "models": LOWER | {"models"},
    "encoders": LOWER | {"models", "encoders"},
}
"""Part of the package -> the parts it may import. Those that are not listed stand on top, and may import all."""

KNOWS_MODELS = {"models", "encoders", "pipeline", "demo", "bench", "generate"}
"""Parts that may import diffusers and transformers."""

ASKS_ONLY = {
    "is_nccl_available",
    "is_available",
    "is_initialized",
    "get_rank",
    "get_world_size",
    "get_backend_config",
    "get_default_backend_for_device",
}
"""Functions of torch.distributed that need no other rank."""
TALKS = {
    "launch/group.py": {
        "init_process_group",
        "destroy_process_group",
        "distributed_c10d",
        "_world",
        "pg_map",
        "_set_pg_timeout",
    },
    "bench/diffusers_tp.py": {"from_local"},
    "bench/ranks.py": {"init_process_group", "barrier"},
    "bench/steps.py": {"barrier"},
}
"""What files other than `runtime/group.py` use of torch.distributed beyond that."""


def part(name: str) -> str:
    """Return the part of the package a file or module belongs to: `plan/heads.py` is of `plan`."""
    return name.replace("/", ".").removesuffix(".py").split(".")[0]


def imports(tree: ast.Module, package: str = "shardwise") -> Iterator[str]:
    """Yield the full name of every module, or name in a module, that a file imports anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - max(node.level - 1, 0)]
            start = ".".join([*(parents if node.level else []), *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


def package_of(name: str) -> str:
    """Return the package that a file's relative imports start from."""
    return ".".join(["shardwise", *Path(name).parent.parts])


def forbidden_imports(name: str, tree: ast.Module) -> set[str]:
    """Return what a file imports against the direction of dependencies."""
    own = {full for full in imports(tree, package_of(name)) if full.split(".")[0] == "shardwise"}
    allowed = MAY_IMPORT.get(part(name))
    if allowed is None:
        return set()
    return {full for full in own if full.removeprefix("shardwise").strip(".").split(".")[0] not in allowed}


def model_libraries(name: str, tree: ast.Module) -> set[str]:
    """Return what a file imports of diffusers and transformers without being allowed to."""
    if part(name) in KNOWS_MODELS:
        return set()
    return {full for full in imports(tree) if full.split(".")[0] in ("diffusers", "transformers")}


def distributed_functions(tree: ast.Module) -> set[str]:
    """Return the functions of torch.distributed that a file names, whichever way it imports them."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    named = set(aliases.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            named.add(f"{aliases.get(first, first)}.{rest}")
    found = {n for n in named if n.startswith("torch.distributed.") or "_c10d_functional" in n}
    return {name for name in (n.rpartition(".")[2] for n in found) if not name[0].isupper()} - ASKS_ONLY


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function from `def` to its end, docstring included, decorators not."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def over_the_package(rule: Callable[[str, ast.Module], Collection[str]]) -> dict[str, Collection[str]]:
    """Return what a rule finds, by file, where it finds something."""
    found = {name: rule(name, tree) for name, tree in TREES.items()}
    return {name: result for name, result in found.items() if result}


# ---------------------------------------------------------------- who imports whom


def test_dependencies_run_one_way() -> None:
    assert over_the_package(forbidden_imports) == {}
    assert {part(name) for name in FILES} >= set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("plan/resolve.py", "from shardwise.runtime.group import TensorParallelGroup"),
        ("plan/resolve.py", "from shardwise.config import TensorParallelConfig"),
        ("plan/resolve.py", "def f():\n    import shardwise.checkpoint.files"),
        ("plan/resolve.py", "from ..runtime import group"),
        ("plan/resolve.py", "from .. import config"),
        ("plan/resolve.py", "from shardwise import models"),
        ("plan/resolve.py", "import shardwise"),
        ("errors.py", "from shardwise.config import TensorParallelConfig"),
        ("config.py", "from shardwise.plan.layout import Shard"),
        ("runtime/shard.py", "from shardwise.models.mixin import TensorParallelMixin"),
        ("checkpoint/load.py", "if TYPE_CHECKING:\n    from shardwise.pipeline import load"),
        ("compose/lora.py", "from shardwise import verify"),
        ("runtime/group.py", "from shardwise import cli, errors"),
    ],
)
def test_import_against_the_direction_is_noticed(name: str, source: str) -> None:
    assert forbidden_imports(name, ast.parse(source))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("plan/resolve.py", "from shardwise.plan import heads\nfrom shardwise.errors import Finding"),
        ("plan/resolve.py", "from . import heads\nfrom .layout import Shard\nfrom ..errors import Finding"),
        ("checkpoint/load.py", "from shardwise.plan.resolve import ResolvedPlan\nimport torch"),
        ("models/families/flux.py", "from shardwise.runtime.shard import assign"),
    ],
)
def test_import_along_the_direction_is_none_of_the_forbidden(name: str, source: str) -> None:
    assert not forbidden_imports(name, ast.parse(source))


def test_only_models_pipeline_and_demo_import_diffusers_or_transformers() -> None:
    assert over_the_package(model_libraries) == {}


@pytest.mark.parametrize(
    ("name", "source", "seen"),
    [
        ("runtime/shard.py", "import diffusers", True),
        ("cli.py", "def f():\n    from transformers import AutoModel", True),
        ("checkpoint/load.py", "from diffusers.models import ModelMixin as M", True),
        ("models/families/flux.py", "import diffusers", False),
        ("pipeline.py", "import transformers", False),
        ("runtime/shard.py", "import huggingface_hub", False),
    ],
)
def test_import_of_a_model_library_is_noticed_where_it_is_not_allowed(
    name: str, source: str, seen: bool
) -> None:
    assert bool(model_libraries(name, ast.parse(source))) == seen


def test_layout_needs_no_torch() -> None:
    assert not [name for name in imports(TREES["plan/layout.py"]) if name.startswith("torch")]


def test_importing_the_package_loads_neither_diffusers_nor_transformers() -> None:
    code = "import sys, shardwise; print([m for m in ('diffusers', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# ---------------------------------------------------------------- who talks to the ranks


def test_only_the_group_calls_collectives() -> None:
    found = over_the_package(lambda name, tree: distributed_functions(tree))
    assert {"all_reduce", "broadcast"} <= found.pop("runtime/group.py")
    assert found == TALKS


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch.distributed.all_reduce(x)", "all_reduce"),
        ("import torch.distributed as dist\ndist.all_reduce(x)", "all_reduce"),
        ("from torch import distributed\ndistributed.broadcast(x)", "broadcast"),
        ("from torch import distributed as d\nf = d.barrier", "barrier"),
        ("from torch.distributed import all_gather as gather", "all_gather"),
        ("from torch.distributed._functional_collectives import all_reduce", "all_reduce"),
        ("import torch.distributed as dist\ndist.nn.functional.all_gather(x)", "all_gather"),
        ("import torch\ntorch.ops._c10d_functional.all_reduce(x)", "all_reduce"),
        ("import torch.distributed as dist\ndist._all_gather_base(x)", "_all_gather_base"),
    ],
)
def test_collective_is_noticed_however_it_is_called(source: str, name: str) -> None:
    assert name in distributed_functions(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.get_rank()",
        "from torch.distributed.device_mesh import DeviceMesh",
        "group.all_reduce(x)",
        "import torch\ntorch.cuda.set_device(0)",
    ],
)
def test_what_needs_no_other_rank_is_no_collective(source: str) -> None:
    assert not distributed_functions(ast.parse(source))


def test_accelerators_are_all_asked_alike() -> None:
    asks = {name for name, path in FILES.items() if "torch.cuda" in path.read_text("utf-8")}
    asks -= {"doctor/facts.py"}  # NCCL's version is there alone
    assert not asks, "torch.accelerator and torch.get_device_module know any accelerator"


# ---------------------------------------------------------------- lengths


def test_functions_are_short() -> None:
    lengths = {f"{name}:{node.name}": lines(node) for name, tree in TREES.items() for node in functions(tree)}
    assert len(lengths) > 100
    assert median(lengths.values()) <= 10
    assert quantiles(lengths.values(), n=10)[-1] <= 35
    assert {name: length for name, length in lengths.items() if length > 60} == {}


def test_files_are_short() -> None:
    lengths = {name: len(path.read_text("utf-8").splitlines()) for name, path in FILES.items()}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_length_of_a_function_is_that_of_its_definition() -> None:
    source = '@property\ndef f(\n    a: int,\n) -> int:\n    """Doc."""\n    return a\n\n\nx = 1\n'
    assert [lines(node) for node in functions(ast.parse(source))] == [5]


# ---------------------------------------------------------------- what is public


def test_public_names_are_those_that_can_be_imported() -> None:
    tree = TREES["__init__.py"]
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("shardwise")
        for alias in node.names
    }
    assert set(shardwise.__all__) == imported | {"__version__"}
    assert list(shardwise.__all__) == sorted(set(shardwise.__all__))


@pytest.mark.parametrize("name", shardwise.__all__)
def test_public_name_can_be_imported(name: str) -> None:
    assert getattr(shardwise, name) is not None


@pytest.mark.parametrize("module", [shardwise, models])
def test_name_that_does_not_exist_is_an_attribute_error(module: object) -> None:
    with pytest.raises(AttributeError, match="NoSuchThing"):
        _ = module.NoSuchThing


def test_every_model_class_is_public_and_every_family_is_listed() -> None:
    files = {Path(name).stem for name in FILES if name.startswith("models/families/")} - {"__init__"}
    assert set(models.FAMILIES.values()) == files
    assert set(models.__all__) == {"FAMILIES", *models.FAMILIES}
    assert all(name in dir(models) for name in models.FAMILIES)


@pytest.mark.parametrize(("name", "family"), models.FAMILIES.items())
def test_L3_P11_model_class_declares_its_plan_in_the_file_of_its_family(name: str, family: str) -> None:
    tree = TREES[f"models/families/{family}.py"]
    (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    assigned = chain.from_iterable(node.targets for node in cls.body if isinstance(node, ast.Assign))
    assert cls.name == name
    assert "_tp_plan" in {target.id for target in assigned if isinstance(target, ast.Name)}
