"""Reduce-scatter over several nodes as a pipeline: like `all_reduce`, of which it gives the same bits.

    x, 2 nodes of 2 ranks      | part 0 | part 1 | part 2 | part 3 |      part r is for rank r
    rank 0 and rank 2 work on    ^^^^^^            ^^^^^^                 the parts of their local number

A segment is a piece of every part:

    copy in     the other local ranks' pieces into memory that the node shares        segment t
    combine     this local number's pieces of all local ranks; send each node its own         t - 1
    add         the pieces that came, node by node, into out                                  t - 2

Nothing is copied in where the node can read every rank's input. The memory between input and output has a bounded
size, whatever the operation's. A link carries n (N - 1) / N bytes of n in each direction, N nodes.

If every node has one rank, messages are sent directly from x, fp16 and bf16 in 16 bits (except for a PremulSum).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

from ...base.buffers import Buffer
from ...base.partition import ranges
from ...base.reduction import Reduction, partial_of
from ...base.scratch import Scratch
from ...memory.shared_memory import Allocator, SharedMemory
from ...process.idle_wait import wait_all
from ...process.topology import Topology
from ..meeting import Entry, Meetings, parts_of
from .contributions import add, others, readable, travels_as_it_is

Array = np.ndarray[Any, Any]
Ranges = list[tuple[int, int]]

_SEGMENT_BYTES = 4 << 20  # of all parts together
_SMALLEST, _LARGEST = 16 << 10, 512 << 10  # bytes of a piece
_TAG = 4
_TURNS = 2  # of all memory: a segment travels while the next one is combined


@dataclass
class _InFlight:
    """One reduce-scatter in flight.

    parts: the ranges of x.
    size: elements of a piece.
    direct: messages are sent from x.
    sources: every local rank's x, or None.
    """

    out: Buffer
    x: Buffer
    op: Reduction
    parts: Ranges
    size: int
    direct: bool
    factors: Sequence[float] = ()
    sources: list[Array] | None = None
    requests: dict[int, list[MPI.Request]] = field(default_factory=dict)

    @property
    def segments(self) -> int:
        """The number of segments."""
        return -(-max(high - low for low, high in self.parts) // self.size)

    def piece(self, part: int, segment: int) -> tuple[int, int]:
        """A segment's elements of a part; none where the part is at its end."""
        low, high = self.parts[part]
        return min(low + segment * self.size, high), min(low + (segment + 1) * self.size, high)


