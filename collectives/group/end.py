"""End of a group: what is queued here runs, then the communicators of MPI are freed.

    close      every rank comes to it; duplicates are closed with the group they are made from
    exception  while one is handled, the other ranks have two seconds to come: else nothing is freed
    stranded   where an operation has timed out and is still under way, nothing is freed either

A group that is dropped without `close` hands its communicators to `dropped`.
"""

from __future__ import annotations

import sys
from typing import Any

from mpi4py import MPI

from ..errors import MismatchError, OperationError
from ..memory.lifetime import keep_for_ever
from ..messages.message import poll
from ..runtime import background_errors
from .issue import Issuer, Plain

_CLOSE_AFTER_ERROR = 2.0  # seconds


class GroupEnd:
    """The end of one group.

    parts: of the group.
    duplicates: the ends of the groups that are closed with it.
    """

    def __init__(self, issuer: Issuer) -> None:
        self.parts = issuer.parts
        self.duplicates: list[GroupEnd] = []
        self._issuer, self._refusal = issuer, issuer.refusal
        self._progress, self._positions = issuer.progress, issuer.positions
        self._arrival: MPI.Request | None = None  # at the barrier of `close`, also of one that has raised

    def add_duplicate(self, duplicate: GroupEnd) -> None:
        """Adds a group that is to be closed with this one, and forgets those that are closed already."""
        self.duplicates = [one for one in self.duplicates if not one._refusal.closed] + [duplicate]

    def count_allocations(self) -> int:
        """Counts the pieces of memory shared by the node's ranks that live, those of duplicates too."""
        return self.parts.dispatch.allocator.count() + sum(one.count_allocations() for one in self.duplicates)

    def register_drain_hook(self, task: Plain | None) -> None:
        """Registers a task to run before the last wait for what is queued here; see `draining`."""
        self._progress.drain_hook = task
        if self.parts.guard is not None:
            self.parts.guard.ends_after_program = task is not None

    def close(self) -> None:
        """Closes the group; see `Communicator.close`."""
        if self._refusal.closed:
            return
        self._close()
        if sys.exc_info()[0] is None:
            _raise_first(background_errors.find(self._has_made))

    def _has_made(self, work: Any) -> bool:
        """Returns whether an operation or message is of this group or a duplicate of it."""
        own = work.source is self._progress or self.parts.messages.channels.has(work)
        return own or any(made._has_made(work) for made in self.duplicates)

    def _close(self) -> None:
        refusal, parts = self._refusal, self.parts
        if refusal.closed:
            return
        refusal.when_dropped.detach()
        if self._progress.is_stranded():
            self._leave_open("it was closed while an operation that had timed out was still under way", ended=True)
            return
        if self._arrival is None:
            self._arrival = MPI.REQUEST_NULL if refusal.failed else parts.for_messages.Ibarrier()
        arrival = self._arrival
        if sys.exc_info()[0] is not None and not poll(arrival.Test, _CLOSE_AFTER_ERROR):
            self._leave_open("it was closed after an exception, while other ranks were elsewhere", arrival)
            return
        self._drain()
        refusal.close("it was closed")
        for made in self.duplicates:
            made._close()
        self._progress.close()
        if not refusal.failed:  # else the other ranks may never come here
            self._positions.enter(self._issuer.issued + 1, "close")
            arrival.Wait()
            parts.messages.channels.close()
            self._positions.leave()
        else:
            parts.messages.channels.drop_queued()  # which would look for messages in what is freed
            if parts.guard is not None and not parts.guard.closed:
                self._positions.end()  # a rank that waits for this one, as in its own `close`, hears of it
        if parts.guard is not None:
            parts.guard.close()
        parts.dispatch.close()
        for comm in parts.owned_comms:
            comm.Free()

    def _drain(self) -> None:
        """Returns when what is queued here and in the duplicates has run.

        All run before any is closed, as a compound operation of one group may call operations of another.
        """
        if self._refusal.closed or self._progress.is_stranded():
            return
        hook = self._progress.drain_hook
        self.register_drain_hook(None)  # also if it raises, so that a second `close` gets past it
        if hook is not None and not self._refusal.failed:
            hook()
        for made in self.duplicates:
            made._drain()
        self._progress.drain()

    def _leave_open(self, why: str, arrival: MPI.Request = MPI.REQUEST_NULL, *, ended: bool = False) -> None:
        """Makes this rank's object unusable and frees nothing, as other ranks are elsewhere and may use the memory.

        why: the reason, in words.
        arrival: this rank's part in a barrier that the other ranks may still come to.
        ended: a rank that waits for this one, as in its own `close`, hears of it.
        """
        self._refusal.close(why)
        self.register_drain_hook(None)
        for made in self.duplicates:
            made._refusal.when_dropped.detach()
            made._leave_open(why, ended=ended)
        self._progress.abandon()
        self.parts.messages.channels.drop_queued()
        self._positions.leave(failed=True)
        if ended:
            self._positions.end()
        keep_for_ever((self.parts.dispatch, self.parts.owned_comms, arrival))


def _raise_first(failed: list[background_errors.Failed]) -> None:
    """Raises the error of the first, and counts those of all as told."""
    errors: list[Exception] = []
    for work in failed:
        try:
            work.wait()
        except (OperationError, MismatchError) as error:
            errors.append(error)
    if errors:
        raise errors[0]
