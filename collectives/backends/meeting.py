"""The meeting of a node's ranks, with which every one-copy collective begins.

Each rank writes a row that says what it is about to do and where its arrays lie, and after a barrier every rank reads
all rows. All of them see the same, so that they take the same way, and raise the same error where the rows do not fit
each other.

    rows A      rank 0 | rank 1 | ...          meetings take turns between A and B, so that a rank that is one
    rows B      rank 0 | rank 1 | ...          meeting ahead writes nothing that a slower one still reads
"""

from __future__ import annotations

import struct
import zlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..base.buffers import DTYPES, Buffer
from ..base.float_errors import Runner
from ..base.reduction import KERNELS
from ..errors import MismatchError
from ..memory.counters import Barrier
from ..memory.shared_memory import SharedMemory
from ..native import compiled
from ..runtime.positions import CODES, OPERATIONS, listing
from ..schedules.algorithms import ROOTED

Array = np.ndarray[Any, Any]
Ranges = Sequence[tuple[int, int]]  # elements start <= i < stop, for each rank
UNEVEN = ("all_to_all", "gather", "scatter")  # of which each rank may have another size
_DTYPES = tuple(DTYPES)
_OPS = ("none", *KERNELS)
_DTYPE_CODES = {name: code for code, name in enumerate(_DTYPES)}
_OP_CODES = {name: code for code, name in enumerate(_OPS)}
_ROW = struct.Struct("13qd")
# Fields of a row: what must agree (an Entry), then allocation and place of x, of out; their addresses; flags; factor.
_X, _OUT, _ADDRESSES, _FLAGS, _FACTOR = 6, 8, 10, 12, 13
_FILLED, _SHARED = 1, 2  # flags
_RANGES = 4 * 8  # bytes for each rank: start and length of what goes there and of what comes from there


class MeetsInMemory(ABC):
    """A collective call that begins with a meeting in shared memory.

    So its Issuer need not wait for the node's ranks first.
    """

    @abstractmethod
    def __call__(self) -> Any:
        """Carries it out. Collective."""

    def native_call(self, runner: Runner | None) -> Callable[[], None] | None:
        """Makes the call in C; None where C cannot make it. runner: runs what it calls in Python."""
        return None


if compiled is not None:
    MeetsInMemory.register(compiled.OneCopy)


class Entry(NamedTuple):
    """The operation that a rank is about to run.

    elements: of the array that has one size on all ranks; 0 where there is none.
    parts: a number made of the counts by which that is cut (`parts_of`); 0 where it is not cut.
    factor: of this rank's contribution to a premultiplied sum; ranks may have different ones. All other fields must
        agree.
    """

    operation: str
    dtype: str
    op: str = "none"
    root: int = 0
    elements: int = 0
    parts: int = 0
    factor: float = 1.0

    def __str__(self) -> str:
        op = "" if self.op == "none" else f" {self.op}"
        root = f" root {self.root}" if self.operation in ROOTED else ""
        return f"{self.operation}{op} of {self.elements} {self.dtype}{root}"


def parts_of(counts: Sequence[int]) -> int:
    """A checksum of counts, by which ranks notice that theirs differ; never 0."""
    return 1 + zlib.crc32(np.array(counts, np.int64).tobytes())


