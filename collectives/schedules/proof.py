"""Runs a schedule symbolically on all ranks at once, without MPI, and proves that it computes its operation.

A chunk's value is the set of contributions in it: which chunk, of which ranks' input, finished or partial. The checker
starts every rank with its own input and carries out the rounds. The checker takes every send as synchronous
(MPI_Ssend), the strictest reading of MPI, and starts the reductions of a round only when all its messages are there. So
a schedule that passes cannot deadlock on any MPI library. It refuses

- a message that meets no receive, or a receive of another size or kind than the message;
- a reduction that counts a rank twice, a chunk used before it is defined, a finished chunk that is reduced again;
- a round that writes what it also reads or writes elsewhere, except in the two cases that `schedule` allows;
- ranks that wait for each other for ever;
- an end state that is not the operation's.

A value is one integer, so that millions of them are compared quickly: a bit for each rank that contributed, above
these a bit that says "finished", above that the number of the input chunk (`_Values`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NoReturn

from ..base.reduction import OPERATIONS as REDUCTIONS
from ..errors import ScheduleError
from .schedule import Chunks, Kind, Role, Round, Schedule, Step

Cells = list[int | None]


def verify(schedule: Schedule, in_place: bool = False) -> None:
    """Raises ScheduleError, naming rank, round and step, unless the schedule computes its operation.

    in_place: prove it for in, work and out in the same memory, as when an all-reduce overwrites its argument.
    """
    run = _Simulation(schedule, in_place)
    run.carry_out()
    run.check_end()


class _Values:
    """The value of each chunk, as an integer; None where nothing was written yet."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.everyone = (1 << ranks) - 1
        self.finished = 1 << ranks

    def of(self, label: int, contributors: int, finished: bool = False) -> int:
        return label << self.ranks + 1 | finished << self.ranks | contributors

    def combine(self, mine: int, theirs: int) -> int | None:
        """The sum of two partial results of one chunk with no rank in both; None for any others."""
        if (mine ^ theirs) >> self.ranks or mine & theirs & self.everyone or mine & self.finished:
            return None
        return mine | theirs

    def describe(self, value: int | None) -> str:
        if value is None:
            return "nothing"
        contributors = [rank for rank in range(self.ranks) if value >> rank & 1]
        state = "finished" if value & self.finished else "partial"
        return f"input chunk {value >> self.ranks + 1} of ranks {contributors}, {state}"


