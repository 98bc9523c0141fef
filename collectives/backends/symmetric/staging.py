"""The staged way of the one-copy collectives: through a scratch of symmetric memory, chunk by chunk.

It is a pipeline. At any time one chunk is being copied in, the one before is being worked on, and the one before that
is being copied out, each in a buffer of its own; one barrier ends all three:

    copy in     |   A     |   B     |   C     |   A     |
    work        |         |   A     |   B     |   C     |
    copy out    |         |         |   A     |   B     |
                     barrier   barrier   barrier

The first chunk is copied in before the ranks meet, and the meeting is its barrier. The last copy out needs none: the
next operation begins with the next buffer, and by its second chunk all ranks have been at its meeting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...base.buffers import DType
from ...errors import OperationError
from ...memory.shared_memory import Allocator, SharedMemory
from ..meeting import Meetings

Array = np.ndarray[Any, Any]

_BUFFERS = 3


@dataclass(slots=True)
class Stages:
    """The steps done with each chunk, one after the other: step(chunk, every rank's buffer for it)."""

    chunks: int
    steps: list[Callable[[int, list[Array]], None]]


class Staging:
    """The scratch of one group, and its pipeline. All methods but `fill` are collective.

    chunk_bytes: of scratch, a rank and buffer.
    """

    def __init__(self, meetings: Meetings, allocator: Allocator, chunk_bytes: int) -> None:
        self._meetings = meetings
        self.chunk_bytes = chunk_bytes
        self._allocator = allocator
        self._memory: SharedMemory | None = None
        self._views: dict[str, list[list[Array]]] = {}
        self._turn = 0  # the buffer that the next chunk goes to

    @property
    def is_ready(self) -> bool:
        """Returns whether `fill` can be called: there is memory, since the first `run`."""
        return self._memory is not None

    def fill(self, stages: Stages, dtype: DType) -> None:
        """Copies the first chunk in, before the ranks meet."""
        if stages.chunks:
            stages.steps[0](0, self._buffers(dtype)[self._turn])

    def run(self, stages: Stages, dtype: DType, filled: bool) -> None:
        """Runs every stage on every chunk; the same on all ranks, also on one that has nothing to do in a stage.

        filled: whether all ranks have called `fill`.
        """
        buffers, chunks = self._buffers(dtype), stages.chunks
        last = chunks + len(stages.steps) - 2
        for tick in range(int(filled), last + 1):
            for delay, step in enumerate(stages.steps):
                if 0 <= tick - delay < chunks:
                    step(tick - delay, buffers[(self._turn + tick - delay) % _BUFFERS])
            if tick < last:
                self._meetings.barrier()
        self._turn = (self._turn + chunks) % _BUFFERS

    def _buffers(self, dtype: DType) -> list[list[Array]]:
        """Every rank's memory for one chunk, and that again for chunks under way at the same time."""
        made = self._views.get(dtype.storage.char)
        if made is None:
            memory = self._memory = self._memory or self._allocator.allocate(_BUFFERS * self.chunk_bytes)
            if memory is None:
                raise OperationError("the node has run out of shared memory")
            nbytes, ranks = self.chunk_bytes, range(self._meetings.ranks)
            made = self._views[dtype.storage.char] = [
                [memory.view(rank, turn * nbytes, nbytes // dtype.itemsize, dtype.storage) for rank in ranks]
                for turn in range(_BUFFERS)
            ]
        return made
