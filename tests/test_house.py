"""Rules of the source: which modules may import which, how docstrings begin, and which words are not used."""

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("collectives", "mpidl", "examples", "benchmarks", "tests")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]

# A module, and the files or folders that may use it. In benchmarks mpi4py and torch.distributed are peers; the one file
# of the packages that compares with torch.distributed is imported only where a user asks for that.
ALLOWED = {
    "mpi4py": ("collectives/", "benchmarks/", "tests/"),
    "cupy": ("collectives/backends/cuda/", "tests/"),
    "torch.distributed": ("benchmarks/", "collectives/bench/peers.py"),
    "mpidl": ("mpidl/", "examples/", "benchmarks/", "tests/"),
    "collectives.bench": ("collectives/bench/", "benchmarks/", "tests/"),
    "bench_learning": ("benchmarks/", "tests/benchmarks/"),
    "bench_libraries": ("benchmarks/", "tests/benchmarks/"),
    "bench_post_local": ("benchmarks/", "tests/benchmarks/"),
    "bench_training": ("benchmarks/", "tests/benchmarks/"),
    "imb": ("benchmarks/", "tests/benchmarks/"),
    "libraries_report": ("benchmarks/", "tests/benchmarks/"),
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
        ("cupy", "collectives/base/buffers.py", "def f():\n    import cupy"),
        ("torch.distributed", "mpidl/zero/parameters/units.py", "from torch import distributed as dist"),
        ("torch.distributed", "tests/mpidl/ddp/test_ddp.py", "from torch.distributed.fsdp import fully_shard"),
        ("torch.distributed", "mpidl/ddp.py", "import torch\ntorch.distributed.is_initialized()"),
        ("torch.distributed", "collectives/bench/sides.py", "import torch.distributed"),
        ("collectives.bench", "mpidl/cli.py", "from collectives.bench import peers"),
        ("mpidl", "collectives/runtime/watchdog.py", "if True:\n    from mpidl.errors import UsageError"),
        ("examples", "mpidl/data/corpora.py", "import examples.gpt2_zero3"),
    ],
)
def test_a_use_that_is_not_allowed_is_found(module: str, path: str, source: str) -> None:
    assert violations(module, [(path, source)]) == [path]


def test_uses_that_are_allowed_and_names_that_only_look_the_same_are_not_found() -> None:
    source = "import mpi4py_helpers, torch\nfrom .mpi4py import MPI\nfrom torch import nn\ntorch.distributions"
    for module in ALLOWED:
        assert not violations(module, [("collectives/x.py", source)])
        assert not violations(module, [(f"{ALLOWED[module][0]}", f"import {module}")])


# The modules of each package from the lowest layer to the highest, a folder for all in it that is not named by itself.
# A module imports from its own layer and from lower ones.
LAYERS = {
    "collectives": {
        "errors": "errors",
        "from C": "native",
        "arrays": "base",
        "one process": "process",
        "algorithms as data": "schedules price",
        "memory of a node": "memory",
        "operations in time": "runtime",
        "ways to carry them out": "backends partitioned",
        "messages": "messages",
        "measuring": "timing calibration",
        "groups of ranks": "group",
        "API": "communicator",
        "over it": "__init__ algorithms devices diagnostics draining command_line",
        "programs": "tune bench",
    },
    "mpidl": {
        "base": "version errors absent_state compiling digest engine_arguments lazy_names module_tensors "
        "optional_packages regular_files scratch_file setting_checks standalone trained_by partial_steps "
        "optimizer_trial weight_files",
        "the job": "job",
        "groups of ranks": "mesh",
        "parts of training": "model_files data models nn tensor",
        "parts of engines": "gradients replicas comm_hooks",
        "DDP": "ddp",
        "over DDP": "optim",
        "base of ZeRO": "zero.traffic zero.copy_guard zero.forward_label zero.shard_group zero.placeholder "
        "zero.parameter_shard zero.slices",
        "between steps": "zero.gradients zero.parameters",
        "ZeRO's step": "zero.stepping",
        "its offload": "zero.offload",
        "its states": "zero.states",
        "its parts": "zero.optimizer_parts",
        "what builds them": "zero.construction",
        "what uses them": "zero.methods",
        "ZeRO": "zero",
        "over every engine": "training activations memory checkpoint",
        "programs": "checkpoint.__main__ cli doctor launch memory.__main__ resuming",
        "API": "__init__",
    },
}


