"""Reduce over several nodes: each node's sum goes to the root as one message, and its bits are those of the all-reduce.

As in `algorithms.hierarchical.reduce`, one rank of each node is its leader, the root on its own node. An array of more
than a few KiB goes through in segments, as through a pipeline:

    copy in     the other local ranks' slices into memory that the node shares           segment t
    combine     this rank's slice of all local ranks, into the leader's memory                   t - 1
    message     the leader's segment to the root, begun                                          t - 1
    add         the nodes' sums, node by node, into the root's x                                 t - 2

Nothing is copied in where the node can read every rank's x. A small array is copied in whole before the ranks meet, and
the leader combines all of it: the meeting is the only time that the ranks of a node wait for each other.

Contributions are added in the order of ranks in the node, then of nodes, in the accumulating dtype. fp16 and bf16
are sent as fp32 and rounded once. Exception: if every node has one rank, messages are sent directly from x in 16 bits
(of a PremulSum, whose contributions are not x, as fp32).

A rank waits for the others of its node, and the root for messages that leaders begin without waiting for other nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

from ...base.buffers import Buffer
from ...base.partition import even_counts, ranges
from ...base.reduction import Reduction, partial_of
from ...base.scratch import Scratch
from ...memory.shared_memory import Allocator, SharedMemory
from ...process.idle_wait import wait_all
from ...schedules.algorithms.hierarchical import Nodes, leaders
from ..meeting import Entry, Meetings
from .contributions import add, readable

Array = np.ndarray[Any, Any]

SEGMENT_BYTES = 1 << 20  # in the accumulating dtype
SMALL_BYTES = 16 << 10  # of x: less than what two more meetings of the node's ranks cost
_SLOTS, _SUMS = 2, 3  # a slot is read in the tick after it is written; a sum is written, then sent or added, then free
_SMALL_SLOTS = 2  # so that a rank that is one reduce ahead overwrites nothing that its leader still reads
_TAG = 6


@dataclass
class _InFlight:
    """One reduce in flight.

    size: elements of a segment.
    heads: the leader of each node.
    direct: messages are sent from x itself.
    sources: every local rank's x, where the node can read it.
    requests, sums: of a segment, at its leader.
    sums: of each node, at the root.
    """

    x: Buffer
    root: int
    op: Reduction
    size: int
    heads: list[int]
    direct: bool
    factors: Sequence[float] = ()
    sources: list[Array] | None = None
    requests: dict[int, list[MPI.Request]] = field(default_factory=dict)
    sums: dict[int, list[Array]] = field(default_factory=dict)

    @property
    def segments(self) -> int:
        """The number of segments."""
        return -(-self.x.size // self.size)

    def range(self, segment: int) -> tuple[int, int]:
        """Range of x's elements in the segment."""
        return segment * self.size, min((segment + 1) * self.size, self.x.size)

    @property
    def travels(self) -> np.dtype[Any]:
        """The dtype of sums in messages."""
        return self.x.dtype.storage if self.direct else self.x.dtype.accumulate


