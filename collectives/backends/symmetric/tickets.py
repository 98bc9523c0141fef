"""Tickets that share out work among ranks: each number is drawn by one rank only, the first to come."""

from __future__ import annotations

import fcntl

import numpy as np

from ...memory.shared_memory import SharedMemory


class Tickets:
    """The next number of a node's ranks, which only grows.

    memory: shared by them, zero at first, with a file.
    start: the byte of it at which the number is; there are 8.

    A rank locks these bytes of the file while it draws. The system frees the lock of a rank that dies, and no window of
    MPI's is needed, which every rank would have to give back at once.
    """

    def __init__(self, memory: SharedMemory, start: int) -> None:
        self._memory, self._start = memory, start
        self._next = memory.view(0, start, 1, np.dtype(np.int64))

    def draw(self, first: int) -> int:
        """The next number from `first` on."""
        file, start = self._memory.file, self._start
        fcntl.lockf(file, fcntl.LOCK_EX, 8, start)
        try:
            number = max(int(self._next[0]), first)
            self._next[0] = number + 1
        finally:
            fcntl.lockf(file, fcntl.LOCK_UN, 8, start)
        return number