class _Simulation:
    def __init__(self, schedule: Schedule, in_place: bool) -> None:
        self.schedule = schedule
        self.in_place = in_place
        self.ranks = schedule.ranks
        self.values = _Values(schedule.ranks)
        self.programs = [schedule.program(rank) for rank in range(self.ranks)]
        # Work with a second half is memory of its own, also in place.
        self.separate_work = schedule.operation in REDUCTIONS and schedule.work > 0
        self.memory = [self.start(rank) for rank in range(self.ranks)]
        # Where a buffer's chunks lie among the bits that stand for a rank's memory in `check_round`.
        room = max(schedule.chunks, schedule.work)
        self.bits = {role: 0 if in_place else number * room for number, role in enumerate(Role)}
        if self.separate_work:
            self.bits[Role.WORK] = len(Role) * room
        self.position = [0] * self.ranks
        # Messages and receives that wait for their counterpart, in order, by (source, destination).
        self.sent: dict[tuple[int, int], deque[Cells]] = defaultdict(deque)
        self.awaited: dict[tuple[int, int], deque[Step]] = defaultdict(deque)
        self.open_steps = [0] * self.ranks
        self.arrived: list[list[tuple[Step, Cells]]] = [[] for _ in range(self.ranks)]
        # For each rank's round: the number of reductions without their message yet, and the senders of the others.
        self.unmet = [0] * self.ranks
        self.held: list[list[int]] = [[] for _ in range(self.ranks)]

    def start(self, rank: int) -> dict[Role, Cells]:
        """A rank's memory before the first round."""
        room = {Role.IN: 0, Role.WORK: self.schedule.work, Role.OUT: 0}
        memory: dict[Role, Cells] = {role: [None] * (room[role] or self.schedule.chunks) for role in Role}
        given = _given(self.schedule, rank)
        start = Role.OUT if self.schedule.operation == "broadcast" else Role.IN
        for number, label in given.items():
            memory[start][number] = self.values.of(label, 1 << rank)
        if self.schedule.operation in REDUCTIONS:
            memory[Role.WORK] = list(memory[Role.IN]) + [None] * max(0, self.schedule.work - self.schedule.chunks)
        if self.in_place:
            memory[Role.OUT] = memory[Role.IN]
            if not self.separate_work:
                memory[Role.WORK] = memory[Role.IN]
        return memory

    def fail(self, rank: int, reason: str) -> NoReturn:
        s = self.schedule
        raise ScheduleError(
            f"{s.name} {s.operation} on {s.ranks} ranks, root {s.root}: rank {rank}, "
            f"round {self.position[rank]}: {reason}"
        )

    def carry_out(self) -> None:
        ready = deque(range(self.ranks))
        for rank in range(self.ranks):
            self.begin(rank, ready)
        while ready:
            rank = ready.popleft()
            while self.position[rank] < len(self.programs[rank]) and not self.open_steps[rank]:
                self.complete(rank)
                self.position[rank] += 1
                self.begin(rank, ready)
        stuck = [r for r in range(self.ranks) if self.position[r] < len(self.programs[r])]
        if stuck:
            self.fail(stuck[0], f"never completes; waiting for ever: ranks {stuck}")
        for (source, destination), left in self.sent.items():
            if left:
                self.fail(source, f"{len(left)} messages to {destination} are not received")

    def begin(self, rank: int, ready: deque[int]) -> None:
        """Posts the rank's next round; what it meets may let other ranks go on, which become ready."""
        if self.position[rank] == len(self.programs[rank]):
            return
        steps = self.programs[rank][self.position[rank]]
        self.check_round(rank, steps)
        self.unmet[rank] = sum(step.kind is Kind.REDUCE for step in steps)
        for step in steps:
            if step.source is not None:
                continue
            self.open_steps[rank] += 1
            if step.kind is Kind.SEND:
                pair = (rank, step.peer)
                self.sent[pair].append(self.read(rank, step.target))
            else:
                pair = (step.peer, rank)
                self.awaited[pair].append(step)
            if self.sent[pair] and self.awaited[pair]:
                self.match(*pair, ready)

    def match(self, source: int, destination: int, ready: deque[int]) -> None:
        values = self.sent[source, destination].popleft()
        step = self.awaited[source, destination].popleft()
        if len(values) != step.target.stop - step.target.start:
            self.fail(destination, f"{step} meets a message of {len(values)} chunks from rank {source}")
        self.arrived[destination].append((step, values))
        self.open_steps[destination] -= 1
        gone = [source]
        if step.kind is Kind.REDUCE:
            self.held[destination].append(source)
            self.unmet[destination] -= 1
            gone = []
            if not self.unmet[destination]:
                gone, self.held[destination] = self.held[destination], []
        for sender in gone:
            self.open_steps[sender] -= 1
        ready += [rank for rank in (destination, *gone) if not self.open_steps[rank]]

    def mask(self, chunks: Chunks) -> int:
        return ((1 << chunks.stop - chunks.start) - 1) << chunks.start + self.bits[chunks.role]

    def check_round(self, rank: int, steps: Round) -> None:
        written = 0
        reduced: set[Chunks] = set()
        for step in steps:
            if step.kind is Kind.SEND:
                continue
            mask = self.mask(step.target)
            again = step.kind is Kind.REDUCE and step.target in reduced
            if step.target.role is Role.IN or (written & mask and not again):
                self.fail(rank, f"{step} writes the input, or what another step of its round writes")
            written |= mask
            if step.kind is Kind.REDUCE:
                reduced.add(step.target)
        for step in steps:
            if step.source is not None:
                read = self.mask(step.source)
                if read == self.mask(step.target):  # a chunk finished or copied where it lies
                    continue
            elif step.kind is Kind.SEND and step.target not in reduced:
                read = self.mask(step.target)
            else:
                continue
            if read & written:
                self.fail(rank, f"{step} reads what is written in one round with it")
        for step in steps if reduced else ():
            if step.kind is Kind.SEND and step.target in reduced:
                others = [s for s in steps if s.target == step.target and s is not step]
                if [(s.kind, s.peer) for s in others] != [(Kind.REDUCE, step.peer)]:
                    self.fail(rank, f"{step} is overwritten in its round by what is no answer from rank {step.peer}")

    def complete(self, rank: int) -> None:
        memory, values = self.memory[rank], self.values
        for step in self.programs[rank][self.position[rank]]:
            if step.source is None:
                continue
            found = self.read(rank, step.source)
            target = step.target
            if len(found) != target.stop - target.start:
                self.fail(rank, f"{step} is between runs of different lengths")
            if step.kind is Kind.FINISH:
                if any(v is not None and v & values.finished for v in found):
                    self.fail(rank, f"{step} finishes a chunk twice")
                found = [None if v is None else v | values.finished for v in found]
            memory[target.role][target.start : target.stop] = found
        for step, came in self.arrived[rank]:
            target = step.target
            if step.kind is Kind.REDUCE:
                came = [self.combine(rank, *pair) for pair in zip(self.read(rank, target), came, strict=True)]
            memory[target.role][target.start : target.stop] = came
        self.arrived[rank].clear()

    def combine(self, rank: int, mine: int | None, theirs: int | None) -> int:
        together = None if mine is None or theirs is None else self.values.combine(mine, theirs)
        if together is None:
            self.fail(rank, f"cannot combine {self.values.describe(mine)} with {self.values.describe(theirs)}")
        return together

    def read(self, rank: int, chunks: Chunks) -> Cells:
        found = self.memory[rank][chunks.role][chunks.start : chunks.stop]
        if None in found or len(found) != chunks.stop - chunks.start:
            self.fail(rank, f"reads {chunks}, part of which holds nothing yet")
        return found

    def check_end(self) -> None:
        for rank in range(self.ranks):
            out = self.memory[rank][Role.OUT]
            for number, wanted in _wanted(self.schedule, rank, self.values).items():
                if out[number] != wanted:
                    self.fail(
                        rank,
                        f"ends with {self.values.describe(out[number])} as chunk {number} of out, "
                        f"and {self.values.describe(wanted)} was asked for",
                    )


