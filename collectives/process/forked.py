"""Forked children of a rank, in which every operation is refused, as MPI belongs to the parent.

A child has all that its parent has in memory, such as its Communicators, MPI's connections and the memory that the
node's ranks share, and none of its threads. The other ranks would take a collective of the child for one of its parent,
and MPI_Finalize, which mpi4py calls where Python ends, waits for ranks that wait for the parent.

So in a child every operation raises OperationError, closing does nothing, and the process exits where Python would go
on to MPI_Finalize, after what was registered with `atexit` since this module was imported. Its status is that of
`sys.exit`, 1 after an exception that is not caught, else 0; a SystemExit that is raised otherwise is not seen.
`os._exit`, by which processes of `multiprocessing` end, never comes there.

Memory is not protected: what a child writes to symmetric memory, its parent and the other ranks see.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import Any

from mpi4py import MPI

from ..errors import OperationError
from . import exit_status

_of_parent = ""  # says of which process this one is a child
_uncaught_before: Any = None


def is_forked() -> bool:
    """Returns whether this is a forked child of a rank."""
    return bool(_of_parent)


def refuse_if_forked(what: str) -> None:
    """Raises OperationError in a forked child of a rank."""
    if _of_parent:
        raise OperationError(f"{what}: {refusal_reason()}")


def refusal_reason() -> str:
    """The reason for which a forked child is refused an operation."""
    return f"{_of_parent}, and MPI is the parent's alone; needs to be called there"


def _become_child() -> None:
    global _of_parent, _uncaught_before
    if is_forked() or not MPI.Is_initialized() or MPI.Is_finalized():
        return
    _of_parent = f"this process was forked from rank {MPI.COMM_WORLD.rank}"
    _uncaught_before = getattr(sys, "last_value", None)
    exit_status.note(0)
    exit_status.watch_sys_exit()


@atexit.register
def _end_without_mpi() -> None:
    """Ends a forked child before Python comes to MPI_Finalize."""
    if not is_forked():
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or without a reader
            stream.flush()
    has_failed = getattr(sys, "last_value", None) is not _uncaught_before
    os._exit(1 if has_failed else exit_status.noted())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_become_child)
