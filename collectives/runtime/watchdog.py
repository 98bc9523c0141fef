"""The watchdog: ends the job where an operation waits for a rank that does not come, and says which and where it is.

One thread a process, `mpidl-watchdog`, looks, once a second or more often where the limit is short, at the positions of
each group that this process is in. It waits for no rank: it asks other nodes, and later looks find their answers.
`watch` starts it with the first group of several ranks that has a limit (`setup`); it ends with the process. Nothing is
added to an operation but the few bytes that it writes there anyway. At each look the thread also writes there what the
program does (`program`), for the reports.

    waiting too long        of the ranks in the earliest operation the lowest that is not silent reports, with what
                            every rank is in, and aborts the job
    being waited for        the late rank prints where its program is, so that the output shows the report's cause too
    mismatch                ranks at the same number are in different operations, or the operator, dtype, size or
                            algorithm differs: the report says which ranks are in which
    waiting for a rank      of this node that has come to the end of its program, which is hopeless: reported at the
                            second look, or after 10 s of waiting for a message; the job ends with that rank's exit
                            status, if it is known and not 0. A rank that has left an operation by an exception counts
                            as one that has not come to it.

A rank that is stopped in the middle of an operation has arrived like all the others. It is recognised by its own
watchdog, whose looks write a beat on its node's page: the report names the ranks whose beat has ceased. A process that
has not looked for long itself was stopped, maybe with the whole job, and does not count that time as waiting.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import ArgumentError
from ..memory.lifetime import keep_for_ever
from ..process import exit_status
from .positions import ANY, END, Position, Positions, group_name, listing
from .program import described
from .stack import stack_of_main_thread

TIMEOUT = "MPIDL_TIMEOUT"
PASS_ON_S = 0.2  # seconds for the launcher to pass on what was written, before MPI ends the ranks
TAGS = (32766, 32767)  # of questions and answers between nodes; users' messages have smaller ones
_DEFAULT = 600.0
_ANSWER = 3.0  # seconds that other nodes have to say where their ranks are
_FRESH = 2.0  # seconds for which an answer counts as where a rank is
_LAST_MESSAGE = 10.0  # seconds that a message of a rank that has come to its end may still take
_GRACE = 5.0  # seconds by which other waiting ranks let the lowest report first
_LATE_RANKS = 2.0  # seconds that late ranks have at most to print where they are
_ABSENT = 4.0  # seconds between two looks that only a process that was stopped lets pass


def limit_of(given: float | None) -> float:
    """Seconds that an operation may wait: the argument, or the environment's, or ten minutes; 0 means for ever."""
    name, value = "timeout", given
    if value is None:
        name, value = TIMEOUT, os.environ.get(TIMEOUT) or _DEFAULT  # type: ignore[assignment]
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = -1.0
    if not seconds >= 0:
        raise ArgumentError(f"{name}: got {value!r}; needs a number of seconds, 0 or more (0: wait for ever)")
    return seconds or math.inf


@dataclass
class _Seen:
    """A rank's position, since when it has been in its collective and in its wait for a message, and its last beat."""

    position: Position
    collective: float
    message: float
    heard: float

    def update(self, position: Position, now: float) -> None:
        """Compares with what was seen last."""
        before, self.position = self.position, position
        if (position.number, position.inside) != (before.number, before.inside):
            self.collective = now
        if (position.waits, position.message) != (before.waits, before.message):
            self.message = now
        if position.beat != before.beat:
            self.heard = now

    def extend_limit(self, seconds: float) -> None:
        """Extends the limit by seconds in which the watchdog did not run."""
        self.collective, self.message, self.heard = (t + seconds for t in (self.collective, self.message, self.heard))

    def waited(self, now: float) -> tuple[float, bool]:
        """Seconds of the longer of its waits, and whether that is in a collective."""
        inside = now - self.collective if self.position.inside else -1.0
        message = now - self.message if self.position.message else -1.0
        return max(inside, message), inside >= message