def _part(schedule: Schedule, rank: int) -> range:
    """The chunks of a rank's part."""
    return range(rank * schedule.pieces, (rank + 1) * schedule.pieces)


def _given(schedule: Schedule, rank: int) -> dict[int, int]:
    """The chunks that a rank has at the start, and their labels."""
    every = range(schedule.chunks)
    match schedule.operation:
        case "all_reduce" | "reduce_scatter" | "reduce" | "scan" | "exscan":
            return {c: c for c in every}
        case "all_gather" | "gather":
            return {c: c for c in _part(schedule, rank)}
        case "broadcast" | "scatter":
            return {c: c for c in every} if rank == schedule.root else {}
        case "all_to_all":
            return {c: rank * schedule.chunks + c for c in every}
    raise ScheduleError(f"no such operation: {schedule.operation}")


def _wanted(schedule: Schedule, rank: int, values: _Values) -> dict[int, int]:
    """The values that each rank's out must hold at the end."""
    every, part = range(schedule.chunks), _part(schedule, rank)
    at_root = every if rank == schedule.root else range(0)
    match schedule.operation:
        case "all_reduce":
            return {c: values.of(c, values.everyone, True) for c in every}
        case "reduce_scatter":
            return {c: values.of(c, values.everyone, True) for c in part}
        case "reduce":
            return {c: values.of(c, values.everyone, True) for c in at_root}
        case "scan":
            return {c: values.of(c, (2 << rank) - 1, True) for c in every}
        case "exscan":  # nothing on the first rank
            return {c: values.of(c, (1 << rank) - 1, True) for c in every if rank}
        case "all_gather":
            return {c: values.of(c, 1 << c // schedule.pieces) for c in every}
        case "gather":
            return {c: values.of(c, 1 << c // schedule.pieces) for c in at_root}
        case "broadcast":
            return {c: values.of(c, 1 << schedule.root) for c in every}
        case "scatter":
            return {c: values.of(c, 1 << schedule.root) for c in part}
        case "all_to_all":
            return {c: values.of(c * schedule.chunks + rank, 1 << c) for c in every}
    raise ScheduleError(f"no such operation: {schedule.operation}")
