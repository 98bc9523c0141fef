"""Prints what programs say with `--help`, as JSON: each in a child of this process, which has imported torch for all.

Usage: help_texts.py PROGRAMS    PROGRAMS: JSON, a list of the arguments of `python` for each.

MPI is not yet initialised as the children are forked, two of which run at a time.
"""

import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path

import torch  # noqa: F401  for the children

_AT_ONCE = 2


def say_help(program: list[str]) -> int:
    """Runs `python PROGRAM --help` in this process. Returns its status."""
    is_module = program[0] == "-m"
    sys.argv = [*program[is_module:], "--help"]
    sys.path[0] = os.getcwd() if is_module else str(Path(program[0]).parent)
    try:
        if is_module:
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def start(program: list[str], output: Path) -> int:
    """Forks a child that writes the text there. Returns its process id."""
    child = os.fork()
    if child == 0:
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            status = say_help(program)
            sys.stdout.flush()
            os._exit(status)
    return child


def main(programs: list[list[str]], folder: Path) -> list[tuple[int, str]]:
    """Status and text of each."""
    children: list[int] = []
    statuses: dict[int, int] = {}
    for number, program in enumerate(programs):
        if len(children) - len(statuses) == _AT_ONCE:
            statuses.update([os.wait()])
        children.append(start(program, folder / str(number)))
    while len(statuses) < len(children):
        statuses.update([os.wait()])
    codes = [os.waitstatus_to_exitcode(statuses[child]) for child in children]
    return [(code, (folder / str(number)).read_text()) for number, code in enumerate(codes)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        print(json.dumps(main(json.loads(sys.argv[1]), Path(made))))