@dataclass(eq=False)
class Guard:
    """The watchdog's view of one group.

    messages: the communicator for questions to ranks whose positions cannot be seen here, on other nodes.
    positions: of this node's ranks.
    ranks: the group's number of each of them.
    world: the number in the world of each rank of the group.
    limit: seconds.
    ends_after_program: this rank takes part in its operations until after the end of its program.
    name: the group's, may be empty.
    group: two numbers that no other group of the job has had, the same on all its ranks.
    """

    messages: MPI.Intracomm
    positions: Positions
    ranks: list[int]
    world: list[int]
    limit: float
    ends_after_program: bool = False
    name: str = ""
    group: tuple[int, int] = (0, 0)
    _seen: list[_Seen] = field(default_factory=list)
    _asked: float | None = None
    _answers: dict[int, tuple[Position, float]] = field(default_factory=dict)  # with the seconds since its last beat
    _heard: dict[int, tuple[Position, float]] = field(default_factory=dict)  # with the time at which it came
    _question: np.ndarray[Any, Any] | None = None
    _questioned: float = -math.inf
    _looked: float = math.inf
    _shown: int = 0
    _sent: list[MPI.Request] = field(default_factory=list)  # answers under way, whose bytes they keep
    _lock: threading.Lock = field(default_factory=threading.Lock)  # held while it looks
    closed: bool = field(default=False, init=False)  # it looks no more

    def __post_init__(self) -> None:
        weakref.finalize(self, _keep_what_is_sent, self._sent).atexit = False

    @property
    def interval(self) -> float:
        """Seconds between two looks."""
        return min(1.0, self.limit / 8)

    @property
    def _may_ask(self) -> bool:
        """Returns whether it asks other nodes, and answers them: where MPI lets the watchdog's thread call it."""
        return len(self.ranks) != self.messages.size and MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def close(self) -> None:
        """Looks no more, and sends no more messages."""
        with self._lock:
            self.closed = True

    def positions_of_all(self) -> dict[int, Position]:
        """Returns where each rank of the group is, as far as is known, and asks other nodes, for the next call.

        The watchdogs there answer at their next look; answers of the last two seconds count.
        """
        with self._lock:
            found = dict(zip(self.ranks, self.positions.all(), strict=True))
            if self._may_ask and not self.closed:
                now = time.monotonic()
                self._answer(now)
                found |= {rank: there for rank, (there, came) in self._heard.items() if now - came < _FRESH}
                if now - self._questioned >= self.interval:
                    self._questioned = now
                    self._ask()
            return found

    def look(self, now: float, place: str, phase: str) -> None:
        """Compares with the last look; may end the job. place, phase: see `program`."""
        with self._lock:
            if not self.closed:
                self.positions.beat(place, phase)
                self._look(now)

    def _look(self, now: float) -> None:
        positions = self.positions.all()
        if not self._seen:
            self._seen = [_Seen(position, now, now, now) for position in positions]
        if now - self._looked > _ABSENT:
            self._asked = None
            for seen in self._seen:
                seen.extend_limit(now - self._looked)
        self._looked = now
        for seen, position in zip(self._seen, positions, strict=True):
            seen.update(position, now)
        if self._may_ask:
            self._answer(now)
        mine = self._seen[self.positions.rank]
        waited, inside = mine.waited(now)
        if waited >= self.limit or self._waits_for_ended_rank(mine.position, waited, inside):
            position = replace(mine.position, message=None) if inside else replace(mine.position, inside=False)
            self._report(position, waited, now)
        else:
            self._asked = None
            self._show_lateness(now)

    def _waits_for_ended_rank(self, mine: Position, waited: float, inside: bool) -> bool:
        """Returns whether a rank of this node that this one waits for has come to its end."""
        ended = {
            rank: seen.position.number
            for rank, seen in zip(self.ranks, self._seen, strict=True)
            if seen.position.operation == END
        }
        if inside:
            return waited >= 2 * self.interval and any(number <= mine.number for number in ended.values())
        others = set(range(self.messages.size)) - {self.ranks[self.positions.rank]}
        return waited >= _LAST_MESSAGE and (mine.peer in ended or (mine.peer == ANY and others <= set(ended)))

    def _show_lateness(self, now: float) -> None:
        """Prints where this rank's program is, once, if another has waited for it too long."""
        mine = self._seen[self.positions.rank].position
        for seen in self._seen:
            there = seen.position
            if there.inside and there.number > mine.number >= self._shown and now - seen.collective >= self.limit:
                self._shown = mine.number + 1
                own = self.world[self.ranks[self.positions.rank]]
                group = f" of communicator {self.name!r}" if self.name else ""
                what = f"{there.operation} (operation {there.number}{group})"
                print_to_stderr(f"mpidl: rank {own} is late for {what}; it is at\n{stack_of_main_thread()}")

    # ---- the report -------------------------------------------------------------------------------------------

    def _report(self, mine: Position, waited: float, now: float) -> None:
        if self._asked is None:
            self._asked = now
            self._answers = {}
            if self._may_ask:
                self._ask()
        if self._may_ask and len(self._answers) + len(self.ranks) < self.messages.size and now < self._asked + _ANSWER:
            return
        here = {rank: (seen.position, now - seen.heard) for rank, seen in zip(self.ranks, self._seen, strict=True)}
        latest = here | self._answers
        known = {rank: position for rank, (position, _) in latest.items()}
        longest = max(3 * self.interval, waited / 2)
        since_beat = {
            rank: seconds for rank, (there, seconds) in latest.items() if there.beat and there.operation != END
        }
        silent = {rank: seconds for rank, seconds in since_beat.items() if seconds > longest}
        own = self.ranks[self.positions.rank]
        first = [(there.number, rank) for rank, there in known.items() if _comes_first(there, mine)]
        first = [found for found in first if found[1] not in silent]
        if first and own != min(first)[1] and now < self._asked + _ANSWER + _GRACE:
            return
        named = {self.world[rank]: there.renumbered(self.world) for rank, there in known.items()}
        silent_world = {self.world[rank]: seconds for rank, seconds in silent.items()}
        mine, size = mine.renumbered(self.world), MPI.COMM_WORLD.size
        print_to_stderr(report(self.world[own], self.world, size, mine, waited, named, silent_world, self.name))
        time.sleep(min(_LATE_RANKS, self.limit / 2))  # late ranks print where they are
        abort_job(next((there.status for there in known.values() if there.status), 1))

    def _ask(self) -> None:
        others = [rank for rank in range(self.messages.size) if rank not in self.ranks]
        if self._question is None:
            self._question = np.array(self.group, np.int64)
            keep_for_ever(self._question)  # MPI may still read it when this object is gone
        for rank in others:
            self.messages.Isend(self._question, rank, TAGS[0]).Free()

    def _answer(self, now: float) -> None:
        """Answers other nodes' questions, and takes their answers.

        A late message may be of a group that is gone, whose place in MPI this one has taken: it is forgotten.
        """
        status, asked = MPI.Status(), np.empty(2, np.int64)
        while (question := self.messages.Improbe(MPI.ANY_SOURCE, TAGS[0], status)) is not None:
            question.Recv(asked)
            if tuple(asked) != self.group:
                continue
            asker = status.Get_source()
            silent = [now - seen.heard for seen in self._seen] or [0.0] * len(self.ranks)
            self._sent[:] = [request for request in self._sent if not request.Test()]
            answer = self.group, self.ranks, self.positions.snapshot(), silent
            self._sent.append(self.messages.isend(answer, asker, TAGS[1]))
        while (message := self.messages.improbe(MPI.ANY_SOURCE, TAGS[1])) is not None:
            group, ranks, snapshot, silent = message.recv()
            if group != self.group:
                continue
            positions = Positions.decode(snapshot)
            self._answers.update(zip(ranks, zip(positions, silent, strict=True), strict=True))
            self._heard.update((rank, (there, time.monotonic())) for rank, there in zip(ranks, positions, strict=True))


