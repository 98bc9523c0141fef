"""all_to_all, gather and scatter over several nodes, by the channels of `algorithms.hierarchical`.

A channel's parts lie one behind the other in its message, which is cut into segments. Segments go through the memory
that a node shares, some of them at a time, so that its size is bounded, whatever the operation's:

    put        ranks write what they have of it into the sender's memory         segment t
    message    from sender to receiver; two of a channel are under way together          t, t - 1
    get        ranks read what is for them from the receiver's memory                    t - 2

The ranks of a node wait for each other between a put and its message, and between a message and its get. If every rank
knows the sizes of all parts, and the shared memory is free, the barrier with which the operation begins is also the
first of these waits. For an all_to_all with parts of different sizes the ranks exchange the sizes there, in a table in
the shared memory.

A node waits for other nodes only in messages, which both ends start in the order of segments. A message starts when the
messages two segments before it are complete. So the oldest incomplete message has started, or will start, on both ends:
no two nodes wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

from ...base.buffers import Buffer, copy
from ...base.partition import Splits
from ...memory.shared_memory import Allocator, SharedMemory
from ...process.idle_wait import wait_all
from ...schedules.algorithms.hierarchical import NodeChannel, Nodes, channels, keeps_own, most_channels
from ..backend import Call
from ..meeting import Entry, Meeting, Meetings, check_parts

Array = np.ndarray[Any, Any]

_TURN_BYTES = 2 << 20  # of each rank's memory for the segments of one tick
LARGEST_SEGMENT, SMALLEST_SEGMENT = 1 << 20, 4 << 10  # bytes of a segment
_ALIGNMENT = 64
_TURNS = 3  # a segment is put while one is in its message and another is read
_TABLES = 2  # so that a rank that is one operation ahead overwrites nothing that another still reads
_TAG = 5
_AHEAD = 2  # ticks from a put to the get


@dataclass
class _Tick:
    """The work of one rank in one step of an operation.

    puts, gets: targets and sources of copies; gets from other ranks' messages wait for those two ticks older.
    own: copies from memory that was put in this tick.
    sends, receives: messages and their other ends.
    meets: the node's ranks wait for each other between the puts and the rest.
    """

    puts: list[tuple[Array, Array]] = field(default_factory=list)
    own: list[tuple[Array, Array]] = field(default_factory=list)
    gets: list[tuple[Array, Array]] = field(default_factory=list)
    sends: list[tuple[Array, int]] = field(default_factory=list)
    receives: list[tuple[Array, int]] = field(default_factory=list)
    meets: bool = False


@dataclass(frozen=True)
class _Held:
    """A channel, and the places of its segments in the memory of its sender and its receiver."""

    channel: NodeChannel
    leaving: int
    arriving: int


class NodeMovements:
    """The movements of one group, as one of its ranks sees them.

    comm: of the group.
    nodes: its ranks on each node.
    meetings, allocator: of this node's ranks.
    """

    def __init__(self, comm: MPI.Intracomm, nodes: Nodes, meetings: Meetings, allocator: Allocator) -> None:
        self.comm, self.nodes, self.meetings = comm, nodes, meetings
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.node = next(number for number, members in enumerate(nodes) if self.rank in members)
        self.members = nodes[self.node]
        self.local = {rank: number for number, rank in enumerate(self.members)}
        self._allocator = allocator
        self._memory: SharedMemory | None = None
        self._turn_bytes = max(_TURN_BYTES, 2 * len(nodes) * SMALLEST_SEGMENT)
        self._table_bytes = -(-2 * self.size * 8 // _ALIGNMENT) * _ALIGNMENT
        self.turn = 0  # of the next segment
        # A rank may begin the next operation while others still read the last segments of the one before. If that had
        # one segment, the next one's first takes other memory.
        self.may_put_early = True
        self._tables = 0
        self._known: dict[tuple[str, int], list[_Held]] = {}

    def all_to_all(self, out: Buffer, x: Buffer, splits: Splits) -> Call:
        """Sends a part from each rank to each."""
        return _Movement(self, "all_to_all", x, out, 0, splits.send_counts, splits.recv_counts, known=splits.uniform)

    def gather(self, out: Buffer | None, x: Buffer, root: int, counts: Sequence[int]) -> Call:
        """Sends a part from each rank to the root."""
        arriving = counts if self.rank == root else [0] * self.size
        return _Movement(self, "gather", x, out, root, counts, arriving, known=True)

    def scatter(self, out: Buffer, x: Buffer | None, root: int, counts: Sequence[int]) -> Call:
        """Sends a part from the root to each rank."""
        return _Movement(self, "scatter", x, out, root, counts, counts, known=True)

    def held(self, operation: str, root: int) -> list[_Held]:
        """This node's channels, with their places in the memory of the ranks that hold them."""
        if (operation, root) not in self._known:
            self._known[operation, root] = self._find(operation, root)
        return self._known[operation, root]

    def _find(self, operation: str, root: int) -> list[_Held]:
        used = dict.fromkeys(self.members, 0)

        def place(rank: int, wanted: bool) -> int:
            if not wanted or rank not in used:
                return -1
            used[rank] += 1
            return used[rank] - 1

        found = []
        for one in channels(operation, self.nodes, root, self.node):
            leaving = place(one.sender, one.is_put)
            found.append(_Held(one, leaving, leaving if one.is_local else place(one.receiver, one.is_got)))
        return found

    def segment_bytes(self, operation: str, root: int) -> int:
        """Bytes of a segment of each channel; the same on all ranks."""
        share = self._turn_bytes // most_channels(operation, self.nodes, root)
        return min(share, LARGEST_SEGMENT) // _ALIGNMENT * _ALIGNMENT

    def segment(self, rank: int, place: int, turn: int, nbytes: int, dtype: np.dtype[Any]) -> Array:
        """The memory of a rank of this node for a segment of a channel."""
        start = _TABLES * self._table_bytes + turn * self._turn_bytes + place * nbytes
        return self._view(rank, start, nbytes // dtype.itemsize, dtype)

    def exchange_sizes(self, sizes: Array, publish: Callable[[], None]) -> Array:
        """All local ranks' sizes, as rows. publish: the meeting, before which this rank writes its own. Collective."""
        table = (self._tables + 1) % _TABLES
        start, dtype = table * self._table_bytes, np.dtype(np.int64)
        self._view(self.rank, start, sizes.size, dtype)[:] = sizes
        publish()
        self._tables = table  # not where the ranks turn out to be in different operations
        return np.stack([self._view(rank, start, sizes.size, dtype) for rank in self.members])

    def advance(self, segments: int) -> None:
        """Takes the turns of an operation's segments. The same on all ranks of the node."""
        self.turn = (self.turn + segments) % _TURNS
        self.may_put_early = segments <= 1

    @property
    def has_memory(self) -> bool:
        """Returns whether there is memory for segments; the same on all ranks of the node."""
        return self._memory is not None

    def reserve(self) -> None:
        """Makes the memory for segments. Collective over the node."""
        self._memory = self._allocator.require(_TABLES * self._table_bytes + _TURNS * self._turn_bytes)

    def _view(self, rank: int, start: int, size: int, dtype: np.dtype[Any]) -> Array:
        """Elements of a local rank's part of the memory, from byte `start` of it."""
        assert self._memory is not None
        return self._memory.view(self.local[rank], start, size, dtype)


class _Movement:
    """A movement of given arrays, to be called any number of times. Collective.

    leaving, arriving: elements of the parts of x for each rank and of out from each; of gather and scatter those of
        every rank.
    known: this rank knows from them how large all parts are that go through its node.

    What is worked out is kept for the next call: the ticks for each turn that they may begin with.
    """

    def __init__(
        self,
        group: NodeMovements,
        operation: str,
        x: Buffer | None,
        out: Buffer | None,
        root: int,
        leaving: Sequence[int],
        arriving: Sequence[int],
        *,
        known: bool,
    ) -> None:
        some = x or out
        assert some is not None
        self._group, self._operation, self._root, self._dtype = group, operation, root, some.dtype
        self._x, self._out = (None if data is None else data.flat for data in (x, out))
        self._row = group.meetings.pack(Entry(operation, some.dtype.name, root=root), None)
        self._seen = b""
        self._held = group.held(operation, root)
        self._needs_memory = not known or any(held.leaving >= 0 or held.arriving >= 0 for held in self._held)
        self._bytes = group.segment_bytes(operation, root)
        self._sizes = None if known else np.array([*leaving, *arriving], np.int64)
        self._table: Array | None = None
        self._leaving, self._arriving = leaving, arriving
        # Where the part for each rank begins in x, and the one from each in out; one that is alone there at 0.
        self._x_starts = (0,) * group.size if operation == "gather" else (0, *accumulate(leaving))
        self._out_starts = (0,) * group.size if operation == "scatter" else (0, *accumulate(arriving))
        self._made: dict[int, list[_Tick]] = {}

    def __call__(self) -> None:
        """Carries it out. Raises MismatchError on all ranks of the node if they are in different operations."""
        group = self._group
        if self._needs_memory and not group.has_memory:
            self._meet()  # so that none waits for the others' memory while they are in another operation
            group.reserve()
        early = self._sizes is None and group.may_put_early
        if self._sizes is None:
            ticks = self._ticks(group.turn)
            if early and ticks:
                _copy_all(ticks[0].puts)
            self._meet()
        else:
            self._learn(group.exchange_sizes(self._sizes, self._meet))
            ticks = self._ticks(group.turn)
        if ticks and not early:
            _copy_all(ticks[0].puts)
            if ticks[0].meets:
                group.meetings.barrier()
        group.advance(max(0, len(ticks) - _AHEAD))
        self._run(ticks)

    def _run(self, ticks: list[_Tick]) -> None:
        """Runs all ticks, the first one from where its puts are there."""
        group = self._group
        under_way: list[list[MPI.Request]] = []
        for number, tick in enumerate(ticks):
            if number:
                _copy_all(tick.puts)
            if number >= _AHEAD and under_way[number - _AHEAD]:
                wait_all(under_way[number - _AHEAD])
            if number and tick.meets:
                group.meetings.barrier()
            under_way.append(
                [group.comm.Irecv([target, MPI.BYTE], peer, _TAG) for target, peer in tick.receives]
                + [group.comm.Isend([source, MPI.BYTE], peer, _TAG) for source, peer in tick.sends]
            )
            if not number:
                self._copy_own()
            _copy_all(tick.own)
            _copy_all(tick.gets)
        if not ticks:
            self._copy_own()

    def _meet(self) -> None:
        group = self._group
        seen = group.meetings.publish(self._row)
        if seen != self._seen:
            Meeting(seen, group.meetings.names, None, None)  # raises where the rows do not fit each other
            self._seen = seen

    def _learn(self, table: Array) -> None:
        """Takes the sizes of the local ranks' parts. Raises MismatchError on all of them if they do not fit."""
        if self._table is not None and np.array_equal(self._table, table):
            return
        group, self._made = self._group, {}
        leaving, arriving = table[:, : group.size], table[:, group.size :]
        given, taken = leaving[:, list(group.members)], arriving[:, list(group.members)].T
        check_parts(self._operation, given, taken, group.meetings.names)
        self._table = table

    def _count(self, source: int, destination: int) -> int:
        """Elements of a part that goes through this node."""
        if self._operation != "all_to_all":
            return self._leaving[source if self._operation == "gather" else destination]
        if self._table is None:
            return self._leaving[0]
        here, size = self._group.local, self._group.size
        if source in here:
            return int(self._table[here[source], destination])
        return int(self._table[here[destination], size + source])

    # ---- from channels to ticks -------------------------------------------------------------------------------

    def _ticks(self, turn: int) -> list[_Tick]:
        found = self._made.get(turn)
        if found is None:
            found = self._made[turn] = self._work_out(turn)
        return found

    def _work_out(self, turn: int) -> list[_Tick]:
        """The ticks of an operation whose first segments take this turn in memory; as many on all ranks of the node."""
        sizes = [[self._count(*part) for part in held.channel.parts] for held in self._held]
        size = self._bytes // self._dtype.itemsize
        segments = max((-(-sum(parts) // size) for parts in sizes), default=0)
        ticks = [_Tick() for _ in range(segments + _AHEAD)] if segments else []
        for held, parts in zip(self._held, sizes, strict=True):
            if sum(parts):
                self._add(ticks, held, parts, size, turn)
        return ticks

    def _add(self, ticks: list[_Tick], held: _Held, parts: list[int], size: int, turn: int) -> None:
        """Adds this rank's share of a channel to the ticks.

        parts: their elements.
        size: of a segment.
        """
        one, me = held.channel, self._group.rank
        starts = (0, *accumulate(parts))
        here, there = one.sender in self._group.local, one.receiver in self._group.local
        ready = 0 if one.is_local else _AHEAD  # ticks from a segment's put to its get
        for (source, destination), (start, stop) in zip(one.parts, pairwise(starts), strict=True):
            if one.is_put and source == me:
                assert self._x is not None
                mine = self._x[self._x_starts[destination] :]
                for segment, low, high in _segments(start, stop, size):
                    target = self._segment(one.sender, held.leaving, segment, turn)
                    first = segment * size
                    ticks[segment].puts.append((target[low - first : high - first], mine[low - start : high - start]))
            if one.is_got and destination == me:
                assert self._out is not None
                mine = self._out[self._out_starts[source] :]
                for segment, low, high in _segments(start, stop, size):
                    memory = self._segment(one.receiver, held.arriving, segment, turn)
                    first = segment * size
                    copied = mine[low - start : high - start], memory[low - first : high - first]
                    (ticks[segment].own if one.is_local else ticks[segment + ready].gets).append(copied)
        for segment, low, high in _segments(0, starts[-1], size):
            if here and one.is_put and (one.is_local or any(source != one.sender for source, _ in one.parts)):
                ticks[segment].meets = True
            if there and one.is_got and any(destination != one.receiver for _, destination in one.parts):
                ticks[segment + ready].meets = True
            if not one.is_local and one.sender == me:
                ticks[segment].sends.append((self._leaving_segment(held, segment, low, high, turn), one.receiver))
            if not one.is_local and one.receiver == me:
                ticks[segment].receives.append((self._coming_segment(held, segment, low, high, turn), one.sender))

    def _leaving_segment(self, held: _Held, segment: int, low: int, high: int, turn: int) -> Array:
        one = held.channel
        if one.is_put:
            return self._segment(one.sender, held.leaving, segment, turn)[: high - low]
        assert self._x is not None
        first = self._x_starts[one.parts[0][1]]
        return self._x[first + low : first + high]

    def _coming_segment(self, held: _Held, segment: int, low: int, high: int, turn: int) -> Array:
        one = held.channel
        if one.is_got:
            return self._segment(one.receiver, held.arriving, segment, turn)[: high - low]
        assert self._out is not None
        first = self._out_starts[one.parts[0][0]]
        return self._out[first + low : first + high]

    def _segment(self, rank: int, place: int, segment: int, turn: int) -> Array:
        return self._group.segment(rank, place, (turn + segment) % _TURNS, self._bytes, self._dtype.storage)

    def _copy_own(self) -> None:
        """Copies the part that a rank has for itself, if it does not lie at its place already."""
        me = self._group.rank
        if not keeps_own(self._operation, me, self._root) or self._x is None or self._out is None:
            return
        source = self._x[self._x_starts[me] :][: self._count(me, me)]
        if source.size:
            copy(source, self._out[self._out_starts[me] :][: source.size])


def _segments(start: int, stop: int, size: int) -> Iterator[tuple[int, int, int]]:
    """The segments that elements start <= i < stop of a message lie in, and which of these lie in each."""
    for segment in range(start // size, -(-stop // size)) if stop > start else ():
        yield segment, max(start, segment * size), min(stop, (segment + 1) * size)


def _copy_all(copies: Sequence[tuple[Array, Array]]) -> None:
    for target, source in copies:
        np.copyto(target, source)
