"""The positions of a node's ranks: a page of shared memory on which every rank writes the operation that it is in.

It can be read at any time and without any rank's help, also while a rank is stuck; the watchdog does.

    rank 0 | rank 1 | ...       each: number and kind of its collective, whether it is still in it, and in which
                                thread; the same of its last wait for a message; a beat, which goes on as long as its
                                process runs
    rank 0 | rank 1 | ...       each: what its collective works with, in words
    rank 0 | rank 1 | ...       each: what its program does, in words, as of its watchdog's last look
    sleepers                    see Counters
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..memory.counters import STRIDE, Counters

if TYPE_CHECKING:
    from ..memory.shared_memory import SharedMemory

OPERATIONS = (
    "nothing",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "split",
    "empty",
    "shared",
    "pages",
    "partitioned_all_reduce",
    "compound",
    "close",
    "send",
    "recv",
    "probe",
    "scan",
    "exscan",
    "the end of its program",
)
CODES = {name: code for code, name in enumerate(OPERATIONS)}
END = OPERATIONS[-1]
ANY = -1  # as the peer of a message: the one that comes first
AFTER, _INSIDE, _QUEUED, _FAILED = range(4)  # where a rank is: inside in the program's thread, or in another one
_COLLECTIVE = struct.Struct("3q")
_MESSAGE = struct.Struct("4q")
_BEAT = struct.Struct("q")
_WIDTH = _COLLECTIVE.size + _MESSAGE.size + _BEAT.size
assert _WIDTH == STRIDE
_WORDS = 64  # bytes
_PROGRAM = 128  # bytes
NO_WORDS = bytes(_WORDS)


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a rank: in (or, if not inside, after) the collective of that number, and maybe in a message, too.

    queued: it runs in the progress thread, and the program may go on meanwhile.
    failed: it was left by an exception.
    detail: what it works with, which must fit on all ranks, in words that follow the operation; may be empty.
    waits: how many waits for messages it has begun.
    message: "send", "recv" or "probe", with `peer` (may be ANY), if it is waiting for one.
    beat: how often its watchdog has looked.
    place, phase: what its program does (`program`). At the end of its program `peer` is the status with which it exits,
        as far as is known.
    """

    number: int
    operation: str
    inside: bool
    waits: int = 0
    message: str | None = None
    peer: int = 0
    beat: int = field(default=0, compare=False)
    queued: bool = field(default=False, compare=False)
    failed: bool = False
    detail: str = field(default="", compare=False)
    place: str = field(default="", compare=False)
    phase: str = field(default="", compare=False)

    @property
    def status(self) -> int:
        """The exit status of a rank at the end of its program; 0 for the others."""
        return self.peer if self.operation == END else 0

    def waits_for(self, rank: int) -> bool:
        """Returns whether it waits for a message to or from the rank, or for one from any rank."""
        return self.message is not None and self.peer in (rank, ANY)

    def renumbered(self, numbers: Sequence[int]) -> Position:
        """Returns the position with another number for the peer of its message. numbers: of each rank of the group."""
        return replace(self, peer=numbers[self.peer]) if self.message and self.peer != ANY else self

    @property
    def message_text(self) -> str:
        """Describes the message that it waits for: "recv from rank 1"."""
        other = "any rank" if self.peer == ANY else f"rank {self.peer}"
        return f"{self.message} {'to' if self.message == 'send' else 'from'} {other}"

    @property
    def description(self) -> str:
        """Describes the position, in words that follow "is" or "was"."""
        if self.message:
            return f"in {self.message_text}"
        if not self.number:
            return "before its first operation"
        if self.operation == END:
            status = f" with status {self.status}" if self.status else ""
            last = f"an exception in operation {self.number}" if self.failed else f"{self.number - 1} operations"
            return f"at {END}{status}, after {last}"
        if self.failed:
            return f"out of {self.operation} (operation {self.number}), by an exception"
        return f"{'in' if self.inside else 'after'} {self.operation} (operation {self.number})"

    def __str__(self) -> str:
        return f"is {self.description}"


