"""Takes away the names under which an MPI library would leave memory behind when a job is killed.

MPICH keeps the file of its shared memory, /dev/shm/mpich_shm_..., until MPI_Finalize. A job that is aborted or killed
never comes there, and each leaves some megabytes for good. Once every rank of the node has mapped the file, its name is
of no use any more: without it, the memory goes with the last process, however that ends.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

_MAPPED = re.compile(r" (/dev/shm/mpich_shm_\w+)( \(deleted\))?$", re.MULTILINE)


def mapped(process: int | str = "self") -> dict[str, bool]:
    """MPICH's files that a process has mapped, and whether they still have their names; empty where that is unknown."""
    try:
        text = Path(f"/proc/{process}/maps").read_text()
    except OSError:
        return {}
    return {path: not gone for path, gone in _MAPPED.findall(text)}


def remove_names() -> None:
    """Removes the names of what this process has mapped. Once all of its node have come through MPI_Init."""
    for path in mapped():
        with contextlib.suppress(OSError):
            Path(path).unlink()
