"""Names in snippets are defined on their page before, or told to be the reader's own; tests see every block."""

from __future__ import annotations

import builtins
import re
import symtable
from collections.abc import Iterable, Iterator

import pytest

from .snippets import PAGES, ROOT, Snippet, snippets

_COMMAND = re.compile(r"(?:mpirun|srun|sbatch|python3?|pip|make|export) ")
_FILE = re.compile(r"\b(?:examples|benchmarks|tests|docs)/[\w/.]+\.(?:py|sh)\b")


def names_of(source: str) -> tuple[set[str], set[str]]:
    """The names that a source takes from outside, and those that it defines."""
    top = symtable.symtable(source, "snippet", "exec")
    defined = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}

    def taken(table: symtable.SymbolTable) -> Iterator[str]:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (table is top or symbol.is_global()):
                yield symbol.get_name()
        for inner in table.get_children():
            yield from taken(inner)

    return {name for name in taken(top) if name not in defined and not hasattr(builtins, name)}, defined


def undefined(found: Iterable[Snippet], own: set[str]) -> list[str]:
    """The places where snippets use a name that no earlier one of their page defines, and that is not in `own`."""
    defined: dict[str, set[str]] = {}
    missing = []
    for snippet in found:
        known = defined.setdefault(snippet.page.name, set())
        taken, new = names_of(snippet.source)
        missing += [f"{snippet.page.name}:{snippet.line}: {name}" for name in sorted(taken - known - own)]
        known |= new
    return missing


def of_the_reader() -> set[str]:
    """The names that docs/index.md says are the reader's own."""
    text = (ROOT / "docs" / "index.md").read_text().partition("From your own program")[2].partition("\n|")[0]
    return set(re.findall(r"`(\w+)`", text))


def test_names_that_nothing_defines_are_found() -> None:
    page = ROOT / "README.md"
    first = Snippet("a-1", page, 1, "import json\ndef f(x):\n    return np.abs(x) + model(x)\ny = len(f(1))\n")
    second = Snippet("a-2", page, 9, "print(y, json.dumps(z), [w for w in range(3)], f)\n")
    other = Snippet("b-1", ROOT / "CONTRIBUTING.md", 1, "json.dumps(1)\n")
    missing = undefined([first, second, other], {"model"})
    assert missing == ["README.md:1: np", "README.md:9: z", "CONTRIBUTING.md:1: json"]


def test_pages_define_or_import_what_their_snippets_use() -> None:
    own = of_the_reader()
    assert {"model", "optimizer", "MyModel"} <= own
    assert not undefined(snippets("python"), own)
    taken = {name for snippet in snippets("python") for name in names_of(snippet.source)[0]}
    assert not own - taken, "docs/index.md names what no snippet takes"


def unseen(text: str) -> list[str]:
    """The lines of indented blocks, and the commands in blocks without a language: no test looks at them."""
    lines, fence, before = [], None, ""
    for line in text.splitlines():
        if line.strip().startswith("```"):
            fence = line.strip() if fence is None else None
        elif fence == "```":
            lines += [line] if _COMMAND.match(line) else []
        elif fence is None and line.startswith("    ") and (not before.strip() or before in lines):
            lines.append(line)
        before = line
    return lines


def test_unseen_blocks_are_found() -> None:
    text = "a\n\n    make x\n      y\nb\n- c\n    d\n```\nmake z\n    e\n```\n```sh\nmake w\n```\n"
    assert unseen(text) == ["    make x", "      y", "make z"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_says_its_language(page) -> None:
    assert not unseen(page.read_text())


def test_files_that_commands_name_are_there() -> None:
    named = {name for snippet in snippets("sh") for name in _FILE.findall(snippet.source)}
    assert {"examples/slurm/one_node.sh", "tests/hosts.py"} <= named
    assert not [name for name in named if not (ROOT / name).is_file()]