def imports_within(package: str, sources: dict[str, str]) -> dict[str, set[str]]:
    """Finds the modules that each module of a package imports, also in functions and for types alone.

    With a module come the folders that it lies in, without those that the importing module lies in itself.

    sources: by the module's path in the package, such as "cuda/task.py". Modules are named without the package, its own
    "__init__".
    """
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in sources}
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        here = [package, *path.split("/")[:-1]]
        names: set[str] = set()
        for node in ast.walk(ast.parse(sources[path])):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                start = here[: len(here) - node.level + 1] if node.level else []
                base = ".".join([*start, *([node.module] if node.module else [])])
                for alias in node.names:  # of modules, else out of one
                    inner = f"{base}.{alias.name}".removeprefix(f"{package}.")
                    names.add(f"{package}.{inner}" if inner in modules else base)
        inside = {"__init__" if name == package else name.removeprefix(f"{package}.") for name in names}
        for name in [name for name in inside if name in modules]:  # Python runs the folders' own modules first
            parts = name.split(".")
            folders = {".".join(parts[:depth]) for depth in range(1, len(parts))}
            inside |= {folder for folder in folders if not f"{module}.".startswith(f"{folder}.")}
        found[module] = {name for name in inside if name in modules} - {module}
    return found


def sources_of(package: str) -> dict[str, str]:
    """The sources of a package, by their paths in it."""
    folder = ROOT / package
    return {path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*.py"))}


def circles(imports: dict[str, set[str]]) -> list[str]:
    """The imports by which a module comes back to itself."""

    @cache
    def reached(start: str) -> frozenset[str]:
        found, new = set(), {start}
        while new:
            new = {other for module in new for other in imports[module]} - found
            found |= new
        return frozenset(found)

    pairs = [(module, other) for module, others in imports.items() for other in sorted(others)]
    return [f"{module} -> {other}" for module, other in pairs if other == module or module in reached(other)]


def between_folders(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """The imports between folders that lie in the same one, at any depth of a package.

    A module next to a folder counts as one. A program in a folder, `__main__`, belongs to none.
    """
    found: dict[str, set[str]] = {}
    for module, others in imports.items():
        for other in others if not module.endswith("__main__") else ():
            mine, theirs = module.split("."), other.split(".")
            pairs = zip(mine, theirs, strict=False)
            shared = next((depth for depth, (a, b) in enumerate(pairs) if a != b), None)
            if shared is not None:
                here, there = ".".join(mine[: shared + 1]), ".".join(theirs[: shared + 1])
                found.setdefault(here, set()).add(there)
                found.setdefault(there, set())
    return found


def layer(package: str, module: str) -> int:
    """The number of a module's layer in its package, by the longest name in LAYERS that fits."""
    named = {name: number for number, names in enumerate(LAYERS[package].values()) for name in names.split()}
    fitting = [name for name in named if f"{module}.".startswith(f"{name}.")]
    assert fitting, f"{package}.{module} is in no layer of tests/test_house.py"
    return named[max(fitting, key=len)]


def upwards(package: str, imports: dict[str, set[str]]) -> list[str]:
    """The imports of a higher layer."""
    pairs = ((module, other) for module, others in imports.items() for other in sorted(others))
    return [f"{module} imports {other}" for module, other in pairs if layer(package, other) > layer(package, module)]


@pytest.mark.parametrize("package", LAYERS)
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    assert not circles(imports_within(package, sources_of(package)))


@pytest.mark.parametrize("package", LAYERS)
def test_no_folders_import_each_other_in_a_circle(package: str) -> None:
    assert not circles(between_folders(imports_within(package, sources_of(package))))


@pytest.mark.parametrize("package", LAYERS)
def test_no_module_imports_a_higher_layer(package: str) -> None:
    assert not upwards(package, imports_within(package, sources_of(package)))


@pytest.mark.parametrize("package", LAYERS)
def test_every_name_in_a_layer_is_a_module_and_stands_once(package: str) -> None:
    names = " ".join(LAYERS[package].values()).split()
    assert set(names) <= set(imports_within(package, sources_of(package)))
    assert len(names) == len(set(names))


def test_circles_and_imports_of_higher_layers_are_found() -> None:
    sources = {
        "__init__.py": "from .communicator import Communicator",
        "communicator.py": "from .base import buffers",
        "base/__init__.py": "",
        "base/buffers.py": "def f():\n    from ..backends.cuda import arrays",
        "backends/cuda/__init__.py": "",
        "backends/cuda/arrays.py": "if TYPE_CHECKING:\n    from ...base.reduction import Reduction",
        "base/reduction.py": "import collectives.base.buffers",
    }
    imports = imports_within("collectives", sources)
    assert imports["__init__"] == {"communicator"}
    assert {"base.buffers -> backends.cuda.arrays", "base.reduction -> base.buffers"} < set(circles(imports))
    assert not any("communicator" in found for found in circles(imports))
    assert "base.buffers imports backends.cuda.arrays" in upwards("collectives", imports)
    assert all(found.startswith("base.buffers imports backends.cuda") for found in upwards("collectives", imports))
    sources["base/buffers.py"] = "import numpy"
    assert not circles(imports_within("collectives", sources))
    sources["base/pages.py"] = "from ..backends.cuda import arrays"
    assert not circles(imports_within("collectives", sources))
    between = between_folders(imports_within("collectives", sources))
    assert sorted(circles(between)) == ["backends -> base", "base -> backends"]
    deep = {
        "ways.of.one": {"ways.for.two"},
        "ways.for.two": set(),
        "ways.for.three": {"ways.of.four"},
        "ways.of.four": set(),
    }
    assert sorted(circles(between_folders(deep))) == ["ways.for -> ways.of", "ways.of -> ways.for"]


PUBLIC = (
    "collectives",
    "collectives.algorithms",
    "collectives.command_line",
    "collectives.devices",
    "collectives.diagnostics",
    "collectives.draining",
    "collectives.price",
)


# Benchmarks that measure a part of `collectives` by itself, and so import it. All may import `collectives.bench`.
MEASURE_A_PART = ("bench_barrier.py", "plot_prices.py")


def exported(module: str) -> set[str]:
    """The names in the `__all__` of a public module."""
    path = ROOT / module.replace(".", "/")
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"{module} has no __all__")


def private_imports(source: str) -> list[str]:
    """Lists the imports of collectives by another source that are not public."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.startswith("collectives.") and a.name not in PUBLIC]
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "collectives":
            given = {f"{node.module}.{alias.name}" for alias in node.names} - set(PUBLIC)
            public = {f"{node.module}.{name}" for name in exported(node.module)} if node.module in PUBLIC else set()
            found += sorted(given - public)
    return found


def test_what_mpidl_and_the_examples_import_of_collectives_is_public() -> None:
    paths = [path for path in FILES if path.relative_to(ROOT).parts[0] in ("mpidl", "examples")]
    found = {path.relative_to(ROOT).as_posix(): private_imports(path.read_text()) for path in paths}
    assert not {path: names for path, names in found.items() if names}


def test_benchmarks_import_what_is_public_but_for_those_that_measure_a_part() -> None:
    paths = [path for path in FILES if path.relative_to(ROOT).parts[0] == "benchmarks"]
    found = {path.name: private_imports(path.read_text()) for path in paths}
    private = [name for name, names in found.items() if not all(n.startswith("collectives.bench.") for n in names)]
    assert sorted(private) == sorted(MEASURE_A_PART)


def test_private_imports_are_found() -> None:
    assert private_imports("from collectives.process.labels import label") == ["collectives.process.labels.label"]
    assert private_imports("def f():\n    from collectives import progress") == ["collectives.progress"]
    assert private_imports("import collectives.runtime.progress") == ["collectives.runtime.progress"]
    assert private_imports("from collectives.devices import Place, torch") == ["collectives.devices.torch"]
    for module in PUBLIC:
        assert not private_imports(f"import {module}\nfrom {module} import {min(exported(module))}")
    assert not private_imports("from collectives import devices\nfrom .collectives import x")


def test_every_module_says_what_it_is() -> None:
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in FILES}
    assert not [path for path, source in sources.items() if source.strip() and not ast.get_docstring(ast.parse(source))]


# Words that are not used, as CONTRIBUTING.md lists them.
FORBIDDEN = "somebody, nobody, whoever, let go, is through, apart, alike, beside, as ever, on the way"
_FORBIDDEN = re.compile(rf"\b(?:{FORBIDDEN.replace(', ', '|')})\b".replace(" ", r"\s+(?:#\s+)?"), re.IGNORECASE)
_BEGINNING = re.compile(r"(?:What|Whether|Of|As|See|The same)\b")
_NO_PHRASE = re.compile(r"(?:How|Where|With|Either|Never|For|Those)\b")  # of a test it may go on from the name

# By the start of a path, what may stand there all the same.
KEPT = {
    "mpidl/checkpoint/": r"""["']apart["']""",  # a key in the format of checkpoints
    "docs/checkpoint.md": "`apart`",  # its row in the table of the format
    "CONTRIBUTING.md": FORBIDDEN,  # the list itself
}


def wrong_beginnings(source: str, *more: re.Pattern[str]) -> list[str]:
    """The first lines of a source's docstrings that begin neither with a verb nor with a noun phrase."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return [text.partition("\n")[0] for text in texts if any(wrong.match(text) for wrong in (_BEGINNING, *more))]


_PARAMETER = re.compile(r"(?:^|(?<=[.;] ))(\w+(?:, \w+)*): ")


def crowded_lines(source: str) -> list[str]:
    """The lines of a source's docstrings in which the meanings of several parameters, or fields, stand."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names = {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}
            if isinstance(node, ast.ClassDef):
                names |= {part.target.id for part in node.body if isinstance(getattr(part, "target", None), ast.Name)}
            for line in (ast.get_docstring(node) or "").splitlines():
                told = [names.issuperset(each[1].split(", ")) for each in _PARAMETER.finditer(line.strip())]
                if sum(told) > 1:
                    found.append(line.strip())
    return found


def forbidden(path: str, text: str) -> list[str]:
    """The words of a file that are not used, but for those that KEPT allows in it."""
    for begin, kept in KEPT.items():
        if path.startswith(begin):
            text = re.sub(kept, "", text)
    return _FORBIDDEN.findall(text)


def outside_tests(*more: Path) -> dict[str, str]:
    """The texts of the packages' sources, of the examples and benchmarks, and of more files, by their paths."""
    paths = [*(path for path in FILES if path.relative_to(ROOT).parts[0] != "tests"), *more]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def test_docstrings_begin_with_a_verb_or_a_noun_phrase() -> None:
    found = {path.relative_to(ROOT).as_posix(): wrong_beginnings(path.read_text()) for path in FILES}
    found |= {path: wrong_beginnings(text, _NO_PHRASE) for path, text in outside_tests().items()}
    assert not {path: lines for path, lines in found.items() if lines}


def test_parameters_stand_one_a_line() -> None:
    found = {path: crowded_lines(text) for path, text in outside_tests().items()}
    assert not {path: lines for path, lines in found.items() if lines}


def test_words_that_contributing_forbids_are_not_used() -> None:
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile")]
    in_c = (ROOT / "collectives" / "native").glob("*.[ch]")
    texts = outside_tests(*pages, *sorted((ROOT / "docs").glob("*.md")), *sorted(in_c))
    assert FORBIDDEN in texts["CONTRIBUTING.md"]
    found = {path: forbidden(path, text) for path, text in texts.items()}
    assert not {path: words for path, words in found.items() if words}


def test_beginnings_and_words_that_are_forbidden_are_found() -> None:
    source = '"""What it is."""\nclass A:\n    """The same.\n\n    x"""\n    def f(self):\n        """Asks."""\n'
    assert wrong_beginnings(source) == ["What it is.", "The same."]
    assert wrong_beginnings('"""With one."""\n', _NO_PHRASE) == ["With one."]
    assert forbidden("mpidl/x.py", "Besides, one is\n# through. Nobody") == ["is\n# through", "Nobody"]
    assert forbidden("mpidl/checkpoint/x.py", "told['apart'], apart") == ["apart"]


def unnamed(folder: Path) -> list[str]:
    """The modules and folders in a folder that the docstring of its `__init__` does not name."""
    entries = [path for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
    names = {path.stem for path in entries} - {"__init__", "__main__"}
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    return sorted(names - set(re.findall(r"\w+", said))) if len(names) > 3 else []


@pytest.mark.parametrize(("package", "folders"), [("collectives", 15), ("mpidl", 20)])
def test_a_folder_s_docstring_is_a_map_of_it(package: str, folders: int) -> None:
    found = [path.parent for path in sorted((ROOT / package).rglob("__init__.py"))]
    assert len(found) >= folders
    assert not {folder.relative_to(ROOT): missing for folder in found if (missing := unnamed(folder))}


def test_what_a_map_leaves_out_is_found(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "c.py", "__main__.py"):
        (tmp_path / name).touch()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "__init__.py").touch()
    (tmp_path / "__init__.py").write_text('"""A map.\n\na   one\nb   two\n"""\n')
    assert unnamed(tmp_path) == ["c", "d"]


# How often the tests reach into private parts of `collectives` and `mpidl`, where nothing public says as much or forces
# as rare a case. To be lowered with each that goes.
PRIVATE_REACHES = 24

# Private names of torch's classes, which ours have too.
_OF_TORCH = (
    "_buffers",
    "_modules",
    "_parameters",
    "_set_params_and_buffers_to_ignore_for_model",
    "_set_static_graph",
)

# Objects of the tests: the GPUs that stand in for real ones and what they make, and pytest's terminal.
_OF_TESTS = ("self", "cls", "super()", "cuda", "event", "made._show", "standin", "config.get_terminal_writer()")


def private_names(source: str) -> set[str]:
    """The names with one underscore that a source defines: functions, classes, variables, attributes of `self`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def private_reaches(source: str, names: set[str]) -> list[str]:
    """The uses in a source of attributes with these names, as `comm._issuer`, but for those of torch and of tests."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute) and node.attr in names]
    found = [(ast.unparse(node.value), ast.unparse(node)) for node in nodes if node.attr not in _OF_TORCH]
    return sorted(text for owner, text in found if owner not in _OF_TESTS and text not in _OF_TESTS)


def test_tests_reach_into_no_more_private_parts() -> None:
    names = set().union(*(private_names(text) for package in LAYERS for text in sources_of(package).values()))
    found = {path: private_reaches(text, names) for path, text in sources_of("tests").items()}
    found = {path: texts for path, texts in found.items() if texts}
    assert sum(map(len, found.values())) <= PRIVATE_REACHES, found


def test_private_reaches_are_found() -> None:
    names = private_names("_LIMIT = 3\nclass A:\n    def __init__(self):\n        self._issuer = self.x = _f()\n")
    assert names == {"_LIMIT", "_issuer"}
    assert private_reaches("comm._issuer.issued, module._LIMIT, self._issuer, model._modules", names) == [
        "comm._issuer",
        "module._LIMIT",
    ]
