"""The state that the one-copy collectives of a group share: meetings, scratch, the ways to the others' arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ...base.buffers import Buffer, address, unowned
from ...base.reduction import Call, Reduction
from ...memory.peer_memory import PeerMemory
from ...memory.shared_memory import Allocator, SharedMemory
from ..meeting import Entry, Meeting, Meetings, Ranges
from .processor import Processor, Program
from .staging import Staging

Array = np.ndarray[Any, Any]


class Group:
    """One group of ranks that share memory, as seen by one of them.

    peers: access to the ranks' private memory, on all of them or on none. processor: copies and reduces.
    """

    def __init__(
        self,
        meetings: Meetings,
        allocator: Allocator,
        peers: PeerMemory | None = None,
        processor: Processor | None = None,
    ) -> None:
        self.meetings = meetings
        self.processor = processor or Processor()
        self.staging = Staging(meetings, allocator, self.processor.chunk_bytes)
        self.rank, self.ranks = meetings.rank, meetings.ranks
        self._allocator = allocator
        self._peers = peers

    def find(self, data: Buffer | None) -> tuple[SharedMemory, int] | None:
        """The symmetric memory that an array lies in, and where in this rank's part of it."""
        return None if data is None or not data.size else self._allocator.find(data.address, data.nbytes)

    @property
    def is_direct(self) -> bool:
        """Returns whether arrays from elsewhere are left to the kernel's copies."""
        return self._peers is not None

    @property
    def _barrier(self) -> Call:
        return self.meetings.barrier, ()

    def _arrays(self, meeting: Meeting, data: Buffer, *, outputs: bool = False) -> list[Array]:
        """All ranks' arrays."""
        return [
            unowned(memory.address + memory.offset(peer) + start, size, data.dtype.storage)
            for peer, (memory, start, size) in enumerate(meeting.arrays(data, outputs))
        ]

    def _copied(self, source: Array, target: Array) -> Program:
        """The copy, if the two are not one memory."""
        return [(self.processor.copy, (target, source))] if address(source) != address(target) else []

    def _others(self, ranges: Ranges) -> list[tuple[int, tuple[int, int]]]:
        """The other ranks with something in their range, from the next one on: not all go to the same one first."""
        order = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        return [(peer, ranges[peer]) for peer in order if ranges[peer][1] > ranges[peer][0]]


def entry_of(operation: str, data: Buffer, op: Reduction | None = None, root: int = 0, elements: int = 0) -> Entry:
    """The entry of an operation on such data."""
    return Entry(operation, data.dtype.name, op.name if op else "none", root, elements, op.factor if op else 1.0)


def starts_of(counts: Sequence[int]) -> tuple[int, ...]:
    """The start of each part, and the end."""
    return (0, *accumulate(counts))
