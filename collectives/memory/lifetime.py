"""Keeps memory for the rest of the process, as MPI or another rank may still write to it."""

from __future__ import annotations

import ctypes
from typing import Any


def keep_for_ever(kept: Any) -> None:
    """Keeps an object, and what it refers to, beyond the end of the interpreter, after which MPI_Finalize comes."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
