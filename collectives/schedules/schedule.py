"""The small language in which algorithms are written.

An algorithm sends nothing. It is a pure function of the number of ranks that returns a `Schedule`: for every rank
a list of *rounds*, and in every round the steps that the rank begins together and completes together.

Data lies in three buffers, each cut into numbered chunks:

    in      what the caller gave; never written
    work    in reductions: starts as a copy of `in` (in the accumulating dtype) and holds partial results; may have
            a second half, cut as the first one and undefined at first;
            in movements: starts undefined, room for what only passes through
    out     what the caller gets

and the steps are

    send(chunks, peer)              the chunks are sent to `peer`
    recv(chunks, peer)              the chunks are overwritten by what `peer` sends
    reduce(start, stop, peer)       work[start:stop] = work[start:stop] (op) what `peer` sends from its work
    copy(source, target)            local: one run of chunks to another
    finish(start, stop)             local: out[start:stop] = the finished work[start:stop] (averaged, rounded to the
                                    dtype)

where `chunks` are a run of one buffer.

Within a round everything happens at once, so no step may write what another one reads or writes, except in two cases:

- a reduce may overwrite exactly the run that a send of its round takes to the same peer: the message holds what was
  there before (two ranks exchange their partial results);
- several reduces may add to exactly the same run: in the order of the steps.

Messages from one rank to another are received in the order in which they are sent, also within a round.

The executor runs one rank's rounds over MPI; `proof` runs all ranks symbolically and proves the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache


class Kind(Enum):
    """The kind of a step."""

    SEND = "send"
    RECV = "recv"
    REDUCE = "reduce"
    COPY = "copy"
    FINISH = "finish"


class Role(Enum):
    """One of a rank's three buffers, which a step touches."""

    IN = "in"
    WORK = "work"
    OUT = "out"


@dataclass(frozen=True, slots=True)
class Chunks:
    """A run of neighbouring chunks of one buffer: numbers start <= c < stop."""

    role: Role
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank. `peer` is -1 and `source` is set for local steps."""

    kind: Kind
    target: Chunks
    peer: int = -1
    source: Chunks | None = None


Round = tuple[Step, ...]
Program = tuple[Round, ...]


def chunk(role: Role, number: int) -> Chunks:
    """The single chunk `number` of a buffer."""
    return Chunks(role, number, number + 1)


def send(what: Chunks, peer: int) -> Step:
    """Sends `what` to `peer`."""
    return Step(Kind.SEND, what, peer)


def recv(where: Chunks, peer: int) -> Step:
    """Receives the next message from `peer` into `where`."""
    return Step(Kind.RECV, where, peer)


def reduce(start: int, stop: int, peer: int) -> Step:
    """Reduces the next message from `peer` into chunks `start` to `stop` of work."""
    return Step(Kind.REDUCE, Chunks(Role.WORK, start, stop), peer)


def backwards(rounds: list[Round]) -> list[Round]:
    """The reduction that runs a distribution over out from its end to its beginning.

    What was received is sent, as a partial result of work; what was sent is reduced. All-gather gives reduce-scatter.
    """
    return [
        tuple(
            send(Chunks(Role.WORK, s.target.start, s.target.stop), s.peer)
            if s.kind is Kind.RECV
            else reduce(s.target.start, s.target.stop, s.peer)
            for s in steps
        )
        for steps in reversed(rounds)
    ]


def copy(source: Chunks, target: Chunks) -> Step:
    """Local copy of as many chunks."""
    return Step(Kind.COPY, target, source=source)


def finish(start: int, stop: int) -> Step:
    """Writes completed chunks of work to out, averaged and rounded."""
    return Step(Kind.FINISH, Chunks(Role.OUT, start, stop), source=Chunks(Role.WORK, start, stop))


@dataclass(frozen=True)
class Schedule:
    """An algorithm for a number of ranks.

    name: the algorithm's, e.g. "ring".
    operation: the collective that it computes, e.g. "all_reduce".
    chunks: into how many chunks the data is cut.
    root: of rooted operations, else 0.
    rounds_of: makes a rank's rounds; `program` keeps the last ones that it made.
    pieces: chunks that each rank's part is cut into, where parts belong to ranks; chunks is then ranks * pieces.
    work: in movements, chunks of the work buffer, each with room for the largest chunk of in; 0: cut as in and out are.
    In reductions 2 * chunks, if work has a second half: its chunk chunks + c is as large as chunk c.
    all_finish: in reductions, several ranks finish the same chunk, from the same operands; else one does.
    """

    name: str
    operation: str
    ranks: int
    chunks: int
    rounds_of: Callable[[int], list[Round]]
    root: int = 0
    pieces: int = 1
    work: int = 0
    all_finish: bool = False

    def program(self, rank: int) -> Program:
        """The rounds of one rank."""
        return _program(self, rank)


@lru_cache(maxsize=1024)
def _program(schedule: Schedule, rank: int) -> Program:
    return tuple(schedule.rounds_of(rank))
