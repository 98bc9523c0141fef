"""Triple buffering: while one sub-group is stepped on, the next is read and the last one written.

    reader     | read 0 | read 1 | read 2 | ...
    caller              | step 0 | step 1 | step 2 | ...
    writer                       | write 0| write 1| write 2
    buffer         0        1        2        0

Who runs what: the caller of `run` steps, in the thread of the program, or with `delayed_update` in the thread
`mpidl-offload-update` (`optimizer`). Two more threads, `mpidl-offload-read` and `mpidl-offload-write`, start with the
first read and the first write; they wait for no other rank. The caller waits for a read before the step on it, and for
the write from a buffer before the next read into it. Only where the caller is the thread of the program may `ready` or
a step communicate, as for the norms of LARS and LAMB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

import torch

BUFFERS = 3


class Buffered(Protocol):
    """A sub-group that passes through the buffers. nbytes: of the buffer that it needs."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, asked for before each pass."""

    def read(self, buffer: torch.Tensor) -> None:
        """Fills the buffer, in the reader's thread."""

    def step(self, buffer: torch.Tensor) -> None:
        """Steps, in the caller's thread."""

    def write(self, buffer: torch.Tensor) -> None:
        """Writes the buffer, in the writer's thread."""


class TripleBuffering:
    """Three buffers, kept from pass to pass, and two threads."""

    def __init__(self) -> None:
        self.buffers = [torch.empty(0, dtype=torch.uint8)] * BUFFERS
        self._reader = ThreadPoolExecutor(1, "mpidl-offload-read")
        self._writer = ThreadPoolExecutor(1, "mpidl-offload-write")

    def run(self, groups: Sequence[Buffered], ready: Callable[[Exception | None], None] = lambda _: None) -> None:
        """Reads, steps and writes each. An exception of any is raised once nothing is in flight.

        ready: called before each step, with the exception of the reading before it if there was one.
        """
        needed = max((group.nbytes for group in groups), default=0)
        if needed > len(self.buffers[0]):
            self.buffers = [torch.empty(needed, dtype=torch.uint8) for _ in range(BUFFERS)]
        reads: list[Future[None]] = []
        writes: list[Future[None]] = []

        def read(number: int) -> None:
            reads.append(self._reader.submit(groups[number].read, self.buffers[number % BUFFERS]))

        try:
            for number, group in enumerate(groups):
                error: Exception | None = None
                try:
                    if number == 0:
                        read(0)
                    if number >= BUFFERS - 1:  # the next one's buffer is that of the last but one
                        writes[number - BUFFERS + 1].result()
                    if number + 1 < len(groups):
                        read(number + 1)
                    reads[number].result()
                except Exception as raised:
                    error = raised
                ready(error)
                if error is not None:
                    raise error
                group.step(self.buffers[number % BUFFERS])
                writes.append(self._writer.submit(group.write, self.buffers[number % BUFFERS]))
            for future in writes:
                future.result()
        finally:
            wait([*reads, *writes])
