"""The state that the one-copy collectives of a group share: meetings, scratch, the ways to the others' arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...base.buffers import DTYPES, Buffer, address, unowned
from ...base.partition import even_counts
from ...base.reduction import PREFIXES, BoundCall, Reduction
from ...memory.peer_memory import PeerMemory
from ...memory.shared_memory import Allocator, SharedMemory
from ..meeting import UNEVEN, Entry, Meeting, Meetings, Ranges
from .processor import Calls, Processor
from .staging import Staging

Array = np.ndarray[Any, Any]


_SMALL = 64 << 10  # bytes of an operation; larger ones have a scratch of their own, which many groups never need


@dataclass(frozen=True, slots=True)
class StagedSizes:
    """The largest operations, in bytes, that take the staged way although the ranks could reach the arrays otherwise.

    symmetric: on symmetric arrays.
    private: on arrays that the kernel could copy.
    reduced, exchanged: the same of all_reduce and reduce, whose results go through the scratch too, and of all_to_all
        and gather, in which each byte is for one rank.
    whole: of reductions of which each rank reduces all, if they are staged.
    """

    symmetric: float = 0
    private: float = 0
    reduced: float = 0
    exchanged: float = 0
    whole: float = 0


class Group:
    """One group of ranks that share memory, as seen by one of them.

    peers: access to the ranks' private memory, on all of them or on none.
    processor: copies and reduces.
    staged: what takes the staged way all the same.
    """

    def __init__(
        self,
        meetings: Meetings,
        allocator: Allocator,
        peers: PeerMemory | None = None,
        processor: Processor | None = None,
        staged: StagedSizes | None = None,
    ) -> None:
        self.meetings = meetings
        self.processor = processor or Processor()
        optional = peers is not None
        self._staging = Staging(meetings, allocator, self.processor.chunk_bytes, optional=optional)
        self._small_staging = Staging(meetings, allocator, _SMALL, optional=optional) if staged else self._staging
        self.rank, self.ranks = meetings.rank, meetings.ranks
        self._allocator = allocator
        self._peers = peers
        self.staged = staged or StagedSizes()

    def find(self, data: Buffer | None) -> tuple[SharedMemory, int] | None:
        """The symmetric memory that an array lies in, and where in this rank's part of it."""
        return None if data is None or not data.size else self._allocator.find(data.address, data.nbytes)

    def staging_of(self, entry: Entry) -> Staging:
        """Returns the scratch that an operation takes if it is staged; the same on all ranks."""
        is_small = entry.elements * DTYPES[entry.dtype].itemsize <= _SMALL and entry.operation not in UNEVEN
        return self._small_staging if is_small else self._staging

    def may_stage(self, operation: str, nbytes: int, *, symmetric: bool) -> bool:
        """Returns whether an operation of so many bytes takes the staged way, if there is memory for it.

        symmetric: whether the ranks' arrays are.
        """
        sizes = self.staged
        if operation in PREFIXES:  # results take the place of inputs that others need
            return True
        if symmetric:
            return nbytes <= sizes.symmetric
        if operation in ("all_reduce", "reduce"):
            limit = sizes.reduced
        else:
            limit = sizes.exchanged if operation in ("all_to_all", "gather") else sizes.private
        return self._peers is None or nbytes <= limit

    def takes_staged_way(self, meeting: Meeting, entry: Entry, nbytes: int) -> bool:
        """Returns whether the operation takes the staged way, as `may_stage`; the same on all ranks. Collective."""
        symmetric = meeting.pull or meeting.push
        if not symmetric and self._peers is None:
            return True
        # Writes to memory that is one for all must be complete for every rank when any rank goes on.
        may = not meeting.shared and self.may_stage(entry.operation, nbytes, symmetric=symmetric)
        return may and self.staging_of(entry).is_possible()

    def slices(self, size: int) -> list[int]:
        """Returns how many of `size` elements each rank reduces."""
        leader = self.processor.leader
        if leader is None:
            return even_counts(size, self.ranks)
        return [size if rank == leader else 0 for rank in range(self.ranks)]

    @property
    def _barrier(self) -> BoundCall:
        return self.meetings.barrier, ()

    def _arrays(self, meeting: Meeting, data: Buffer, *, outputs: bool = False) -> list[Array]:
        """All ranks' arrays."""
        return [
            unowned(memory.address + memory.offset(peer) + start, size, data.dtype.storage)
            for peer, (memory, start, size) in enumerate(meeting.arrays(data, outputs))
        ]

    def _copied(self, source: Array, target: Array) -> Calls:
        """The copy, if the two are not one memory."""
        return [(self.processor.copy, (target, source))] if address(source) != address(target) else []

    def _others(self, ranges: Ranges) -> list[tuple[int, tuple[int, int]]]:
        """The other ranks with something in their range, from the next one on: not all go to the same one first."""
        order = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        return [(peer, ranges[peer]) for peer in order if ranges[peer][1] > ranges[peer][0]]


def entry_of(
    operation: str, data: Buffer, op: Reduction | None = None, root: int = 0, elements: int = 0, parts: int = 0
) -> Entry:
    """The entry of an operation on such data."""
    name, factor = (op.name, op.factor) if op else ("none", 1.0)
    return Entry(operation, data.dtype.name, name, root, elements, parts, factor)