class Positions:
    """The page of one group's ranks on one node, as seen by one of them.

    memory: shared by these ranks, `Positions.nbytes(ranks)` long and zero at first; private to this rank where there is
        no shared memory, and then of no use to others.
    oversubscribed: whether the node has more ranks than cores.

    state: a number that says whether this rank is in an operation; `leave` sets it to AFTER.
    """

    def __init__(
        self, memory: SharedMemory | bytearray, rank: int, ranks: int, *, oversubscribed: bool = False
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self._memory = memory
        self._entered = Counters(memory, 0, self.nbytes_seen(ranks), rank, ranks, oversubscribed=oversubscribed)
        start = rank * _WIDTH
        words = ranks * _WIDTH + rank * _WORDS
        self._words, self._written = slice(words, words + _WORDS), NO_WORDS
        program = ranks * (_WIDTH + _WORDS) + rank * _PROGRAM
        self._program = slice(program, program + _PROGRAM)
        own = memoryview(memory)[start : start + _WIDTH].cast("q")
        self._collective, self._message, self._beat = own[:3], own[3:7], own[7:]
        self.state = own[2:3]
        self._waits = 0

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Bytes of memory that it needs."""
        return Positions.nbytes_seen(ranks) + Counters.nbytes_of_sleepers(ranks)

    @staticmethod
    def nbytes_seen(ranks: int) -> int:
        """Bytes of it, from its begin on, that `decode` needs."""
        return ranks * (_WIDTH + _WORDS + _PROGRAM)

    @property
    def shared(self) -> bool:
        """Returns whether the node's ranks see each other's."""
        return not isinstance(self._memory, bytearray)

    def beat(self, place: str = "", phase: str = "") -> None:
        """Shows that this rank's process runs, and what its program does."""
        self._memory[self._program] = _filled(f"{place}\n{phase}", _PROGRAM)
        self._beat[0] += 1

    def enter(self, number: int, operation: str, detail: bytes = NO_WORDS, queued: bool = False) -> None:
        """Notes that this rank begins an operation.

        queued: it runs in the progress thread.
        detail: from `words`.
        """
        collective = self._collective
        collective[2] = AFTER
        collective[1] = CODES[operation]
        self._memory[self._words] = self._written = detail
        self._entered.advance(number)
        collective[2] = _QUEUED if queued else _INSIDE

    def entering(self, operation: str, detail: bytes) -> Callable[[int], None]:
        """Returns `enter` for an operation that is made again and again in the program's thread, given its number.

        This rank must be in no operation.
        """
        memory, collective, of_words = self._memory, self._collective, self._words
        code, advance = CODES[operation], self._entered.advance

        def enter(number: int) -> None:
            collective[1] = code
            if detail is not self._written:
                memory[of_words] = self._written = detail
            advance(number)
            collective[2] = _INSIDE

        return enter

    def native_arguments(self, operation: str) -> dict[str, Any]:
        """Lists what `native.AtOnce` notes an operation with: this rank's row and words, its code, Numbers."""
        words = memoryview(self._memory)[self._words]
        return {"row": self._collective, "words": words, "code": CODES[operation], "numbers": self._entered.in_c}

    def leave(self, *, failed: bool = False) -> None:
        """Notes that this rank has ended the operation. failed: by an exception."""
        self._collective[2] = _FAILED if failed else AFTER

    def wait_for_all(self, number: int) -> None:
        """Returns when every rank of the node has come to the operation of that number, or past it; see Counters."""
        self._entered.wait_for_all(number)

    def has_come(self, rank: int) -> bool:
        """Returns whether that rank of the node has come to the operation that this one is in, or past it."""
        return self._entered.of(rank) >= self._collective[0]

    def end(self, status: int = 0) -> None:
        """Notes that this rank's program has ended with an exit status: it comes to no further operation.

        It has come past the last one, unless that has failed, in which others may still wait for it.
        """
        self._message[2], self._message[3] = 0, status
        number, self._collective[1] = self._collective[0], CODES[END]
        if self._collective[2] == _FAILED:
            self._entered.advance(number)
        else:
            self._collective[2] = AFTER
            self._entered.advance(number + 1)

    @contextmanager
    def waiting(self, message: str, peer: int) -> Iterator[None]:
        """Context in which this rank waits for a "send" to, or a "recv" or "probe" from, the peer; it may be ANY."""
        self._waits += 1
        own = self._message
        own[0], own[1], own[3] = self._waits, CODES[message], peer
        own[2] = 1
        try:
            yield
        finally:
            own[2] = 0

    def all(self) -> list[Position]:
        """The positions of the node's ranks."""
        return [self._read(self._memory, rank, self.ranks) for rank in range(self.ranks)]

    def snapshot(self) -> bytes:
        """The page as it is now, to be sent to another node."""
        return bytes(self._memory[: self.nbytes_seen(self.ranks)])

    @classmethod
    def decode(cls, snapshot: bytes) -> list[Position]:
        """Decodes what `snapshot` gave on another node."""
        ranks = len(snapshot) // cls.nbytes_seen(1)
        return [cls._read(snapshot, rank, ranks) for rank in range(ranks)]

    @staticmethod
    def _read(memory: SharedMemory | bytearray | bytes, rank: int, ranks: int) -> Position:
        number, code, state = _COLLECTIVE.unpack_from(memory, rank * _WIDTH)
        waits, message, waiting, peer = _MESSAGE.unpack_from(memory, rank * _WIDTH + _COLLECTIVE.size)
        (beat,) = _BEAT.unpack_from(memory, (rank + 1) * _WIDTH - _BEAT.size)
        kind = OPERATIONS[message] if waiting else None
        detail = _text(memory, ranks * _WIDTH + rank * _WORDS, _WORDS)
        place, _, phase = _text(memory, ranks * (_WIDTH + _WORDS) + rank * _PROGRAM, _PROGRAM).partition("\n")
        return Position(
            number,
            OPERATIONS[code],
            state in (_INSIDE, _QUEUED),
            waits,
            kind,
            peer,
            beat,
            queued=state == _QUEUED,
            failed=state == _FAILED,
            detail=detail,
            place=place,
            phase=phase,
        )


def words(text: str) -> bytes:
    """The words that a rank writes of its operation, cut to the room that there is."""
    return _filled(text, _WORDS)


def _filled(text: str, nbytes: int) -> bytes:
    return text.encode(errors="replace")[:nbytes].ljust(nbytes, b"\0")


def _text(memory: SharedMemory | bytearray | bytes, start: int, nbytes: int) -> str:
    return bytes(memory[start : start + nbytes]).rstrip(b"\0").decode(errors="replace")


def group_name(ranks: Sequence[int], world: int, name: str = "") -> str:
    """Names a communicator of these ranks of the world, which has so many. name: the one that it was given, if any."""
    is_world = list(ranks) == list(range(world))
    if name:
        return f"communicator {name!r}" if is_world else f"communicator {name!r} of {listing(sorted(ranks))}"
    return "this communicator" if is_world else f"the communicator of {listing(sorted(ranks))}"


def listing(ranks: Sequence[int]) -> str:
    """Ranks in words: "rank 3", "ranks 0, 1, 5"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
