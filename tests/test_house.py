"""Who may import whom, and what every module must have."""

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("collectives", "mpidl", "examples", "benchmarks", "tests")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]

# A module, and the files or folders that may use it. In benchmarks mpi4py and torch.distributed are peers.
ALLOWED = {
    "mpi4py": ("collectives/", "benchmarks/", "tests/"),
    "cupy": ("collectives/cuda/", "tests/"),
    "torch.distributed": ("benchmarks/",),
    "mpidl": ("mpidl/", "examples/", "benchmarks/", "tests/"),
    "peers": ("benchmarks/",),
    "gpu_limits": ("benchmarks/", "tests/benchmarks/"),
    "bench_collectives": ("benchmarks/", "tests/benchmarks/"),
    "bench_training": ("benchmarks/", "tests/benchmarks/"),
    "plot_front_page": ("benchmarks/", "tests/benchmarks/"),
    "training_report": ("benchmarks/", "tests/benchmarks/"),
    "turns": ("benchmarks/", "tests/benchmarks/"),
    "examples": ("examples/", "tests/"),
    "tests": ("tests/",),
}


@cache
def modules_used(source: str) -> frozenset[str]:
    """The absolute names of what a source imports, anywhere in it, and of the dotted names that it uses."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names |= {str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)}
    return frozenset(names)


def violations(module: str, sources: Iterable[tuple[str, str]]) -> list[str]:
    """The paths of those (path, source) that use the module and must not."""
    return [
        path
        for path, source in sources
        if not path.startswith(ALLOWED[module])
        and any(f"{name}.".startswith(f"{module}.") for name in modules_used(source))
    ]


@pytest.mark.parametrize("module", ALLOWED)
def test_a_module_is_used_only_where_it_may_be(module: str) -> None:
    sources = ((path.relative_to(ROOT).as_posix(), path.read_text()) for path in FILES)
    assert not violations(module, sources)


@pytest.mark.parametrize(
    ("module", "path", "source"),
    [
        ("mpi4py", "mpidl/ddp.py", "from mpi4py import MPI"),
        ("mpi4py", "examples/gpt2_zero3.py", "import mpi4py.util.dtlib as t"),
        ("mpi4py", "mpidl/ddp.py", "import importlib\nMPI = importlib.import_module('mpi4py.MPI')"),
        ("cupy", "collectives/buffers.py", "def f():\n    import cupy"),
        ("torch.distributed", "mpidl/zero/units.py", "from torch import distributed as dist"),
        ("torch.distributed", "tests/mpidl/test_ddp.py", "from torch.distributed.fsdp import fully_shard"),
        ("torch.distributed", "mpidl/ddp.py", "import torch\ntorch.distributed.is_initialized()"),
        ("mpidl", "collectives/watchdog.py", "if True:\n    from mpidl.errors import UsageError"),
        ("examples", "mpidl/data/corpora.py", "import examples.gpt2_zero3"),
    ],
)
def test_a_use_that_is_not_allowed_is_found(module: str, path: str, source: str) -> None:
    assert violations(module, [(path, source)]) == [path]


def test_uses_that_are_allowed_and_names_that_only_look_alike_are_not_found() -> None:
    source = "import mpi4py_helpers, torch\nfrom .mpi4py import MPI\nfrom torch import nn\ntorch.distributions"
    for module in ALLOWED:
        assert not violations(module, [("collectives/x.py", source)])
        assert not violations(module, [(f"{ALLOWED[module][0]}", f"import {module}")])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_module_says_what_it_is(path: Path) -> None:
    assert path.read_text().strip() == "" or ast.get_docstring(ast.parse(path.read_text()))
