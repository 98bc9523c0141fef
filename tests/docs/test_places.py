"""Files, classes, functions and names that README, CONTRIBUTING and docs name are there."""

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
