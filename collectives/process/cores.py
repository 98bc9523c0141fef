"""The cores that this process may use, and the one that a thread is on."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable


def usable() -> set[int]:
    """The numbers of the cores that this thread may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _find_current() -> Callable[[], int] | None:
    # A PyDLL's functions keep the lock of the interpreter: this one takes a fraction of a microsecond.
    with contextlib.suppress(AttributeError, OSError, TypeError):
        return ctypes.PyDLL(None).sched_getcpu
    return None


_current = _find_current()


def current() -> int:
    """The core that this thread is on; -1 where the system does not tell."""
    return -1 if _current is None else _current()


def pin_thread(core: int) -> None:
    """Binds this thread to one core, if the system can do that and lets it; -1: leaves it as it is."""
    if core >= 0 and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {core})
