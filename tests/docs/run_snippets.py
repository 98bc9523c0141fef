"""Runs snippets of the docs under mpirun, each in a namespace of its own; prints the traceback of a failure.

A rank that has run a snippet leaves a file `NAME-PID.ok` in the folder.

Usage: run_snippets.py FOLDER NAME...    FOLDER: where the snippets write files, the same on every rank.
"""

import os
import sys
import traceback
from pathlib import Path

from tests.docs.settings import AFTER, COMMON, SETTINGS
from tests.docs.snippets import ROOT, Snippet, snippets


def run(snippet: Snippet) -> None:
    """Executes a snippet between its setting and its check. Raises what it raises."""
    namespace = {"__name__": "snippet"}
    exec(compile(COMMON + SETTINGS.get(snippet.name, ""), f"<setting of {snippet.name}>", "exec"), namespace)
    placed = "\n" * (snippet.line - 1) + snippet.source
    exec(compile(placed, str(snippet.page.relative_to(ROOT)), "exec"), namespace)
    exec(compile(AFTER.get(snippet.name, ""), f"<check of {snippet.name}>", "exec"), namespace)


def main(folder: Path, names: list[str]) -> int:
    """Runs the snippets of these names in their order. Returns the exit status; ends at the first failure."""
    found = {snippet.name: snippet for snippet in snippets("python")}
    for name in names:
        (folder / name).mkdir(exist_ok=True)
        os.chdir(folder / name)
        try:
            run(found[name])
        except BaseException:
            print(f"failed {name}\n{traceback.format_exc()}", flush=True)
            return 1
        (folder / f"{name}-{os.getpid()}.ok").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
