"""Rounds in which the ranks gather units: each names the unit that it wants and those that it holds.

    rank 0   wants 4, holds 3     all ranks see all of it:  2 is whole, but no rank holds or wants it: freed
    rank 1   wants 5, holds 3                               4 and 5 are wanted, and not whole: gathered

A round is one operation in the progress thread of a Communicator that has no other use: an all-gather of messages, then
an all-gather of each unit that is wanted, in the order of their numbers. All ranks see the same messages, so they run
the same operations, and need not compute the same units, nor in the same order: a rank that needs nothing takes part
with the unit that it will need next, or with none. Usually all ranks want the same unit, one or a few ahead of the unit
that computes.

A rank may have started rounds to which the others have not come yet. So at the end of a pass every rank starts rounds
until all ranks say, in one round, that they are done. When the optimizer is freed, every rank does the same until all
say that theirs is freed (`join_rounds_until_all_leave`). If an earlier round already gathered its unit (`stays_whole`),
a rank does not wait for its own round: ranks that started fewer rounds may be waiting for it in a collective of the
program, such as SyncBatchNorm's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import torch

from collectives import Communicator, Work
from collectives.devices import HOST
from collectives.draining import exempt_from_watchdog

from ..traffic import ZeroTraffic

_BITS = 62  # of a message's word


class Purpose(IntEnum):
    """The reason why a rank takes part in a round.

    AHEAD: it goes on meanwhile.
    NEEDED: it waits for its unit.
    REDUCES: it waits for a reduction.
    DONE: its pass is over.
    GONE: its engine is; in such a round nothing is gathered.
    """

    AHEAD = 0
    NEEDED = 1
    REDUCES = 2
    DONE = 3
    GONE = 4


class Gatherable(Protocol):
    """A unit.

    whole_bytes: of all ranks' shards.
    exact: whether it was gathered in full precision the last time.
    """

    whole_bytes: int
    exact: bool

    def gather(self, comm: Communicator, exact: bool) -> int:
        """Makes the unit whole where this rank's node keeps it. Collective. Returns the gathered bytes.

        exact: in full precision, in any case.
        """

    def discard(self) -> None:
        """Gives that memory back, which no rank of the node uses any more."""


@dataclass
class GatherRound:
    """A round in flight.

    named_units: numbers of the units that this rank has said it wants or holds.

    Set when it is over:
    everyone_done: whether all ranks were done.
    waits_for_reduction: the ranks that waited for a reduction.
    whole: of the units that are whole, by number, whether in full precision.
    """

    named_units: frozenset[int] = frozenset()
    work: Work | None = None
    everyone_done: bool = False
    waits_for_reduction: tuple[int, ...] = ()
    whole: Mapping[int, bool] = field(default_factory=dict)

    def is_over(self) -> bool:
        """Tells if all ranks have taken part."""
        assert self.work is not None
        return self.work.is_completed()

    def wait(self, timeout: float | None = None) -> None:
        """Returns when it is over. timeout: seconds; WorkTimeout when they pass first."""
        assert self.work is not None
        self.work.wait(timeout)


class GatherRounds:
    """Starts rounds, which run in the order in which they are started.

    comm: serves nothing else.
    device: of the units.
    compresses: whether they are gathered compressed.
    """

    def __init__(
        self,
        comm: Communicator,
        units: Sequence[Gatherable],
        device: torch.device = HOST.device,
        compresses: bool = False,
    ) -> None:
        self.traffic, self._device, self._compresses = ZeroTraffic(), device, compresses
        self._comm, self._units = comm, list(units)
        self._whole: set[int] = set()  # on all ranks the same
        self._message, self._table = _messages(comm, len(self._units))
        self._in_flight: deque[GatherRound] = deque()  # oldest first, and some that are over
        self._ended: GatherRound | None = None  # the one before these

    @property
    def last(self) -> GatherRound | None:
        """The round that was started last."""
        return self._in_flight[-1] if self._in_flight else self._ended

    @property
    def are_over(self) -> bool:
        """Tells if all ranks have joined every round that this one has started."""
        return self.last is None or self.last.is_over()

    def count_under_way(self) -> int:
        """Counts the rounds that this rank has started and others have not joined."""
        return sum(not started.is_over() for started in list(self._in_flight))

    @property
    def oldest(self) -> GatherRound | None:
        """The first round that is not over; None if there is none."""
        self._note_ended()
        return self._in_flight[0] if self._in_flight else None

    def _note_ended(self) -> None:
        while self._in_flight and self._in_flight[0].is_over():
            self._ended = self._in_flight.popleft()
            self._ended.wait()  # raises what it raised

    @property
    def _ready(self) -> Mapping[int, bool]:
        """`GatherRound.whole` of the last round that this rank's own thread has seen end."""
        return {} if self._ended is None else self._ended.whole

    def stays_whole(self, number: int, exact: bool | None) -> bool:
        """Tells if a unit is whole, and stays so as long as this rank says in the rounds to come that it holds it.

        exact: whether in full precision; None: either way.
        """
        self._note_ended()
        found = self._ready.get(number)
        fits = found is not None and exact in (None, found)
        return fits and all(number in started.named_units for started in self._in_flight)

    def wait_for_ended(self) -> None:
        """Lets torch's current stream, on a GPU, go on after what the rounds that are over have gathered."""
        if self._ended is not None:
            self._ended.wait()

    def start(
        self, wanted: int | None, held: Collection[int], purpose: Purpose, pinned: Collection[int] = ()
    ) -> GatherRound:
        """Starts a round, in which this rank wants a unit gathered or takes part in the others' gathers.

        wanted: the number of a unit, or None.
        held: numbers of those that must stay whole for this rank; where it waits for a reduction also what is whole
            already, as others may have gathered what it needs next.
        pinned: of those that it needs in full precision.
        """
        held = frozenset(held)
        if purpose is Purpose.REDUCES:
            self._note_ended()
            held |= self._ready.keys()
        words = [0] * (self._message.size - 2)
        for first, numbers in ((0, held), (len(words) // 2, pinned)):
            for number in numbers:
                words[first + number // _BITS] |= 1 << (number % _BITS)
        message = [-1 if wanted is None else wanted, purpose, *words]
        started = GatherRound(held if wanted is None else held | {wanted})
        return self._begin(started, lambda: self._run(message, started))

    def refresh(self, numbers: Collection[int]) -> GatherRound:
        """Starts a new gather of those of these units that are whole, as their shards have changed. Collective."""

        def task() -> None:
            for number in sorted(self._whole.intersection(numbers)):
                self._gather(number, self._units[number].exact)

        return self._begin(GatherRound(), task)

    def _begin(self, started: GatherRound, task: Callable[[], None]) -> GatherRound:
        def run() -> None:
            task()
            started.whole = {number: self._units[number].exact for number in self._whole}

        started.work = self._comm.compound("gather units", run, async_op=True, device=self._device)
        self._in_flight.append(started)
        return started

    def _run(self, message: list[int], started: GatherRound) -> None:
        self._message[:] = message
        self._comm.all_gather(self._table, self._message)
        self.traffic.rounds += 1
        table = self._table
        started.everyone_done = bool((table[:, 1] >= Purpose.DONE).all())
        started.waits_for_reduction = tuple(int(rank) for rank in np.flatnonzero(table[:, 1] == Purpose.REDUCES))
        wanted = {int(number) for number in table[:, 0]} - {-1}
        gathers = not (table[:, 1] == Purpose.GONE).any()
        if not gathers:
            wanted &= self._whole
        held, pinned = np.split(np.bitwise_or.reduce(table[:, 2:], axis=0), 2)
        kept = {n for n in self._whole if _has(held, n)} | (wanted & self._whole)
        for number in sorted(self._whole - kept):
            self._units[number].discard()
        self._whole = kept
        other = {n for n in kept if self._units[n].exact != _has(pinned, n)} if self._compresses and gathers else set()
        for number in sorted((wanted - kept) | other):
            self._whole.add(number)
            self._gather(number, _has(pinned, number))

    def _gather(self, number: int, exact: bool) -> None:
        self.traffic.gathered_bytes += self._units[number].gather(self._comm, exact)
        self.traffic.gathers += 1
        whole = sum(self._units[n].whole_bytes for n in self._whole)
        self.traffic.peak_bytes = max(self.traffic.peak_bytes, whole)


def join_rounds_until_all_leave(comm: Communicator, units: int) -> None:
    """Joins rounds without an engine, until every rank does so. Collective.

    Or until a rank needs this one's shards, which are gone: the watchdog reports that.

    units: how many there are.
    """
    message, table = _messages(comm, units)
    message[:] = [-1, Purpose.GONE, *[0] * (message.size - 2)]
    exempt_from_watchdog(comm)  # at the end of the program the others may come late

    def task() -> None:
        comm.all_gather(table, message)

    purposes = {Purpose.AHEAD}
    while purposes != {Purpose.GONE} and Purpose.NEEDED not in purposes:
        # In the background, as `start` does, so that MPI's collectives are of one kind on all ranks.
        work = comm.compound("gather units", task, async_op=True)
        assert work is not None
        work.wait()
        purposes = {Purpose(number) for number in table[:, 1]}


def _messages(comm: Communicator, units: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Memory for what this rank says in a round, and for what all ranks say."""
    words = 2 + 2 * -(-units // _BITS)
    return np.empty(words, np.int64), np.empty((comm.size, words), np.int64)


def _has(words: np.ndarray[Any, Any], number: int) -> bool:
    """Tells if a unit's bit is set in a message's words."""
    return bool(int(words[number // _BITS]) >> (number % _BITS) & 1)