def _keep_what_is_sent(sent: list[MPI.Request]) -> None:
    if sent:
        keep_for_ever(sent)


def _comes_first(there: Position, mine: Position) -> bool:
    """Returns whether a rank waits in the same operation, or in an earlier one, which some can leave before others."""
    if not mine.inside:
        return replace(there, inside=False) == mine
    return there.inside and there.number <= mine.number


def _has_left(there: Position, mine: Position) -> bool:
    """Returns whether a rank has completed the operation in which this one waits, or one in its place."""
    completed = not (there.inside or there.failed or there.operation == END)
    return there.number > mine.number or (there.number == mine.number and completed)


def _program(there: Position) -> str:
    """Describes what a rank's program does, to follow its operation; empty if it has ended, or nothing is known."""
    return f", {there.phase}" if there.phase and there.operation != END else ""


def _named(ranks: Sequence[int], known: dict[int, Position]) -> str:
    """Names ranks, with their coordinates where these are known: "ranks 2, 3 (dp=1, tp=0; dp=1, tp=1)"."""
    places = [known[rank].place for rank in ranks if rank in known and known[rank].place]
    return f"{listing(ranks)} ({'; '.join(places)})" if places else listing(ranks)


def report(
    rank: int,
    ranks: Sequence[int],
    world: int,
    mine: Position,
    waited: float,
    known: dict[int, Position],
    silent: dict[int, float],
    name: str = "",
) -> str:
    """Writes the report of a rank that waits: the operation, who has arrived, and where the others are.

    ranks: of the communicator, by their numbers in the world, as all are.
    world: how many ranks it has.
    silent: ranks whose beat has ceased, and for how many seconds.
    name: of the communicator. What a rank's program does is named as of its watchdog's last look.
    """
    if mine.inside:
        operation = f"{mine.operation} (operation {mine.number} of {group_name(ranks, world, name)})"
        arrived = [r for r, there in known.items() if (there.number, there.inside) >= (mine.number, True)]
    else:
        operation = mine.message_text + (f" (communicator {name!r})" if name else "")
        arrived = [rank]
    left = [r for r, there in known.items() if mine.inside and _has_left(there, mine)]
    arrived += [r for r in left if r not in arrived]
    own = f"rank {rank} of {world}" + (f" ({mine.place})" if mine.place else "")
    lines = [f"mpidl: {own} has waited {waited:.0f} s in {operation}{_program(mine)}"]
    lines.append(f"  arrived: {listing(sorted(arrived))}")
    missing: dict[str, list[int]] = {}
    for other in sorted(ranks):
        if other not in arrived and (mine.inside or mine.waits_for(other)):
            where = f"{known[other]}{_program(known[other])}" if other in known else "has not answered"
            missing.setdefault(where, []).append(other)
    lines += [f"  not arrived: {_named(late, known)}, which {where}" for where, late in missing.items()]
    kinds: dict[str, list[int]] = {}
    for other, there in sorted(known.items()) if mine.inside else ():
        if there.number == mine.number and there.operation != END:
            kinds.setdefault(f"{there.operation} {there.detail}".rstrip(), []).append(other)
    if len(kinds) > 1:
        listed = ", ".join(f"{kind} on {listing(those)}" for kind, those in kinds.items())
        lines.append(f"  the ranks are in different operations: {listed}; MPIDL_DEBUG=1 compares each before it begins")
    if silent:
        seconds = f"{min(silent.values()):.0f} s"
        lines.append(f"  silent for {seconds}, as if stopped or gone: {listing(sorted(silent))}")
    elif mine.inside and not missing and left:
        each = "; ".join(f"{_named([other], known)}, which {known[other]}" for other in sorted(left))
        lines.append(f"  has left it: {each}; its operation may have been another one: MPIDL_DEBUG=1 compares them")
    elif mine.inside and not missing and len(kinds) == 1:
        lines.append("  all have arrived: one of them hangs inside the operation, or it takes longer than the limit")
    lines.append(f"  the job ends; a longer limit is given by Communicator(timeout=seconds) or {TIMEOUT}")
    return "\n".join(lines) + "\n"


