"""Files of tests that a run need not import, as their text says that it would leave all their tests out.

Half of the files have tests of one kind only. To import them all takes each rank of a run several seconds. A file that
is named on the command line is read in any case.
"""

import re
from pathlib import Path

MPI = "pytest.mark.mpi"  # also in `pytest.mark.mpi(min_size=2)`
_ALL_MPI = re.compile(r"^pytestmark = (?:\[\s*)?pytest\.mark\.mpi\b", re.MULTILINE)


def has_nothing_for(path: Path, under_mpi: bool) -> bool:
    """Returns True where no test of a file is marked `mpi` and those are to run, or all are and the others are to."""
    if path.suffix != ".py" or not path.name.startswith("test_"):
        return False
    text = path.read_text(encoding="utf-8")
    return MPI not in text if under_mpi else _ALL_MPI.search(text) is not None
