"""All-reduce over several nodes as a pipeline: the network carries some segments while the nodes work on others.

Each segment is cut into a slice for every local rank, and each slice into a part for every node. A rank works on its
slice only, with the ranks of the same local number on the other nodes:

    copy in     the other ranks' slices into memory that the node shares              segment t
    combine     this slice of all local ranks; send each node its part                        t - 1
    add         the parts that came, node by node; send the finished part to all              t - 2
    receive     wait for the finished parts of the other nodes                                t - 3
    copy out    all slices from the node's memory                                             t - 4

In every tick each step of the pipeline does one segment. In the steady state two segments travel, while the nodes work
on three. Between two ticks the ranks of the node wait for each other. A link carries 2 n (N - 1) / N bytes of n in each
direction, N nodes, which is the least there can be; the L local ranks' messages share it.

Contributions are added in the order of ranks in the node, then of nodes, in the accumulating dtype; fp16 and bf16
travel as fp32 until they are complete and are rounded once. So results are the same bits on every rank.

A node of one rank has nothing to copy or to combine. Its contribution is sent from x, and finished parts are received
in x. fp16 and bf16 are then sent in 16 bits, which hold one rank's contribution exactly: half the bytes of fp32, with
the same bits.

A slice that is small goes to every node whole, and every node adds all of it: one message's latency instead of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

from ...base.buffers import Buffer, DType
from ...base.partition import even_counts, ranges
from ...base.reduction import Reduction, partial_of, unify_nans
from ...base.scratch import Scratch
from ...memory.shared_memory import Allocator, SharedMemory
from ...process.idle_wait import wait_all
from ...process.topology import Topology
from ..meeting import Entry, Meetings
from .contributions import add, others, readable, travels_as_it_is

Array = np.ndarray[Any, Any]
Ranges = list[tuple[int, int]]

SEGMENT_BYTES = 4 << 20  # smaller ones cost more in meetings of the node's ranks than they gain in overlap
_WHOLE_BELOW = 32 << 10  # bytes of a slice
_ALIGNMENT = 64
_PARTS, _FINISHED = 2, 3  # tags
# Buffers for segments in turn. A slot is read in the tick after it is written; a result is begun at `add`, and read
# two ticks later.
_SLOTS, _RESULTS = 2, 3
_TICKS = 4  # from copy in to copy out


@dataclass
class _Views:
    """The shared memory in one dtype: slots[turn][local rank], results[turn][local rank]."""

    slots: list[list[Array]]
    results: list[list[Array]]


@dataclass
class _InFlight:
    """One all-reduce in flight.

    views: None where nothing goes through the node's memory, and messages are sent from x and received in x.
    size: elements of a segment.
    sources: every local rank's x, where the node can read it; else None.
    """

    x: Buffer
    op: Reduction
    views: _Views | None
    size: int
    factors: Sequence[float] = ()
    sources: list[Array] | None = None
    parts: dict[int, list[MPI.Request]] = field(default_factory=dict)
    finished: dict[int, list[MPI.Request]] = field(default_factory=dict)

    @property
    def segments(self) -> int:
        """The number of segments."""
        return -(-self.x.size // self.size)

    @property
    def travels(self) -> np.dtype[Any]:
        """The dtype of contributions in messages."""
        return self.x.dtype.storage if self.views is None else self.x.dtype.accumulate

    def range(self, segment: int) -> tuple[int, int]:
        """Range of x's elements in the segment."""
        return segment * self.size, min((segment + 1) * self.size, self.x.size)