class PipelinedReduce:
    """The reduce of one group over any nodes.

    comm: of the group.
    nodes: its ranks on each node.
    meetings, allocator: of this node's ranks.
    """

    def __init__(
        self, comm: MPI.Intracomm, nodes: Nodes, meetings: Meetings, allocator: Allocator, scratch: Scratch
    ) -> None:
        self._comm, self._rank, self._nodes = comm, comm.Get_rank(), nodes
        self._node = next(number for number, members in enumerate(nodes) if self._rank in members)
        self._members = nodes[self._node]
        self._local, self._ranks = self._members.index(self._rank), len(self._members)
        self._meetings, self._allocator, self._scratch = meetings, allocator, scratch
        self._memory: SharedMemory | None = None
        self._small = 0

    def run(self, x: Buffer, root: int, op: Reduction) -> None:
        """Reduces x in place on the root; it is unchanged elsewhere."""
        direct = len(self._nodes) == self._comm.Get_size() and not op.premultiplied
        size = SEGMENT_BYTES // x.dtype.accumulate.itemsize
        run = _InFlight(x, root, op, size, leaders(self._nodes, root), direct)
        small = x.nbytes <= SMALL_BYTES
        place = self._allocator.find(x.address, x.nbytes) if x.size else None
        entry = Entry("reduce", x.dtype.name, op.name, root, x.size, factor=op.factor)
        if self._ranks > 1 and self._memory is None:
            self._meetings.meet(entry, None)  # so that none waits for the others' memory while they are elsewhere
            self._reserve()
        turn = (self._small + 1) % _SMALL_SLOTS
        if small and x.size and self._rank != run.heads[self._node]:
            self._small_slot(x, self._local, turn)[:] = x.flat
        meeting = self._meetings.meet(entry, None if small else place)
        run.factors = meeting.factors
        if small:
            self._small = turn  # not where the ranks turn out to be in different operations
            self._reduce_small(run)
            return
        run.sources = readable(meeting, x)
        for tick in range(run.segments + 2):
            self._tick(run, tick)

    def _reduce_small(self, run: _InFlight) -> None:
        if self._rank != run.heads[self._node] or not run.x.size:
            return
        peers, turn = range(self._ranks), self._small
        inputs = [run.x.flat if peer == self._local else self._small_slot(run.x, peer, turn) for peer in peers]
        sums = run.x.flat if self._is_sum(run) else self._take(run, "small", run.x.size)
        if not self._is_sum(run):
            partial_of(run.op).combine(inputs, [sums], run.x.dtype, run.factors, self._scratch)
        self._begin(run, 0, sums)
        self._end(run, 0)

    def _tick(self, run: _InFlight, tick: int) -> None:
        """Runs one tick of the pipeline: what can begin a message comes before what waits for one."""
        combines = 0 < tick <= run.segments
        copies = tick < run.segments and run.sources is None and self._ranks > 1
        if copies:
            self._copy_in(run, tick)
        if combines:
            self._combine(run, tick - 1)
        if copies or (combines and self._ranks > 1):
            self._meetings.barrier()
        if self._rank != run.heads[self._node]:
            return
        if combines:
            self._begin(run, tick - 1, self._sum(run, tick - 1))
        if tick >= 2:
            self._end(run, tick - 2)

    # ---- stages -----------------------------------------------------------------------------------------------

    def _copy_in(self, run: _InFlight, segment: int) -> None:
        low, high = run.range(segment)
        slot = self._slot(run, segment, self._local)
        for peer, (start, stop) in enumerate(self._slices(high - low)):
            if peer != self._local:
                slot[start:stop] = run.x.flat[low + start : low + stop]

    def _combine(self, run: _InFlight, segment: int) -> None:
        if self._is_sum(run):
            return
        low, high = run.range(segment)
        start, stop = self._slices(high - low)[self._local]
        own = run.x.flat[low + start : low + stop]
        if run.sources is not None:
            inputs = [source[low + start : low + stop] for source in run.sources]
        else:
            peers = range(self._ranks)
            inputs = [own if peer == self._local else self._slot(run, segment, peer)[start:stop] for peer in peers]
        target = self._sum(run, segment)[start:stop]
        partial_of(run.op).combine(inputs, [target], run.x.dtype, run.factors, self._scratch)

    def _begin(self, run: _InFlight, segment: int, own: Array) -> None:
        """Begins the messages of a segment. own: this node's sum of it."""
        if self._rank != run.root:
            run.requests[segment] = [self._comm.Isend([own, MPI.BYTE], run.root, _TAG)]
            return
        memory = self._take(run, f"sums {segment % 2}", len(self._nodes) * own.size)
        sums = [memory[node * own.size : (node + 1) * own.size] for node in range(len(self._nodes))]
        run.requests[segment] = [
            self._comm.Irecv([sums[node], MPI.BYTE], head, _TAG)
            for node, head in enumerate(run.heads)
            if node != self._node
        ]
        sums[self._node] = own
        run.sums[segment] = sums

    def _end(self, run: _InFlight, segment: int) -> None:
        """Waits for the messages of a segment; the root adds what has come."""
        wait_all(run.requests.pop(segment))
        if self._rank != run.root:
            return
        out, sums = run.x.part(*run.range(segment)), run.sums.pop(segment)
        if run.direct:
            run.op.combine(sums, [out.flat], run.x.dtype, run.factors, self._scratch)
        else:
            add(run.op, sums, out, self._comm.Get_size())

    # ---- memory -----------------------------------------------------------------------------------------------

    def _is_sum(self, run: _InFlight) -> bool:
        """Returns whether this rank's x is its node's sum as it travels."""
        return run.direct or (self._ranks == 1 and not run.op.premultiplied and not run.x.dtype.widened)

    def _slices(self, size: int) -> list[tuple[int, int]]:
        return ranges(even_counts(size, self._ranks))

    def _sum(self, run: _InFlight, segment: int) -> Array:
        """The memory of this node's sum of a segment: the leader's, which the node shares."""
        low, high = run.range(segment)
        if self._is_sum(run):
            return run.x.flat[low:high]
        if self._ranks == 1:
            return self._take(run, f"own {segment % _SUMS}", high - low)
        assert self._memory is not None
        start = _SLOTS * SEGMENT_BYTES + segment % _SUMS * SEGMENT_BYTES
        head = self._members.index(run.heads[self._node])
        return self._memory.view(head, start, high - low, run.travels)

    def _slot(self, run: _InFlight, segment: int, rank: int) -> Array:
        """The shared memory for a local rank's segment."""
        assert self._memory is not None
        return self._memory.view(rank, segment % _SLOTS * SEGMENT_BYTES, run.size, run.x.dtype.storage)

    def _small_slot(self, x: Buffer, rank: int, turn: int) -> Array:
        """The shared memory for all of a local rank's x."""
        assert self._memory is not None
        start = (_SLOTS + _SUMS) * SEGMENT_BYTES + turn * SMALL_BYTES
        return self._memory.view(rank, start, x.size, x.dtype.storage)

    def _take(self, run: _InFlight, purpose: str, size: int) -> Array:
        return self._scratch.take(f"reduce {purpose}", size * run.travels.itemsize).view(run.travels)

    def _reserve(self) -> None:
        """Makes the shared memory. Collective over the node."""
        nbytes = (_SLOTS + _SUMS) * SEGMENT_BYTES + _SMALL_SLOTS * SMALL_BYTES
        self._memory = self._allocator.require(nbytes)
