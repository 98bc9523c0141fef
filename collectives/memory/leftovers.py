"""Removes the names under which an MPI library would leave memory behind when a job is killed.

MPICH keeps the file of its shared memory, /dev/shm/mpich_shm_..., until MPI_Finalize. A job that is aborted or killed
never comes there, and each leaves some megabytes for good. Once every rank of the node has mapped the file, its name is
of no use any more: without it, the memory goes with the last process, however that ends.

Open MPI's files, /dev/shm/sm_segment..., must keep theirs: ranks map each other's when they first talk. Its mpirun
removes them, and where that is killed too, a process that has seen them mapped.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

_MPICH_FILES = re.compile(r" (/dev/shm/mpich_shm_\w+)( \(deleted\))?$", re.MULTILINE)
_OPEN_MPI_FILES = re.compile(r" (/dev/shm/sm_segment\.\S+)( \(deleted\))?$", re.MULTILINE)


def mapped(process: int | str = "self", open_mpi: bool = False) -> dict[str, bool]:
    """Lists the files of the MPI library's shared memory that a process has mapped, and whether they have their names.

    open_mpi: also those of Open MPI.
    """
    try:
        text = Path(f"/proc/{process}/maps").read_text()
    except OSError:
        return {}
    found = _MPICH_FILES.findall(text) + (_OPEN_MPI_FILES.findall(text) if open_mpi else [])
    return {path: not gone for path, gone in found}


def remove_names() -> None:
    """Removes the names of what this process has mapped. Once all of its node have come through MPI_Init."""
    for path in mapped():
        with contextlib.suppress(OSError):
            Path(path).unlink()
