"""Files, classes, functions and names that README, CONTRIBUTING and docs name are there; lists in docs are whole."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from .snippets import PAGES, ROOT
from .test_links import prose

_PLACE = re.compile(r"`((?:collectives|mpidl|examples|benchmarks|tests)/[\w/]*\.py)(?::([\w.]+))?`")


@cache
def defined(path: Path) -> frozenset[str]:
    """The names that a module defines, those in classes as Class.name."""
    return frozenset(_names(ast.parse(path.read_text()).body, ""))


def _names(body: list[ast.stmt], before: str) -> list[str]:
    found: list[str] = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append(before + node.name)
        if isinstance(node, ast.ClassDef):
            found += _names(node.body, f"{before}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [before + target.id for target in targets if isinstance(target, ast.Name)]
    return found


def missing(text: str, root: Path = ROOT) -> list[str]:
    """The places that a text names as `file` or `file:name`, and that are not there."""
    return [
        f"{file}:{name}" if name else file
        for file, name in _PLACE.findall(text)
        if not (root / file).is_file() or (name and name not in defined(root / file))
    ]


def test_places_that_are_not_there_are_found(tmp_path: Path) -> None:
    (tmp_path / "mpidl").mkdir()
    (tmp_path / "mpidl" / "a.py").write_text("X: int = 1\nclass A:\n    y = 2\n    def f(self): ...\ndef g(): ...\n")
    there = "`mpidl/a.py` `mpidl/a.py:A` `mpidl/a.py:A.f` `mpidl/a.py:A.y` `mpidl/a.py:g` `mpidl/a.py:X` `other/b.py:c`"
    gone = ["mpidl/b.py", "mpidl/a.py:f", "mpidl/a.py:A.g"]
    assert missing(there, tmp_path) == []
    assert missing(" ".join(f"`{place}`" for place in gone), tmp_path) == gone


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_places_that_a_page_names_are_there(page: Path) -> None:
    assert not missing(prose(page.read_text()))


PACKAGES = ("collectives", "mpidl")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def section(page: str, heading: str) -> str:
    """The text of a page from a heading to the next one of its level."""
    return page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def threads(source: str) -> list[str]:
    """The names of the threads that a module starts; "" for one without a name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            kind = ast.unparse(node.func).rpartition(".")[2]
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            if kind == "Thread":
                found.append(given.get("name"))
            elif kind == "ThreadPoolExecutor":
                found.append(given.get("thread_name_prefix", node.args[1] if len(node.args) > 1 else None))
    return ["" if name is None else str(ast.literal_eval(name)) for name in found]


def test_the_threads_of_a_module_are_found() -> None:
    source = "a = Thread(f, name='x-a')\nb = futures.ThreadPoolExecutor(1, 'x-b')\nc = threading.Thread(target=f)\n"
    source += "ThreadPoolExecutor(max_workers=2)\nd: Thread | None = ThreadPoolExecutor(thread_name_prefix='x-d')\n"
    assert sorted(threads(source)) == ["", "", "x-a", "x-b", "x-d"]


def test_the_tables_of_threads_have_every_thread_of_the_packages() -> None:
    text = section(ARCHITECTURE, "Threads, and the collectives that they run")
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = {path.relative_to(ROOT).as_posix(): threads(path.read_text()) for path in paths}
    assert {name for cell in cells for name in re.findall(r"`(mpidl-[\w-]+)`", cell)} == {
        name for names in found.values() for name in names if name
    }
    assert not [path for path, names in found.items() if "" in names and f"`{path}:" not in text]


def folders_in(tree: str) -> set[str]:
    """The folders that a tree of names shows, as paths.

    Two spaces are a level. A folder lies in those of the last line that is a level higher.
    """
    found: set[str] = set()
    levels: list[list[str]] = [[""]]
    for line in tree.splitlines():
        level = (len(line) - len(line.lstrip())) // 2
        names = re.findall(r"(?<![\w/])\w+/(?![\w/])", line)
        levels[level + 1 :] = [[outer + name for outer in levels[level] for name in names]]
        found |= {path.rstrip("/") for path in levels[-1]}
    return found


def test_folders_in_a_tree_are_found_where_they_lie() -> None:
    tree = "a/    of a\n  b/, c     text\n    d/   e/ text\n  f    g\nh/   x of b/y\n  b/"
    assert folders_in(tree) == {"a", "a/b", "a/b/d", "a/b/e", "h", "h/b"}


def test_the_tree_of_the_packages_has_every_folder() -> None:
    shown = folders_in(section(ARCHITECTURE, "Where what is"))
    inits = [path for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")]
    there = {path.parent.relative_to(ROOT).as_posix() for path in inits}
    assert {path for path in shown if path.startswith(PACKAGES)} == there


def test_the_page_of_benchmarks_has_every_program_and_every_module_that_is_none() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    sources = {path.name: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    programs = {name for name, source in sources.items() if 'if __name__ == "__main__"' in source}
    table, _, below = page.partition("\nThe other files in `benchmarks/`")
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+\.py)`", row)} == programs
    assert set(re.findall(r"`(\w+\.py)`", below.partition("\n\n")[0])) == sources.keys() - programs