class PipelinedReduceScatter:
    """The reduce-scatter of one group with as many ranks on each of its nodes, numbered node by node."""

    def __init__(self, topology: Topology, meetings: Meetings, allocator: Allocator, scratch: Scratch) -> None:
        self._across, self._nodes, self._node = topology.across, topology.nodes, topology.across.Get_rank()
        self._others = others(self._node, self._nodes)
        self._rank, self._ranks = topology.local_rank, topology.local_size
        self._meetings, self._allocator, self._scratch = meetings, allocator, scratch
        self._memory: SharedMemory | None = None
        parts = self._nodes * self._ranks
        self._piece_bytes = min(max(_SEGMENT_BYTES // parts, _SMALLEST), _LARGEST)

    def run(self, out: Buffer, x: Buffer, op: Reduction, counts: Sequence[int]) -> None:
        """Reduces x and writes this rank's part to out.

        counts: elements for each rank. out may be this rank's part of x.
        """
        parts = ranges(counts)
        direct = travels_as_it_is(self._ranks, op)
        run = _InFlight(out, x, op, parts, self._piece_bytes // x.dtype.accumulate.itemsize, direct)
        place = self._allocator.find(x.address, x.nbytes) if x.size else None
        entry = Entry("reduce_scatter", x.dtype.name, op.name, 0, x.size, parts_of(counts), op.factor)
        meeting = self._meetings.meet(entry, place)
        run.factors = meeting.factors
        run.sources = readable(meeting, x)
        for tick in range(run.segments + 2):
            self._tick(run, tick)
        self._meetings.barrier()  # all ranks of the node have read this one's x, and what it copied in

    def _tick(self, run: _InFlight, tick: int) -> None:
        """Runs one tick of the pipeline: what can begin a message comes before what waits for one."""
        copies = run.sources is None and tick < run.segments and not run.direct
        if copies:
            self._copy_in(run, tick)
        if 0 < tick <= run.segments:
            self._combine(run, tick - 1)
        if copies:
            self._meetings.barrier()
        if tick >= 2:
            self._add(run, tick - 2)

    # ---- stages -----------------------------------------------------------------------------------------------

    def _copy_in(self, run: _InFlight, segment: int) -> None:
        for number in range(len(run.parts)):
            low, high = run.piece(number, segment)
            if number % self._ranks != self._rank:
                self._slot(run, segment, self._rank, number)[: high - low] = run.x.flat[low:high]

    def _combine(self, run: _InFlight, segment: int) -> None:
        partial, arriving = self._partial(run, segment), self._memory_of(run, "contributions", segment)
        sizes = []
        for node in range(self._nodes):
            number = node * self._ranks + self._rank
            low, high = run.piece(number, segment)
            sizes.append(high - low)
            if run.direct:
                continue
            if run.sources is not None:
                inputs = [source[low:high] for source in run.sources]
            else:
                inputs = [self._slot(run, segment, peer, number)[: high - low] for peer in range(self._ranks)]
                inputs[self._rank] = run.x.flat[low:high]
            target = [partial[node][: high - low]]
            partial_of(run.op).combine(inputs, target, run.x.dtype, run.factors, self._scratch)
        mine = sizes[self._node]
        run.requests[segment] = [
            self._across.Irecv([arriving[node][:mine], MPI.BYTE], node, _TAG) for node in self._others if mine
        ] + [
            self._across.Isend([partial[node][: sizes[node]], MPI.BYTE], node, _TAG)
            for node in self._others
            if sizes[node]
        ]

    def _add(self, run: _InFlight, segment: int) -> None:
        wait_all(run.requests.pop(segment))
        first, _ = run.parts[self._number]
        low, high = run.piece(self._number, segment)
        contributions = self._memory_of(run, "contributions", segment)
        contributions[self._node] = self._partial(run, segment)[self._node]
        contributions = [c[: high - low] for c in contributions]
        out = run.out.part(low - first, high - first)
        if run.direct:
            run.op.combine(contributions, [out.flat], run.x.dtype, run.factors, self._scratch)
        else:
            add(run.op, contributions, out, self._nodes * self._ranks)

    # ---- memory -----------------------------------------------------------------------------------------------

    @property
    def _number(self) -> int:
        """This rank's among all."""
        return self._node * self._ranks + self._rank

    def _partial(self, run: _InFlight, segment: int) -> list[Array]:
        """This node's contribution to the piece of each node: its sums, or pieces of x."""
        if run.direct:
            return [run.x.flat[slice(*run.piece(node, segment))] for node in range(self._nodes)]
        return self._memory_of(run, "partial", segment)

    def _memory_of(self, run: _InFlight, purpose: str, segment: int) -> list[Array]:
        """The memory of a piece for each node, in the dtype in which contributions travel."""
        dtype = run.x.dtype.storage if run.direct else run.x.dtype.accumulate
        nbytes = self._nodes * run.size * dtype.itemsize
        memory = self._scratch.take(f"{purpose} {segment % _TURNS}", nbytes).view(dtype)
        return [memory[node * run.size : (node + 1) * run.size] for node in range(self._nodes)]

    def _slot(self, run: _InFlight, segment: int, rank: int, part: int) -> Array:
        """The shared memory for a local rank's piece of a part."""
        size, itemsize = run.size, run.x.dtype.itemsize
        start = (segment % _TURNS * len(run.parts) + part) * size * itemsize
        return self._shared().view(rank, start, size, run.x.dtype.storage)

    def _shared(self) -> SharedMemory:
        if self._memory is None:
            self._memory = self._allocator.require(_TURNS * self._nodes * self._ranks * self._piece_bytes)
        return self._memory
