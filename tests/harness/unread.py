"""Files of tests that a run need not import, as their text says that it would leave all their tests out.

Half of the files have tests of one kind only. To import them all takes each rank of a run several seconds. A file that
is named on the command line is read in any case.
"""

import ast
import re
from pathlib import Path

MPI = "pytest.mark.mpi"  # also in `pytest.mark.mpi(min_size=2)`
_ALL_MPI = re.compile(r"^pytestmark = (?:\[\s*)?pytest\.mark\.mpi\b", re.MULTILINE)


def has_nothing_for(path: Path, under_mpi: bool) -> bool:
    """Returns True where no test of a file is marked `mpi` and those are to run, or all are and the others are to."""
    if path.suffix != ".py" or not path.name.startswith("test_"):
        return False
    text = path.read_text(encoding="utf-8")
    return MPI not in text if under_mpi else marks_all(text)


def marks_all(text: str) -> bool:
    """Returns True where a module marks all its tests `mpi`; a module that stands in a string of it does not count."""
    found = _ALL_MPI.search(text)
    if found is None:
        return False
    line = text.count("\n", 0, found.start()) + 1
    return any(isinstance(node, ast.Assign) and node.lineno == line for node in ast.parse(text).body)
