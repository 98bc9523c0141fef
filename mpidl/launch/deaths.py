"""Which process ended first, of those that end within milliseconds of each other.

When a rank is killed its launcher kills the others, and MPICH's then names any of them as the one. The system reports
the ends of processes in their order, also to somebody who asks later (epoll on descriptors of processes):

    rank 1 is killed -> mpirun kills ranks 0 and 2 -> `look`: 1, 0, 2
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import time
from collections.abc import Container

_TOGETHER = 1.0  # seconds: who ends longer before another has nothing to do with it


class Deaths:
    """Watches processes. To `look` now and then, and once after they have ended; nothing is known without Linux."""

    def __init__(self) -> None:
        self._open = getattr(os, "pidfd_open", None)
        self._ready = select.epoll() if self._open and hasattr(select, "epoll") else None
        self._watched: dict[int, int] = {}  # process ids by descriptors
        self._ended: dict[int, float] = {}  # in their order, with the time by which they had ended

    def watch(self, process: int) -> None:
        """From now on."""
        with contextlib.suppress(OSError):  # it has ended before, or the system has no such descriptors
            if self._ready is not None and self._open is not None:
                number = self._open(process)
                self._watched[number] = process
                self._ready.register(number, select.EPOLLIN)

    def look(self) -> None:
        """Takes note of those that have ended."""
        for number, _ in self._ready.poll(0) if self._watched and self._ready is not None else ():
            self._ended[self._watched.pop(number)] = time.monotonic()
            os.close(number)

    def before(self, process: int, among: Container[int]) -> int:
        """Of some processes, the one that ended first of those that did together with this one: maybe itself."""
        since = self._ended.get(process, math.inf) - _TOGETHER
        return next((pid for pid, ended in self._ended.items() if ended > since and pid in among), process)

    def close(self) -> None:
        """Watches no longer; what is known stays."""
        for number in self._watched:
            os.close(number)
        self._watched = {}
        if self._ready is not None:
            self._ready.close()
            self._ready = None