class Meetings:
    """One group's rows, as seen by one of its ranks.

    memory: shared by the group's ranks, theirs from byte `start` on for `Meetings.nbytes(ranks)` bytes.
    barrier: of the group's ranks.
    names: by which errors name the group's ranks, from `topology.reported_ranks`.
    """

    def __init__(
        self, memory: SharedMemory, start: int, rank: int, names: Sequence[int], barrier: Callable[[], Any]
    ) -> None:
        ranks = len(names)
        self.rank, self.ranks, self.names, self.barrier = rank, ranks, names, barrier
        self._memory = memory
        heads, ranges = ranks * _ROW.size, ranks * ranks * _RANGES
        turns = [start, start + heads + ranges]
        self._heads = [slice(turn, turn + heads) for turn in turns]
        self._ranges = [slice(turn + heads, turn + heads + ranges) for turn in turns]
        self._head = [slice(turn + rank * _ROW.size, turn + (rank + 1) * _ROW.size) for turn in turns]
        width = ranks * _RANGES
        self._range = [slice(s.start + rank * width, s.start + (rank + 1) * width) for s in self._ranges]
        self._turn = array("q", [0])  # of the next meeting

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Bytes of memory that it needs."""
        return 2 * ranks * (_ROW.size + ranks * _RANGES)

    @staticmethod
    def pack(
        entry: Entry,
        x: tuple[SharedMemory, int] | None,
        out: tuple[SharedMemory, int] | None = None,
        addresses: tuple[int, int] = (0, 0),
        filled: bool = False,
    ) -> bytes:
        """A rank's row.

        x, out: the allocation that its arrays lie in and their place in its part; None for other arrays.
        addresses: of x and out in its memory.
        filled: whether its first chunk is in the scratch already.
        """
        operation, dtype, op, root, elements, parts, factor = entry
        shared = any(place is not None and not place[0].stride for place in (x, out))
        return _ROW.pack(
            CODES[operation],
            _DTYPE_CODES[dtype],
            _OP_CODES[op],
            root,
            elements,
            parts,
            *((x[0].number, x[1]) if x else (0, 0)),
            *((out[0].number, out[1]) if out else (0, 0)),
            *addresses,
            filled * _FILLED | shared * _SHARED,
            factor,
        )

    @staticmethod
    def pack_ranges(leaving: Ranges, arriving: Ranges) -> bytes:
        """Packs the ranges of a movement's row: the offset and number of the elements for and from each rank."""
        own = np.array([leaving, arriving], np.int64)
        own[:, :, 1] -= own[:, :, 0]
        return own.transpose(0, 2, 1).tobytes()

    def publish(self, row: bytes, ranges: bytes = b"") -> bytes:
        """Waits for all ranks and returns all rows, and all ranges if this rank gives any, for `Meeting`."""
        turn = self._turn[0]
        self._turn[0] = 1 - turn
        memory = self._memory
        memory[self._head[turn]] = row
        if ranges:
            memory[self._range[turn]] = ranges
        self.barrier()
        return self.rows(turn, with_ranges=bool(ranges))

    def rows(self, turn: int, *, with_ranges: bool) -> bytes:
        """All rows of the last meeting, which was that of this turn, and all ranges behind them."""
        memory = self._memory
        return memory[self._heads[turn]] + memory[self._ranges[turn]] if with_ranges else memory[self._heads[turn]]

    @cached_property
    def native_arguments(self) -> dict[str, Any] | None:
        """The arguments of `native.OneCopy` with which it meets as these do; None where it cannot."""
        barrier = self.barrier.native_arguments if isinstance(self.barrier, Barrier) else None
        if barrier is None:
            return None
        heads, ranges = (tuple(piece.start for piece in pieces) for pieces in (self._heads, self._ranges))
        places = {"heads": heads, "ranges": ranges, "rank": self.rank, "row": _ROW.size, "ranks": self.ranks}
        return {**barrier, **places, "memory": self._memory, "turn": self._turn}

    def meet(self, entry: Entry, x: tuple[SharedMemory, int] | None) -> Meeting:
        """Waits for all ranks and returns what they are about to do. Raises MismatchError on all if that differs."""
        return Meeting(self.publish(self.pack(entry, x)), self.names, x[0] if x else None, None)


