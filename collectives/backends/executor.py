"""Runs one rank's part of a Schedule over MPI point-to-point.

A round's messages are begun together. Each is cut into segments, so that a segment is reduced while it is still in
the cache and the next one is in flight:

    receive segment i + 1 into scratch half B      |  at the same time
    work += scratch half A (segment i)             |

Both sides make the same cuts, as they know the chunk's size and its dtype: partial results travel in the accumulating
dtype, everything else in the data's. The n-th message between two ranks carries the tag n, so that messages that are
under way together cannot mix. The reductions of a round take turns, segment by segment. If a round both sends a partial
result and reduces into it, each segment is overwritten only after it has been sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

from ..base.buffers import Buffer, copy
from ..base.partition import even_counts, ranges
from ..base.reduction import Reduction, unify_nans
from ..base.scratch import Scratch
from ..process.idle_wait import wait_all
from ..schedules.schedule import Chunks, Kind, Role, Round, Schedule, Step

Array = np.ndarray[Any, Any]

SEGMENT_BYTES = 1 << 20
_TAGS = 32767  # the largest that every MPI has


@dataclass(frozen=True, slots=True)
class Region:
    """One of a rank's buffers, cut into chunks: ranges[c] are the first and the last + 1 element of chunk c.

    Chunks that a schedule moves in runs lie side by side.
    """

    data: Buffer
    ranges: tuple[tuple[int, int], ...]

    def part(self, chunks: Chunks) -> Buffer:
        """The memory of a run of chunks."""
        return self.data.part(self.ranges[chunks.start][0], self.ranges[chunks.stop - 1][1])


def whole(data: Buffer, counts: Sequence[int]) -> Region:
    """All chunks side by side; counts: elements of each."""
    return Region(data, tuple(ranges(counts)))


def single(data: Buffer, number: int, parts: int, pieces: int = 1) -> Region:
    """Only part `number` is there, cut into `pieces` chunks; the chunks of the others are empty."""
    counts = [0] * (parts * pieces)
    counts[number * pieces : (number + 1) * pieces] = even_counts(data.size, pieces)
    return whole(data, counts)


class Execution:
    """One run of a schedule on this rank.

    regions: what the schedule calls in and out.
    counts: elements of each chunk.
    op: the reduction operator, None for movements.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        schedule: Schedule,
        regions: dict[Role, Region],
        counts: Sequence[int],
        scratch: Scratch,
        op: Reduction | None = None,
    ) -> None:
        self.comm = comm
        self.schedule = schedule
        self.regions = regions
        second = counts if op is not None and schedule.work else ()  # half of work
        self.work_starts = (0, *accumulate((*counts, *second)))
        self.scratch = scratch
        self.op = op
        self.sent: dict[int, int] = {}  # messages to and from each peer so far
        self.received: dict[int, int] = {}
        if op is not None:
            self._prepare_work()
        elif schedule.work:
            self.work_starts = tuple(number * max(counts) for number in range(schedule.work + 1))

    def _prepare_work(self) -> None:
        """Work is out's memory where that is as large, with one half, and of the accumulating dtype, else scratch.

        It starts as a copy of in, made chunk by chunk as the chunks are first needed (`_local`).
        """
        source = self.regions[Role.IN]
        out = self.regions.get(Role.OUT)
        dtype = source.data.dtype
        if out is not None and out.ranges == source.ranges and not dtype.widened and not self.schedule.work:
            self.work = out.data.flat
        else:
            memory = self.scratch.take("work", self.work_starts[-1] * dtype.accumulate.itemsize)
            self.work = memory.view(dtype.accumulate)
        self.touched: set[int] = set()
        assert self.op is not None
        self._transformed = dtype.widened or self.op.premultiplied  # a contribution is not what lies in `in`

    def run(self) -> None:
        """Carries out all rounds of this rank."""
        for steps in self.schedule.program(self.comm.rank):
            self._round(steps)

    def _round(self, steps: Round) -> None:
        requests: list[MPI.Request] = []
        leaving: list[tuple[Chunks, list[MPI.Request]]] = []
        reductions: list[tuple[Step, int]] = []
        for step in steps:
            if step.kind is Kind.SEND:
                source, tag = _bytes(self._outgoing(step.target)), _next(self.sent, step.peer)
                sent = [self.comm.Isend([s, MPI.BYTE], step.peer, tag) for s in _segments(source)]
                leaving.append((step.target, sent))
                requests += sent
            elif step.kind is Kind.RECV:
                target, tag = _bytes(self._incoming(step.target)), _next(self.received, step.peer)
                requests += [self.comm.Irecv([s, MPI.BYTE], step.peer, tag) for s in _segments(target)]
            elif step.kind is Kind.REDUCE:
                reductions.append((step, _next(self.received, step.peer)))
            elif step.kind is Kind.COPY:
                self._copy(step)
            else:
                self._finish(step)
        if reductions:
            self._reduce_all(reductions, leaving)
        if requests:
            wait_all(requests)

    def _reduce_all(
        self, reductions: Sequence[tuple[Step, int]], leaving: Sequence[tuple[Chunks, list[MPI.Request]]]
    ) -> None:
        """The reductions of a round, with the tags of their messages, segment by segment in turn."""
        under_way = []
        for number, (step, tag) in enumerate(reductions):
            gone_first = [sent for chunks, sent in leaving if chunks == step.target]
            under_way.append(self._reduce(step, tag, f"receive {number}", gone_first))
        while under_way:
            under_way = [segments for segments in under_way if next(segments, False)]

    def _copy(self, step: Step) -> None:
        """Chunk by chunk where the chunks differ in size; the shorter one says how much."""
        assert step.source is not None
        source, target = self._data(step.source).flat, self._data(step.target).flat
        if source.size != target.size:
            for s, t in zip(_singles(step.source), _singles(step.target), strict=True):
                source, target = self._data(s).flat, self._data(t).flat
                size = min(source.size, target.size)
                np.copyto(target[:size], source[:size])
        else:
            copy(source, target)

    def _data(self, chunks: Chunks) -> Buffer:
        """Memory in the data's dtype; in a movement, work is scratch with room for all chunks."""
        if chunks.role is Role.WORK and Role.WORK not in self.regions:
            dtype = next(iter(self.regions.values())).data.dtype
            memory = self.scratch.take("work", self.work_starts[-1] * dtype.itemsize)
            sizes = [last - first for first, last in pairwise(self.work_starts)]
            self.regions[Role.WORK] = whole(Buffer(memory.view(dtype.storage), dtype), sizes)
        return self.regions[chunks.role].part(chunks)

    def _partial(self, number: int) -> Array:
        return self.work[self.work_starts[number] : self.work_starts[number + 1]]

    def _local(self, chunks: Chunks) -> Array:
        """The run of partial results, each started from in if this is its first use."""
        assert self.op is not None
        for number in range(chunks.start, chunks.stop):
            if number not in self.touched:
                self.touched.add(number)
                self.op.start(self.regions[Role.IN].part(Chunks(Role.IN, number, number + 1)), self._partial(number))
        return self.work[self.work_starts[chunks.start] : self.work_starts[chunks.stop]]

    def _outgoing(self, chunks: Chunks) -> Array:
        if chunks.role is not Role.WORK or self.op is None:
            return self._data(chunks).flat
        untouched = self.touched.isdisjoint(range(chunks.start, chunks.stop))
        if untouched and not self._transformed:
            return self.regions[Role.IN].part(chunks).flat  # as it is: no need to copy it to work first
        return self._local(chunks)

    def _incoming(self, chunks: Chunks) -> Array:
        if chunks.role is not Role.WORK or self.op is None:
            return self._data(chunks).flat
        self.touched.update(range(chunks.start, chunks.stop))  # partial results in place of what was there
        return self.work[self.work_starts[chunks.start] : self.work_starts[chunks.stop]]

    def _reduce(self, step: Step, tag: int, scratch: str, leaving: Sequence[Sequence[MPI.Request]]) -> Iterator[bool]:
        """Receives and reduces a segment between any two yields, in two halves of scratch that take turns.

        leaving: messages of the same chunks, by segment, that must be gone before these are overwritten. Operands are
        taken in the order of the ranks, so that two ranks that exchange their partial results get the same bits.
        """
        assert self.op is not None
        chunks = step.target
        start, stop = self.work_starts[chunks.start], self.work_starts[chunks.stop]
        target = self.work[start:stop]
        numbers = set(range(chunks.start, chunks.stop))
        if numbers & self.touched or self._transformed:
            local = self._local(chunks)
        else:
            local = self.regions[Role.IN].part(chunks).flat
        self.touched |= numbers
        size = max(1, min(target.size, SEGMENT_BYTES // target.itemsize))
        halves = self.scratch.take(scratch, 2 * size * target.itemsize).view(target.dtype)
        pieces = [(i, min(i + size, target.size)) for i in range(0, target.size, size)]
        pending: list[tuple[MPI.Request, Array]] = []

        def begin(segment: int) -> None:
            first, last = pieces[segment]
            half = halves[(segment % 2) * size :][: last - first]
            pending.append((self.comm.Irecv([_bytes(half), MPI.BYTE], step.peer, tag), half))

        for segment in range(min(2, len(pieces))):
            begin(segment)
        yield True
        for segment, (first, last) in enumerate(pieces):
            request, half = pending.pop(0)
            wait_all([request, *(sent[segment] for sent in leaving)])
            mine = local[first:last]
            low, high = (half, mine) if step.peer < self.comm.rank else (mine, half)
            self.op.combine_two(low, high, target[first:last])
            if segment + 2 < len(pieces):
                begin(segment + 2)
            yield True

    def _finish(self, step: Step) -> None:
        assert self.op is not None
        assert step.source is not None
        result = self._local(step.source)
        if self.schedule.all_finish:
            unify_nans(result)
        self.op.finish(result, self.schedule.ranks, self.regions[Role.OUT].part(step.target))


def _singles(chunks: Chunks) -> list[Chunks]:
    return [Chunks(chunks.role, number, number + 1) for number in range(chunks.start, chunks.stop)]


def _next(messages: dict[int, int], peer: int) -> int:
    """The tag of the next message to or from a peer."""
    messages[peer] = number = messages.get(peer, 0) + 1
    return number % _TAGS


def _bytes(array: Array) -> Array:
    return array.view(np.uint8)


def _segments(data: Array) -> list[Array]:
    """The bytes of a message, cut as the receiver cuts them; none for an empty one."""
    return [data[i : i + SEGMENT_BYTES] for i in range(0, data.size, SEGMENT_BYTES)]
