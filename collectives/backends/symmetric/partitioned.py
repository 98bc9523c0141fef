"""An all_reduce of several arrays that the ranks hand in one after the other, and reduce when they have time.

    rank 0     computes .. | hands in 0 | computes .. | hands in 1 | reduces 0, reduces most of 1
    rank 1     computes ..       | hands in 0 | computes ..              | hands in 1 | reduces the rest

Where ranks fill the cores of their node, reducing while the program computes gains nothing: it takes time of the same
core, and evicts the program's data from the cache. So a rank reduces only once it waits for the result. Then the ranks
that wait share the chunks out as they come: a rank that is early does the others' share meanwhile. Each chunk is
reduced once, in the order of ranks, and written to all ranks' arrays, so that the bits are those of `reductions`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...base.buffers import Buffer, unowned
from ...base.reduction import BoundCall, Reduction
from ...errors import ArgumentError, MismatchError
from ...memory.counters import STRIDE, Counters
from ...memory.shared_memory import Allocator, SharedMemory
from ...runtime.positions import listing
from ..meeting import Meeting, Meetings, MeetsInMemory
from .group import Group, entry_of
from .tickets import Tickets

_CHUNK_BYTES = 1 << 20  # at most
_LEAST_CHUNK = 1 << 16  # bytes; shorter ones cost more to draw than they save
_KEPT_CHUNKS = 1024  # whose calls are kept for the next time
_BLOCK = 16  # reductions whose counts lie in one allocation, which keeps a file open
_ARRAYS = 1 << 20  # more than there are: a rank that has handed in n of generation g has the number g * _ARRAYS + n
_DRAWN = 1 << 32  # more than there are chunks: those of generation g have the tickets from g * _DRAWN on


def _chunk_bytes(nbytes: int, ranks: int) -> int:
    """The bytes of a chunk of an array: where all ranks wait for it at once, each has one to reduce."""
    return min(_CHUNK_BYTES, max(_LEAST_CHUNK, -(-nbytes // ranks // STRIDE) * STRIDE))


class Counts:
    """Numbers that the ranks share in one partitioned reduction: of chunks that are drawn, of arrays handed in.

    memory: shared by the ranks, zero at first, with a file.
    start: the byte of it at which these begin, a multiple of STRIDE; they take `Counts.nbytes(ranks)` bytes.
    oversubscribed: see Counters.
    """

    def __init__(self, memory: SharedMemory, start: int, rank: int, ranks: int, *, oversubscribed: bool) -> None:
        numbers = start + STRIDE
        self.tickets = Tickets(memory, start)
        self.handed_in = Counters(memory, numbers, numbers + ranks * STRIDE, rank, ranks, oversubscribed=oversubscribed)

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Bytes of the memory, a multiple of STRIDE."""
        return (1 + ranks + -(-Counters.nbytes_of_sleepers(ranks) // STRIDE)) * STRIDE


class Pool:
    """The partitioned reductions of a group, of which one is under way at a time. oversubscribed: see Counters.

    Each has counts of its own: what a slower rank has handed in to one that is abandoned would count for the next one.
    They lie in blocks of memory, which live as long as any of their reductions.

    made: how many reductions there were.
    """

    def __init__(self, group: Group, allocator: Allocator, *, oversubscribed: bool) -> None:
        self.group, self._allocator, self._oversubscribed = group, allocator, oversubscribed
        self._block: SharedMemory | None = None
        self.made = 0
        self.under_way: Callable[[], PartitionedReduction | None] = lambda: None

    def counts(self) -> Counts | None:
        """Makes the counts of another reduction; None where the ranks have no memory for them. Collective."""
        ranks, place = self.group.ranks, self.made % _BLOCK
        nbytes = Counts.nbytes(ranks)
        if self._block is None or not place:
            self._block = self._allocator.allocate(_BLOCK * nbytes, shared=True, keep_file=True)
        if self._block is None:
            return None
        self.made += 1
        return Counts(self._block, place * nbytes, self.group.rank, ranks, oversubscribed=self._oversubscribed)


class ArrayPosition(NamedTuple):
    """The position of a rank's array: the number of the allocation, from which byte of its part on; what it holds."""

    allocation: int
    start: int
    size: int
    dtype: str


def position_of(data: Buffer, allocator: Allocator) -> ArrayPosition | None:
    """The array's position; None if it is not in symmetric memory."""
    if not data.size:
        return ArrayPosition(0, 0, 0, data.dtype.name)
    found = allocator.find(data.address, data.nbytes)
    if found is None or not found[0].stride:
        return None
    memory, start = found
    return ArrayPosition(memory.number, start, data.size, data.dtype.name)


class PartitionedReduction(MeetsInMemory):
    """One rank's view of it. Called, it reduces the arrays that all ranks have handed in since the last call.

    counts: the last that the pool has made.
    parts: this rank's arrays.
    places: of all ranks' arrays, which fit each other; by rank.
    entered: whether a rank of the group has come to the operation that this rank is in, from which it hands in nothing
        more.
    """

    def __init__(
        self,
        pool: Pool,
        counts: Counts,
        allocator: Allocator,
        parts: Sequence[Buffer],
        places: Sequence[Sequence[ArrayPosition]],
        op: Reduction,
        entered: Callable[[int], bool],
    ) -> None:
        self._pool, self._op, self._entered = pool, op, entered
        self._counts, self._number = counts, pool.made
        self._generation = self._count = 0
        self._parts = parts
        self._arrays = [
            _arrays(allocator, data, of_part) for data, of_part in zip(parts, zip(*places, strict=True), strict=True)
        ]
        sizes = [_chunk_bytes(data.nbytes, len(places)) // data.dtype.itemsize for data in parts]
        self._chunks = [
            (part, first, min(first + size, data.size))
            for part, (data, size) in enumerate(zip(parts, sizes, strict=True))
            for first in range(0, data.size, size)
        ]
        self._calls: dict[int, list[BoundCall]] = {}

    def hand_in(self, number: int) -> None:
        """Hands in this rank's next array.

        number: the operation that will reduce it, if this rank issues no other before.

        It is the generation's number, if the array is the first of one: the same on all ranks, and higher every time.
        Raises ArgumentError while a generation of another PartitionedReduction is under way.
        """
        if not self._count:
            if self._pool.under_way() not in (None, self):
                raise ArgumentError("partitioned_all_reduce: hand_in: got an array while another one waits for `wait`")
            self._generation, self._pool.under_way = number, weakref.ref(self)
        self._count += 1
        self._counts.handed_in.advance(self._generation * _ARRAYS + self._count)

    def withdraw(self) -> None:
        """Withdraws what this rank has handed in; it will not be reduced."""
        self._count = 0
        if self._pool.under_way() is self:
            self._pool.under_way = lambda: None

    def __call__(self) -> None:
        """Reduces what was handed in. Collective. Raises MismatchError on all ranks if they do not do the same."""
        count, self._count = self._count, 0
        self._pool.under_way = lambda: None
        first = self._generation * _DRAWN
        while True:
            number = self._counts.tickets.draw(first) - first
            if number >= len(self._chunks) or self._chunks[number][0] >= count:
                break
            target = self._generation * _ARRAYS + self._chunks[number][0] + 1
            if not self._counts.handed_in.wait_for_all(target, has_moved_on=self._entered):
                break  # which the meeting will find
            for function, arguments in self._calls_of(number):
                function(*arguments)
        self._meet(count)

    def _meet(self, count: int) -> None:
        """Meets the other ranks; then all chunks are done: a rank comes when there is nothing left to be drawn."""
        group = self._pool.group
        elements = sum(data.size for data in self._parts[:count])
        entry = entry_of("all_reduce", self._parts[0], self._op, elements=elements)
        row = Meetings.pack(entry, None, addresses=(self._generation, self._number))
        meeting = Meeting(group.meetings.publish(row), group.meetings.names, None, None)
        numbers, generations = meeting.addresses(outputs=True), meeting.addresses(outputs=False)
        if any(other != numbers[0] for other in numbers):
            raise MismatchError(
                "all_reduce: the ranks handed in arrays to different PartitionedAllReduce objects; needs the same one "
                "on every rank"
            )
        if any(other != generations[0] for other in generations):
            named = zip(group.meetings.names, generations, strict=True)
            behind = sorted(name for name, other in named if other < max(generations))
            raise MismatchError(f"all_reduce: {listing(behind)} began to hand in arrays before the others")

    def _calls_of(self, number: int) -> list[BoundCall]:
        if number in self._calls:
            return self._calls[number]
        part, first, stop = self._chunks[number]
        arrays = [array[first:stop] for array in self._arrays[part]]
        mine = self._pool.group.rank
        outputs = [arrays[mine], *(array for rank, array in enumerate(arrays) if rank != mine)]
        made = self._pool.group.processor.calls(self._op, arrays, outputs, self._parts[part].dtype, [1.0] * len(arrays))
        if len(self._calls) < _KEPT_CHUNKS:
            self._calls[number] = made
        return made


def _arrays(allocator: Allocator, data: Buffer, places: Sequence[ArrayPosition]) -> list[np.ndarray[Any, Any]]:
    """All ranks' arrays, as this rank sees them; data: its own. No arrays where there is nothing in them."""
    if not data.size:
        return []
    found = allocator.find(data.address, data.nbytes)
    assert found is not None
    memory = found[0]
    return [
        unowned(memory.address + memory.offset(rank) + place.start, place.size, data.dtype.storage)
        for rank, place in enumerate(places)
    ]