class Meeting:
    """All ranks' rows of one operation; equal on all of them. Raises MismatchError if they do not fit each other.

    rows: from `publish`, with ranges if `moves`.
    names: as of Meetings.
    inputs, outputs: the allocations of this rank's arrays.

    pull, push: whether all inputs, all outputs lie in one allocation, which all ranks map.
    shared: whether an array of any rank lies in memory that is one for all.
    filled: whether the first chunks of all ranks are in the scratch.
    """

    def __init__(
        self,
        rows: bytes,
        names: Sequence[int],
        inputs: SharedMemory | None,
        outputs: SharedMemory | None,
        moves: bool = False,
    ) -> None:
        ranks = len(names)
        self._table = [_ROW.unpack_from(rows, rank * _ROW.size) for rank in range(ranks)]
        self._ranges = np.frombuffer(rows, np.int64, -1, ranks * _ROW.size).reshape(ranks, -1) if moves else None
        self._ranks, self._names = ranks, names
        self._inputs, self._outputs = inputs, outputs
        self._check()
        self.pull = self._one_allocation(_X)
        self.push = self._one_allocation(_OUT)
        self.shared = any(row[_FLAGS] & _SHARED for row in self._table)
        self.filled = all(row[_FLAGS] & _FILLED for row in self._table)

    def _one_allocation(self, column: int) -> bool:
        first = self._table[0][column]
        return first > 0 and all(row[column] == first for row in self._table)

    @property
    def placed(self) -> bool:
        """Returns whether the input of any rank lies in an allocation."""
        return any(row[_X] for row in self._table)

    @property
    def shared_output(self) -> bool:
        """Returns whether all outputs are one and the same memory."""
        return (
            self.push
            and self._outputs is not None
            and not self._outputs.stride
            and OPERATIONS[self._table[0][0]] in ("all_gather", "broadcast")
            and len({row[_OUT + 1] for row in self._table}) == 1
        )

    @property
    def in_place(self) -> bool:
        """Returns whether every rank's input already lies at its place in the outputs."""
        itemsize = self._itemsize
        return self.pull and all(
            row[_X] == row[_OUT] and row[_X + 1] == row[_OUT + 1] + self.arriving(rank, rank) * itemsize
            for rank, row in enumerate(self._table)
        )

    def scatters_in_place(self, parts: Ranges) -> bool:
        """Returns whether every rank's output of a reduce_scatter lies at its place in its input, which all map."""
        itemsize = self._itemsize
        return self.pull and all(
            row[_ADDRESSES + 1] == row[_ADDRESSES] + start * itemsize or start == stop
            for row, (start, stop) in zip(self._table, parts, strict=True)
        )

    @property
    def _itemsize(self) -> int:
        return DTYPES[_DTYPES[self._table[0][1]]].itemsize

    @property
    def factors(self) -> list[float]:
        """The factor of each rank's contribution to a premultiplied sum."""
        return [row[_FACTOR] for row in self._table]

    def arrays(self, data: Buffer, outputs: bool) -> list[tuple[SharedMemory, int, int]]:
        """Each rank's allocation, the place of its array there, and the elements that are mapped from there."""
        memory = self._outputs if outputs else self._inputs
        assert memory is not None
        part = memory.stride or len(memory)
        starts = [row[_OUT + 1 if outputs else _X + 1] for row in self._table]
        return [(memory, start, (part - start) // data.dtype.itemsize) for start in starts]

    def addresses(self, outputs: bool) -> list[int]:
        """The address of each rank's array in its own memory."""
        return [row[_ADDRESSES + outputs] for row in self._table]

    def output(self, rank: int) -> tuple[int, int]:
        """The number of the allocation that a rank's output lies in, 0 for none, and its place there."""
        number, place = self._table[rank][_OUT : _OUT + 2]
        return number, place

    def leaving(self, rank: int, peer: int) -> int:
        """The offset in rank's input of the elements for the peer."""
        return self._range(rank, 0, peer)

    def arriving(self, rank: int, peer: int) -> int:
        """The offset in rank's output of the elements from the peer."""
        return self._range(rank, 2, peer)

    def elements(self, rank: int, peer: int) -> int:
        """The number of elements that go from rank's input to the peer's output."""
        return self._range(rank, 1, peer)

    def largest(self) -> int:
        """Elements of the largest part that goes from one rank to another or to itself."""
        return int(self._sizes(1).max())

    def _range(self, rank: int, block: int, peer: int) -> int:
        assert self._ranges is not None
        return int(self._ranges[rank, block * self._ranks + peer])

    def _sizes(self, block: int) -> np.ndarray[Any, Any]:
        assert self._ranges is not None
        return self._ranges[:, block * self._ranks : (block + 1) * self._ranks]

    def _check(self) -> None:
        first = self._table[0][:_X]
        if any(row[:_X] != first for row in self._table):
            if all(row[: _X - 1] == first[:-1] for row in self._table):
                others = [name for name, row in zip(self._names, self._table, strict=True) if row[:_X] != first]
                raise MismatchError(
                    f"{self._entry(0)}: got other counts on {listing(sorted(others))} than on rank {self._names[0]}"
                )
            raise MismatchError(differences([self._entry(rank) for rank in range(self._ranks)], self._names))
        if self._ranges is not None:
            check_parts(OPERATIONS[self._table[0][0]], self._sizes(1), self._sizes(3).T, self._names)

    def _entry(self, rank: int) -> Entry:
        code, dtype, op, root, elements, parts = self._table[rank][:_X]
        return Entry(OPERATIONS[code], _DTYPES[dtype], _OPS[op], root, elements, parts)


def check_parts(operation: str, given: Array, taken: Array, names: Sequence[int]) -> None:
    """Raises MismatchError unless every rank takes as many elements as it is given.

    given, taken: elements by giver (rows) and taker (columns).
    names: of the ranks.
    """
    if not np.array_equal(given, taken):
        giver, taker = np.argwhere(given != taken)[0]
        raise MismatchError(
            f"{operation}: rank {names[giver]} gives {given[giver, taker]} elements to rank {names[taker]}, "
            f"which takes {taken[giver, taker]}"
        )


def differences(entries: Sequence[Any], names: Sequence[int]) -> str:
    """One line that says which ranks are about to do what. names: of the ranks."""
    groups: dict[str, list[int]] = {}
    for rank, entry in sorted(zip(names, entries, strict=True), key=lambda pair: pair[0]):
        groups.setdefault(str(entry), []).append(rank)
    texts = [f"{listing(ranks)}: {what}" for what, ranks in groups.items()]
    return f"the ranks are in different operations: {'; '.join(texts)}"
