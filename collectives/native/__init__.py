"""Steps of every operation in C, where they could be compiled as this package was installed.

    signature           arrays.c        the look at an array by which a prepared operation is found again
    AtOnce              at_once.c       the issue of an operation that runs in the caller's thread
    Numbers             numbers.c       how the ranks of a node tell each other how far they are, and wait for it
    MpiCall             mpi_call.c      a blocking collective of the MPI library
    OneCopy             one_copy.c      a collective through shared memory that is made again: the meeting, the steps
    Shortcut            shortcut.c      a method of Communicator that finds an operation again by its arguments

Python's own part of an operation is as long as a message of a few KiB takes, and several times as long where other work
has taken the caches meanwhile. Each of these has a twin in Python that does the same: `base.buffers.signature`,
`group.issue.Issuer.prepare`, `memory.counters`, `backends.mpi`, `backends.symmetric.operation`, the method itself. The
twins run where there was no C compiler, and with MPIDL_NATIVE=0.

compiled: the module of these; None where it cannot be used.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

VERSION = 4  # of module.c; a module that was compiled from other sources than these is not used


def load() -> ModuleType | None:
    """Imports the part in C; None where there is none, or where it is turned off."""
    if os.environ.get("MPIDL_NATIVE", "1") == "0":
        return None
    try:
        module = importlib.import_module(".compiled", __name__)
    except ImportError:
        return None
    return module if module.VERSION == VERSION else None


compiled = load()


def is_compiled() -> bool:
    """Returns whether the part in C is used."""
    return compiled is not None
