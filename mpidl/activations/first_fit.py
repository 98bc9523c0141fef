"""First-fit allocator of a run of bytes: takes the first free slot that is large enough; slots return in any order.

    [ ## taken ## | free | # taken # | free ............ ]

Checkpoints are given back in the reverse of the order in which they came, so that there are hardly ever gaps.
"""

from __future__ import annotations

import math
from bisect import insort

_ALIGNMENT = 64  # a cache line, and more than any dtype needs


def aligned(nbytes: int) -> int:
    """Rounds bytes up to whole cache lines, at least one."""
    return max(1, -(-nbytes // _ALIGNMENT)) * _ALIGNMENT


class Space:
    """The slots in a run of bytes.

    capacity: bytes, or infinite.
    used: bytes that are taken.
    """

    def __init__(self, capacity: float = math.inf) -> None:
        self.capacity = capacity
        self.used = 0
        self._taken: list[tuple[int, int]] = []  # (start, end), in order

    def take(self, nbytes: int) -> int | None:
        """The start of the first free slot of `aligned(nbytes)` bytes; None if there is none."""
        size, start = aligned(nbytes), 0
        for begin, end in self._taken:
            if start + size <= begin:
                break
            start = end
        if start + size > self.capacity:
            return None
        insort(self._taken, (start, start + size))
        self.used += size
        return start

    def give_back(self, start: int) -> None:
        """Frees the slot that starts there."""
        number = next(n for n, (begin, _) in enumerate(self._taken) if begin == start)
        begin, end = self._taken.pop(number)
        self.used -= end - begin