def print_to_stderr(text: str) -> None:
    """Writes to the error output, after what the program has written. Raises nothing: the job is about to end."""
    with contextlib.suppress(Exception):  # closed, or without a reader
        sys.stdout.flush()
    with contextlib.suppress(Exception):
        sys.stderr.write(text)
        sys.stderr.flush()


def abort_job(status: int) -> None:
    """Ends all processes of the job at once. From any thread."""
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE or MPI.Is_thread_main():
        MPI.COMM_WORLD.Abort(status)
    os._exit(status or 1)  # mpirun then ends the other ranks


# By their ids: values of a dictionary are listed at once, whatever other threads add meanwhile; those of a set are not.
_guards: weakref.WeakValueDictionary[int, Guard] = weakref.WeakValueDictionary()
_wake = threading.Event()
_thread: list[threading.Thread] = []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_guards.clear)  # a forked child is no rank, and ends for itself


def watch(guard: Guard) -> None:
    """Watches the group for as long as the guard is referred to."""
    _guards[id(guard)] = guard
    if not _thread:
        _thread.append(threading.Thread(target=_look_around, name="mpidl-watchdog", daemon=True))
        try:
            _thread[0].start()
        except RuntimeError:  # the system starts no more threads for this rank
            _thread.clear()
            del _guards[id(guard)]
            raise
    _wake.set()  # this group may want shorter intervals


def _look_around() -> None:
    while True:
        _wake.wait(_look_once())
        _wake.clear()


def _look_once() -> float:
    """Seconds until the next look; until then the thread refers to no guard, and so keeps the memory of no group."""
    now, guards = time.monotonic(), _watched()
    place, phase = described()
    for guard in guards:
        guard.look(now, place, phase)
    return min((guard.interval for guard in guards), default=1.0)


def _watched() -> list[Guard]:
    return [guard for reference in _guards.valuerefs() if (guard := reference()) is not None]


def mark_end(of_all: bool) -> None:
    """Tells the other ranks that this one's program is over: it comes to no further operation of a group.

    What was told before is not told again.

    of_all: also of the groups that end after the program (`Guard.ends_after_program`).
    """
    for guard in _watched():
        if (of_all or not guard.ends_after_program) and not guard.closed:
            guard.positions.end(exit_status.noted())
            guard.close()
