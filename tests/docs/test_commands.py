"""Programs and targets of make that README, CONTRIBUTING and docs start are there, with the options that they give."""

import json
import re
import subprocess
import sys

import pytest

from tests.harness.launch import environment

from .commands import Started, programs
from .snippets import PAGES, ROOT, Snippet, snippets

_OPTION = re.compile(r"--[a-z][\w-]*")
_MAKE = re.compile(r"^make ([a-z-]+)|`make ([a-z-]+)", re.MULTILINE)


def help_of(programs: list[tuple[str, ...]]) -> list[str]:
    """The texts of `python PROGRAM --help`."""
    command = [sys.executable, "-m", "tests.docs.help_texts", json.dumps(programs)]
    ran = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    texts = []
    for program, (status, text) in zip(programs, json.loads(ran.stdout), strict=True):
        assert status == 0, f"{program}: {text}"
        texts.append(text)
    return texts


def test_commands_are_found_inside_others_and_through_variables() -> None:
    source = 'RUN="mpirun -n 2 python a.py"\npython train.py --w && python -m b.c --x 1 -- \\\n  $RUN --y=3 # --z\n'
    found = programs(Snippet("page-1", ROOT / "README.md", 1, source))
    assert found == [Started(("-m", "b.c"), ["--x"]), Started(("a.py",), ["--y=3"])]


@pytest.mark.limit(300)  # starts every program
def test_programs_have_the_options_that_the_docs_give_them() -> None:
    started = [(snippet, program) for snippet in snippets("sh") for program in programs(snippet)]
    assert len(started) > 30
    names = sorted({program.program for _, program in started})
    known = {name: set(_OPTION.findall(text)) for name, text in zip(names, help_of(names), strict=True)}
    unknown = [
        f"{snippet.page.name}:{snippet.line}: {' '.join(program.program)} has no {option}"
        for snippet, program in started
        for option in program.options
        if option.partition("=")[0] not in known[program.program]
    ]
    assert not unknown


def test_make_has_the_targets_that_the_docs_name() -> None:
    known = re.findall(r"^([a-z-]+(?: [a-z-]+)*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = {name for page in PAGES for pair in _MAKE.findall(page.read_text()) for name in pair if name}
    assert len(named) > 5
    assert not named - {name for names in known for name in names.split()}