class PipelinedAllReduce:
    """The all-reduce of one group with as many ranks on each of its nodes, numbered node by node."""

    def __init__(self, topology: Topology, meetings: Meetings, allocator: Allocator, scratch: Scratch) -> None:
        self._across, self._nodes, self._node = topology.across, topology.nodes, topology.across.Get_rank()
        self._others = others(self._node, self._nodes)
        self._rank, self._ranks = topology.local_rank, topology.local_size
        self._meetings, self._allocator, self._scratch = meetings, allocator, scratch
        self._memory: SharedMemory | None = None
        self._views: dict[str, _Views] = {}
        self._slice_bytes = -(-SEGMENT_BYTES // self._ranks // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT

    def run(self, x: Buffer, op: Reduction) -> None:
        """Reduces x in place; bitwise equal on all ranks."""
        views = None if travels_as_it_is(self._ranks, op) else self._shared(x.dtype)
        run = _InFlight(x, op, views, SEGMENT_BYTES // x.dtype.itemsize)
        place = self._allocator.find(x.address, x.nbytes) if x.size else None
        if place is None and x.size:
            self._copy_in(run, 0)
        entry = Entry("all_reduce", x.dtype.name, op.name, 0, x.size, factor=op.factor)
        meeting = self._meetings.meet(entry, place)
        run.factors = meeting.factors
        run.sources = readable(meeting, x)
        if run.sources is None and meeting.placed:
            if place is not None:
                self._copy_in(run, 0)
            self._meetings.barrier()
        for tick in range(1, run.segments + _TICKS):
            self._tick(run, tick)

    def _tick(self, run: _InFlight, tick: int) -> None:
        """Runs one tick of the pipeline: what can begin a message comes before what waits for one."""

        def is_segment(number: int) -> bool:
            return 0 <= number < run.segments

        copies = is_segment(tick) and run.sources is None and run.views is not None
        if copies:
            self._copy_in(run, tick)
        if is_segment(tick - 1):
            self._combine(run, tick - 1)
        if is_segment(tick - 4):
            self._copy_out(run, tick - 4)
        if is_segment(tick - 3):
            wait_all(run.finished.pop(tick - 3))
        if is_segment(tick - 2):
            self._add(run, tick - 2)
        if copies or (is_segment(tick - 3) and run.views is not None):
            self._meetings.barrier()

    # ---- stages -----------------------------------------------------------------------------------------------

    def _copy_in(self, run: _InFlight, segment: int) -> None:
        if run.views is None:
            return
        low, high = run.range(segment)
        slot = run.views.slots[segment % _SLOTS][self._rank]
        for peer, (start, stop) in enumerate(_even_ranges(high - low, self._ranks)):
            if peer != self._rank:
                slot[start:stop] = run.x.flat[low + start : low + stop]

    def _combine(self, run: _InFlight, segment: int) -> None:
        low, high = run.range(segment)
        start, stop = _even_ranges(high - low, self._ranks)[self._rank]
        partial = self._partial(run, segment, stop - start)
        if run.views is not None:
            if run.sources is not None:
                inputs = [source[low + start : low + stop] for source in run.sources]
            else:
                inputs = [slot[start:stop] for slot in run.views.slots[segment % _SLOTS]]
                inputs[self._rank] = run.x.flat[low + start : low + stop]
            partial_of(run.op).combine(inputs, [partial], run.x.dtype, run.factors, self._scratch)
        ranges = self._ranges(run, stop - start)
        arriving = self._arriving(run, segment, ranges)
        run.parts[segment] = [self._across.Irecv([arriving[node], MPI.BYTE], node, _PARTS) for node in self._others] + [
            self._across.Isend([partial[slice(*ranges[node])], MPI.BYTE], node, _PARTS) for node in self._others
        ]

    def _add(self, run: _InFlight, segment: int) -> None:
        low, high = run.range(segment)
        start, stop = _even_ranges(high - low, self._ranks)[self._rank]
        ranges = self._ranges(run, stop - start)
        if run.views is None:
            result = run.x.flat[low:high]
        else:
            result = run.views.results[segment % _RESULTS][self._rank][: stop - start]
        contributions = self._arriving(run, segment, ranges)
        mine = slice(*ranges[self._node])
        contributions[self._node] = self._partial(run, segment, stop - start)[mine]
        wait_all(run.parts.pop(segment))
        out = result[mine]
        if run.views is None:
            run.op.combine(contributions, [out], run.x.dtype, run.factors, self._scratch)
        else:
            add(run.op, contributions, Buffer(out, run.x.dtype), self._nodes * self._ranks)
        requests = run.finished[segment] = []
        if self._is_whole(run, stop - start):  # every node has added it for itself
            unify_nans(out)
        else:
            requests += [
                self._across.Irecv([result[slice(*ranges[node])], MPI.BYTE], node, _FINISHED) for node in self._others
            ]
            requests += [self._across.Isend([out, MPI.BYTE], node, _FINISHED) for node in self._others]

    def _copy_out(self, run: _InFlight, segment: int) -> None:
        if run.views is None:
            return
        low, high = run.range(segment)
        for peer, (start, stop) in enumerate(_even_ranges(high - low, self._ranks)):
            run.x.flat[low + start : low + stop] = run.views.results[segment % _RESULTS][peer][: stop - start]

    # ---- memory -----------------------------------------------------------------------------------------------

    def _is_whole(self, run: _InFlight, size: int) -> bool:
        return size * run.x.dtype.accumulate.itemsize <= _WHOLE_BELOW

    def _ranges(self, run: _InFlight, size: int) -> Ranges:
        """The part of a slice that each node adds up."""
        return [(0, size)] * self._nodes if self._is_whole(run, size) else _even_ranges(size, self._nodes)

    def _partial(self, run: _InFlight, segment: int, size: int) -> Array:
        """Memory for this node's sum of a slice, in the accumulating dtype; that of x where it is no sum."""
        if run.views is None:
            return run.x.flat[slice(*run.range(segment))]
        return self._turn("partial", run, segment, size)

    def _arriving(self, run: _InFlight, segment: int, ranges: Ranges) -> list[Array]:
        """The memory for each node's contribution to this node's part."""
        low, high = ranges[self._node]
        memory = self._turn("contributions", run, segment, self._nodes * (high - low))
        return [memory[node * (high - low) : (node + 1) * (high - low)] for node in range(self._nodes)]

    def _turn(self, purpose: str, run: _InFlight, segment: int, size: int) -> Array:
        dtype = run.travels
        memory = self._scratch.take(f"{purpose} {segment % 2}", size * dtype.itemsize)
        return memory.view(dtype)

    def _shared(self, dtype: DType) -> _Views:
        found = self._views.get(dtype.storage.str)
        return found if found is not None else self._make_views(dtype)

    def _make_views(self, dtype: DType) -> _Views:
        memory = self._memory or self._allocator.require(_SLOTS * SEGMENT_BYTES + _RESULTS * self._slice_bytes)
        self._memory = memory

        def views(start: int, nbytes: int) -> list[Array]:
            size = nbytes // dtype.itemsize
            return [memory.view(rank, start, size, dtype.storage) for rank in range(self._ranks)]

        slots = [views(turn * SEGMENT_BYTES, SEGMENT_BYTES) for turn in range(_SLOTS)]
        first = _SLOTS * SEGMENT_BYTES
        results = [views(first + turn * self._slice_bytes, self._slice_bytes) for turn in range(_RESULTS)]
        made = self._views[dtype.storage.str] = _Views(slots, results)
        return made


def _even_ranges(size: int, parts: int) -> Ranges:
    return ranges(even_counts(size, parts))
