"""The name and version of the MPI library."""

from __future__ import annotations

import contextlib
import ctypes
import re
from pathlib import Path
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
    """Returns whether the library takes GPU memory; None if it does not tell: only some have MPIX_Query_cuda_support.

    Python loads extensions so that their symbols, and the library's, are none of the process's: they are asked by name.
    """
    for name in (None, MPI.__file__, *_mapped_libraries()):
        with contextlib.suppress(AttributeError, OSError):
            return bool(ctypes.CDLL(name).MPIX_Query_cuda_support())
    return None


def _mapped_libraries() -> list[str]:
    """MPI libraries that this process has loaded, by their paths."""
    try:
        text = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return sorted(set(re.findall(r"/\S*/libmpi[^/\s]*\.so\S*", text)))
