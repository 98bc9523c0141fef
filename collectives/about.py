"""What the MPI library says of itself."""

from __future__ import annotations

import ctypes
from typing import Any

from mpi4py import MPI

_LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}


def about_mpi() -> dict[str, Any]:
    """vendor, version and description of the library, the standard, the level of threads, awareness of CUDA."""
    vendor, version = MPI.get_vendor()
    return {
        "vendor": vendor,
        "version": ".".join(map(str, version)),
        "library": " ".join(MPI.Get_library_version().split("\n")[0].split()),
        "standard": ".".join(map(str, MPI.Get_version())),
        "threads": _LEVELS[MPI.Query_thread()],
        "cuda_aware": cuda_aware(),
    }


def cuda_aware() -> bool | None:
    """Whether the library takes GPU memory; None if it does not tell: only some have MPIX_Query_cuda_support."""
    try:
        return bool(ctypes.CDLL(None).MPIX_Query_cuda_support())
    except (AttributeError, OSError):
        return None
