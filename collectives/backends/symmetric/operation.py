"""An operation on given arrays: from the ranks' meeting to the calls that carry it out, kept for the next time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...base.buffers import Buffer
from ...base.float_errors import Runner
from ...native import compiled
from ..meeting import Entry, Meeting, MeetsInMemory, Ranges
from .group import Group
from .processor import Calls, Processor
from .staging import BUFFERS, Stages
from .steps import steps

_FROM_C = 256 << 10  # bytes of an operation; larger ones take so long that Python's part is nothing


@dataclass(frozen=True, slots=True)
class PartRanges:
    """One rank's part of a movement: elements start <= i < stop of x for, and of out from, each rank.

    fan: into how many different parts x goes: 1 where every rank gets the same.
    """

    leaving: Ranges
    arriving: Ranges
    fan: int


class Operation(MeetsInMemory):
    """An operation on given arrays, to be called any number of times. The ranks meet first.

    x, out: the arrays whose places the others must know.
    movement: of this rank, if it is one.
    stages: for the staged way.
    program: from the meeting to the calls of the other ways; None for the staged one.
    private_out: in place of `out`, an array of which the others learn the address alone.
    """

    def __init__(
        self,
        group: Group,
        entry: Entry,
        x: Buffer | None,
        out: Buffer | None,
        stages: Stages,
        program: Callable[[Meeting], Calls | None],
        movement: PartRanges | None = None,
        private_out: Buffer | None = None,
    ) -> None:
        self._group, self._entry, self._x, self._out = group, entry, x, out
        self._stages, self._make_program, self._staging = stages, program, group.staging_of(entry)
        self._nbytes = max(data.nbytes for data in (x, out) if data is not None)
        some = x or out
        assert some is not None
        self._dtype = some.dtype
        ranges = [] if movement is None else [*movement.leaving, *movement.arriving]
        largest = max((stop - start for start, stop in ranges), default=0)
        # Of the operation, as its program counts them, but with the largest part that this rank knows of.
        self._nbytes_together = some.dtype.itemsize * (entry.elements or largest * group.ranks)
        result = out or private_out
        self._addresses = (x.address if x else 0, result.address if result else 0)
        self._ranges = b"" if movement is None else group.meetings.pack_ranges(movement.leaving, movement.arriving)
        self._otherwise: Callable[[], None] | None = None
        self._find()

    def or_else(self, call: Callable[[], None]) -> Operation:
        """Sets the call that replaces it where the arrays are not symmetric; returns itself."""
        self._otherwise = call
        self._may_fill = self._fills_ahead()
        return self

    def _fills_ahead(self) -> bool:
        """Returns whether the first chunk may go to the scratch before the ranks meet."""
        may = self._group.may_stage(self._entry.operation, self._nbytes_together, symmetric=self._is_symmetric)
        return may and (self._is_symmetric or self._otherwise is None)

    def _find(self) -> None:
        """Finds the arrays' allocations. Holds them weakly: the arrays keep the memory."""
        found = [self._group.find(data) for data in (self._x, self._out)]
        self._memories = [None if place is None else weakref.ref(place[0]) for place in found]
        self._is_symmetric = found != [None, None]
        self._rows = [
            self._group.meetings.pack(self._entry, found[0], found[1], self._addresses, filled)
            for filled in (False, True)
        ]
        self._may_fill = self._fills_ahead()
        self._seen = b""
        self._program: Calls = []

    def __call__(self) -> None:
        """Carries it out. Collective. Raises MismatchError on all ranks if they are in different operations."""
        group = self._group
        if self._is_symmetric and any(memory is not None and memory() is None for memory in self._memories):
            self._find()  # it was freed, and another array has taken its address
        filled = self._may_fill and self._staging.is_ready
        if filled:
            self._staging.fill(self._stages, self._dtype)
        self._run(group.meetings.publish(self._rows[filled], self._ranges))

    def _run(self, seen: bytes) -> None:
        if seen != self._seen:
            self._program = self._work_out(seen)
            self._seen = seen
        for function, arguments in self._program:
            function(*arguments)

    def _work_out(self, seen: bytes) -> Calls:
        x, out = (None if memory is None else memory() for memory in self._memories)
        meeting = Meeting(seen, self._group.meetings.names, x, out, moves=bool(self._ranges))
        self._stages.programs.clear()
        if self._otherwise is not None and not (meeting.pull or meeting.push or meeting.shared):
            return [(self._otherwise, ())]
        program = self._make_program(meeting)
        if program is None:
            return [(self._staging.run, (self._stages, self._dtype, meeting.filled))]
        return program

    # ---- the same from C ----------------------------------------------------------------------------------------

    def native_call(self, runner: Runner | None) -> Callable[[], None] | None:
        """Makes the same call from C, for small operations, in which Python takes longer than the bytes."""
        is_large = self._nbytes > _FROM_C and self._otherwise is None
        if compiled is None or is_large or type(self._group.processor) is not Processor:
            return None
        places = self._group.meetings.native_arguments
        if places is None:
            return None
        made: Callable[[], None] = compiled.OneCopy(
            slow=partial(runner, self) if runner else self,
            go_on=partial(self._go_on, runner),
            known=partial(self._known, runner),
            staging=self._staging.state,
            **places,
        )
        return made

    def _go_on(self, runner: Runner | None, turn: int) -> None:
        """Does what follows the meeting of that turn."""
        follow = partial(self._run, self._group.meetings.rows(turn, with_ranges=bool(self._ranges)))
        if runner is None:
            follow()
        else:
            runner(follow)

    def _known(self, runner: Runner | None) -> tuple[Any, ...] | None:
        """Lists what a call from C needs of the last one, as one_copy.c:learn reads it; None where nothing is known."""
        if not self._seen:
            return None
        program, stages, buffers = list(self._program), self._stages, range(BUFFERS)
        staged = bool(program) and program[-1][0] == self._staging.run
        if staged:
            program.pop()
        into = partial(steps, barrier=self._group.meetings.barrier, runner=runner)
        return (
            self._seen,
            *self._rows,
            self._ranges,
            tuple(memory for memory in self._memories if memory is not None),
            self._may_fill,
            stages.chunks,
            staged,
            tuple(into(stages.fillings.get(buffer)) for buffer in buffers),
            tuple(into(stages.programs.get(buffer)) for buffer in buffers),
            into(program),
            self._staging.places(),
        )
