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

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...base.buffers import DType
from ...base.reduction import BoundCall
from ...errors import OperationError
from ...memory.shared_memory import Allocator, SharedMemory
from ..meeting import Meetings
from .processor import Calls

Array = np.ndarray[Any, Any]

BUFFERS = 3
_KEPT_CHUNKS = 64  # of an operation, whose calls are kept for the next time


@dataclass(slots=True)
class Stages:
    """The steps done with each chunk, one after the other: step(chunk, every rank's buffer for it) gives its calls.

    fillings, programs: calls that were worked out, by the buffer that the first chunk goes to; programs for the rows of
        the last meeting.
    """

    chunks: int
    steps: list[Callable[[int, list[Array]], Calls]]
    fillings: dict[int, Calls] = field(default_factory=dict)
    programs: dict[int, Calls] = field(default_factory=dict)


class Staging:
    """The scratch of one group, and its pipeline. All methods but `fill` are collective.

    chunk_bytes: of scratch, a rank and buffer.
    optional: whether there is another way, so that it need not be had.

    state: the buffer that the next chunk goes to, and whether `is_ready`.
    """

    def __init__(self, meetings: Meetings, allocator: Allocator, chunk_bytes: int, *, optional: bool = False) -> None:
        self._meetings, self._optional = meetings, optional
        self.chunk_bytes = chunk_bytes
        self._allocator = allocator
        self._memory: SharedMemory | None = None
        self._tried = False
        self._views: dict[str, list[list[Array]]] = {}
        self.state = array("q", [0, 0])

    @property
    def is_ready(self) -> bool:
        """Returns whether `fill` can be called: there is memory, since an earlier operation."""
        return bool(self.state[1])

    def is_possible(self) -> bool:
        """Returns whether there is memory for it, which it asks for the first time. Collective."""
        if not self._tried:
            self._memory = self._allocator.allocate(BUFFERS * self.chunk_bytes, optional=self._optional)
            self._tried, self.state[1] = True, self._memory is not None
        return self.is_ready

    def places(self) -> tuple[int, int, int, int]:
        """Returns the scratch's address and bytes, the bytes of a rank's part, and of a buffer of it; 0 without any."""
        memory = self._memory
        return (0, 0, 0, 0) if memory is None else (memory.address, len(memory), memory.stride, self.chunk_bytes)

    def fill(self, stages: Stages, dtype: DType) -> None:
        """Copies the first chunk in, before the ranks meet."""
        if stages.chunks:
            turn = self.state[0]
            filling = stages.fillings.get(turn)
            if filling is None:
                filling = stages.fillings[turn] = stages.steps[0](0, self._buffers(dtype)[turn])
            for function, arguments in filling:  # not by `_run`, as small operations have little else
                function(*arguments)

    def run(self, stages: Stages, dtype: DType, filled: bool) -> None:
        """Runs every step of the pipeline on every chunk; the same on all ranks, also on one with nothing to do in it.

        filled: whether all ranks have called `fill`.
        """
        turn = self.state[0]
        program = stages.programs.get(turn)
        if program is not None:
            for function, arguments in program:
                function(*arguments)
        elif stages.chunks <= _KEPT_CHUNKS:
            program = stages.programs[turn] = list(self._calls(stages, dtype, filled))
            _run(program)
        else:
            _run(self._calls(stages, dtype, filled))
        self.state[0] = (turn + stages.chunks) % BUFFERS

    def _calls(self, stages: Stages, dtype: DType, filled: bool) -> Iterator[BoundCall]:
        """The calls of `run`, as they are worked out."""
        buffers, chunks = self._buffers(dtype), stages.chunks
        last = chunks + len(stages.steps) - 2
        for tick in range(int(filled), last + 1):
            for delay, step in enumerate(stages.steps):
                if 0 <= tick - delay < chunks:
                    yield from step(tick - delay, buffers[(self.state[0] + tick - delay) % BUFFERS])
            if tick < last:
                yield self._meetings.barrier, ()

    def _buffers(self, dtype: DType) -> list[list[Array]]:
        """Every rank's memory for one chunk, and that again for chunks under way at the same time."""
        made = self._views.get(dtype.storage.char)
        if made is None:
            if not self.is_possible():
                raise OperationError("the node has run out of shared memory")
            memory, nbytes, ranks = self._memory, self.chunk_bytes, range(self._meetings.ranks)
            assert memory is not None
            made = self._views[dtype.storage.char] = [
                [memory.view(rank, turn * nbytes, nbytes // dtype.itemsize, dtype.storage) for rank in ranks]
                for turn in range(BUFFERS)
            ]
        return made


def _run(program: Iterable[BoundCall]) -> None:
    for function, arguments in program:
        function(*arguments)
