"""Issue of a group's operations, which run in the order of issue on every rank.

    at once    in the caller's thread, if nothing is queued
    queued     with async_op, or behind what is queued: in the progress thread
    timeout    with one of its own an operation runs in the progress thread, and is left there when it passes
    compound   while one runs, the operations that its thread issues run at once, inside it

Each operation is noted in `positions` from its beginning to its end, for the watchdog. One that fails ends the use of
the group (`refusal`). Nothing here knows what an operation does.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn

from mpi4py import MPI

from ..backends.cuda.task import Task
from ..backends.meeting import MeetsInMemory
from ..base import arguments
from ..errors import ArgumentError, MismatchError, OperationError, WorkTimeout
from ..memory.lifetime import keep_for_ever
from ..native import compiled
from ..process.labels import PROFILER, is_profiled, label
from ..runtime.dropped import Remains, when_dropped
from ..runtime.positions import AFTER
from ..runtime.progress import Progress, Work
from .refusal import Refusal
from .setup import GroupParts

Plain = Callable[[], None]
Runnable = Plain | Task


class Prepared(NamedTuple):
    """An operation that is checked and chosen. detail: its words, from `details`.

    at_once: issues it, given the arrays that it must keep alive, and returns when it has run.
    """

    operation: str
    task: Runnable
    detail: bytes
    at_once: Callable[[Any], None]


class Issuer:
    """The operations of one group, and their queue. It lives until what is queued has run.

    parts: of the group.
    progress: the queue and its thread.
    positions: where this rank shows what it is in.
    refusal: whether the group can be used.
    issued: how many operations were issued.
    exempt: whether the watchdog takes no notice of this rank's waits.
    compound_in: the thread that runs a compound operation, if one does.
    """

    def __init__(self, parts: GroupParts) -> None:
        topology = parts.dispatch.topology
        self.parts, self.positions = parts, parts.dispatch.positions
        self.progress = Progress()
        self.progress.may_sleep = topology.nodes > 1 or topology.fills_cores
        self.progress.pins_thread = topology.fills_cores and not topology.oversubscribed and topology.nodes == 1
        # at the end of the program `progress._finish_what_is_queued` waits for everything queued
        weakref.finalize(self, self.progress.abandon).atexit = False
        guard = weakref.ref(parts.guard) if parts.guard is not None else lambda: None
        remains = Remains(parts.world, parts.owned_comms, parts.messages.channels, guard)
        self.refusal = Refusal(self.progress, parts.name, when_dropped(self, parts.key, remains))
        self.issued = 0
        self.exempt = False
        self.compound_in: int | None = None
        self._oversubscribed = topology.oversubscribed

    def issue(
        self, operation: str, task: Runnable, detail: bytes, async_op: bool, arrays: Any = None, name: str | None = None
    ) -> Work | None:
        """Runs the operation now if nothing is before it, else queues it, with the arrays that it must keep alive.

        detail: from `details`.
        """
        if self.refusal.why:
            self.refusal.check(operation)
        if isinstance(task, Task):
            started = task.start(arrays, hold=async_op)
            return started.finish(self.issue(operation, started.run, detail, async_op, arrays, name))
        if self.compound_in is not None and self.compound_in == threading.get_ident():
            if async_op:
                raise ArgumentError(
                    f"{operation}: got async_op inside a compound operation; needs a synchronous call, as its parts "
                    "run at once"
                )
            task()
            return None
        number = self.issued = self.issued + 1
        progress = self.progress
        if async_op or progress.queue or not progress.turn.acquire(False):
            called = self._name(name or operation, number)
            run = partial(self._run_queued, operation, number, task, detail, async_op, arrays)
            with label(f"collectives::{operation}", name):
                try:
                    work = progress.submit(called, run)
                except RuntimeError:  # no thread: the operation was not issued
                    self.issued = number - 1
                    raise
                if not async_op:
                    work.wait()
            return work if async_op else None
        try:
            with label(f"collectives::{operation}", name):
                self._run(operation, number, task, detail, arrays)
        finally:
            progress.turn.release()
        return None

    def issue_prepared(self, prepared: Prepared, async_op: bool, timeout: float | None, arrays: Any) -> Work | None:
        """Issues a prepared operation as `issue` does, or within a timeout."""
        issue = self.issue if timeout is None else self.within(timeout)
        return issue(prepared.operation, prepared.task, prepared.detail, async_op, arrays)

    def prepare(self, operation: str, task: Runnable, detail: bytes) -> Prepared:
        """Makes an operation that can be issued again and again.

        It is run at once in half the time that `issue` takes, as names of a function are found faster than those of an
        object. It refers to this object and not to the Communicator, which is freed as soon as the program drops it.
        """

        def otherwise(arrays: Any) -> None:
            self.issue(operation, task, detail, False, arrays)

        if isinstance(task, Task):
            return Prepared(operation, task, detail, otherwise)
        progress, positions, refusal = self.progress, self.positions, self.refusal
        waits = self._waits_for_all(task, queued=False)
        if compiled is not None:
            made = compiled.AtOnce(
                **positions.native_arguments(operation),
                detail=detail,
                queue=progress.queue,
                take_turn=progress.turn.acquire,
                end_turn=progress.turn.release,
                profiler=PROFILER,
                refusal=refusal,
                issuer=self,
                task=task,
                waits=waits,
                otherwise=otherwise,
                fail=partial(self._raise, operation),
            )
            return Prepared(operation, task, detail, made)
        queue, take_turn, end_turn = progress.queue, progress.turn.acquire, progress.turn.release
        enter, state, after = positions.entering(operation, detail), positions.state, AFTER
        wait_for_all = positions.wait_for_all if waits else None

        def at_once(arrays: Any) -> None:
            if queue or not take_turn(False):  # a compound operation has the turn while its parts run
                otherwise(arrays)
                return
            try:
                # After the turn is taken, so that what an operation in the background has just done is seen.
                needs_full_issue = is_profiled() or refusal.why or self.exempt
                if not needs_full_issue:
                    number = self.issued = self.issued + 1
                    enter(number)
                    try:
                        if wait_for_all is not None:
                            wait_for_all(number)
                        task()
                    except BaseException as error:
                        self._raise(operation, error, number, arrays)
                    state[0] = after
            finally:
                end_turn()
            if needs_full_issue:
                otherwise(arrays)

        return Prepared(operation, task, detail, at_once)

    def within(self, timeout: Any) -> Callable[..., Work | None]:
        """Returns what takes the place of `issue` for an operation with a timeout of its own, in seconds."""
        return partial(self._issue_within, timeout)

    def _issue_within(
        self,
        timeout: Any,
        operation: str,
        task: Runnable,
        detail: bytes,
        async_op: bool,
        arrays: Any = None,
        name: str | None = None,
    ) -> None:
        """Runs the operation in the progress thread and waits so long for it; after that it is left there."""
        if self.compound_in is not None and self.compound_in == threading.get_ident():
            raise ArgumentError(f"{operation}: got a timeout inside a compound operation; needs it on `compound`")
        if not async_op and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise OperationError(f"{operation}: got a timeout; needs an MPI library with MPI_THREAD_MULTIPLE")
        seconds = arguments.timeout(operation, timeout, async_op)
        work = self.issue(operation, task, detail, True, arrays, name)
        assert work is not None
        try:
            work.wait(seconds)
        except WorkTimeout as late:
            keep_for_ever((arrays, self.parts.dispatch))
            work.give_up()
            self.progress.stranded = work
            self.positions.leave(failed=True)
            raise self.refusal.give_up_after_timeout(late) from None

    def next_number(self) -> int:
        """Returns the number of the next operation; raises, as `hand_in`, where the group cannot be used."""
        self.refusal.check("hand_in")
        return self.issued + 1

    def exempt_from_watchdog(self, on: bool) -> None:
        """Exempts this rank's waits from the watchdog, or no more; see `draining`."""
        self.exempt = on
        if on and not self.refusal.why:
            self.positions.leave()

    # ---- run --------------------------------------------------------------------------------------------------

    def _run(self, operation: str, number: int, task: Plain, detail: bytes, arrays: Any, queued: bool = False) -> None:
        if self.refusal.failed:  # since this operation was issued
            self.refusal.check(operation, queued)
        self.positions.enter(number, operation, detail, queued)
        if self.exempt:
            self.positions.leave()  # for the watchdog it waits for no rank
        try:
            if self._waits_for_all(task, queued):
                self.positions.wait_for_all(number)
            task()
        except BaseException as error:
            self._raise(operation, error, number, arrays)
        self.positions.leave()

    def _run_queued(self, operation: str, number: int, task: Plain, detail: bytes, async_op: bool, arrays: Any) -> None:
        """Runs an operation in its turn. arrays: to be kept alive until then.

        After a MismatchError of an asynchronous operation every rank refuses the same later operations: ranks wait for
        the error at different times, and one that went on would wait for the others.
        """
        try:
            self._run(operation, number, task, detail, arrays, queued=True)
        except MismatchError as error:
            if async_op:
                self.refusal.error_class = MismatchError
                self.refusal.give_up(f"{self._name(operation, number)} failed: {error}")
            raise

    def _waits_for_all(self, task: Runnable, queued: bool) -> bool:
        """Returns whether the node's ranks wait for each other before the operation, so that none polls for another."""
        return (queued or self._oversubscribed) and not isinstance(task, MeetsInMemory)

    def _raise(self, operation: str, error: BaseException, number: int, arrays: Any) -> NoReturn:
        """Ends an operation that an exception, which is being handled, has ended."""
        raised, parts = error, self.parts
        if isinstance(error, MismatchError):
            if parts.name:
                raised = MismatchError(f"communicator {parts.name!r}: {error}")
            if parts.dispatch.topology.nodes == 1 or parts.is_debugging:  # all ranks raise it, and sent nothing
                self.positions.leave()
                raise raised from None
            # This node's ranks raise it, and those of others may be in the operation.
            self.refusal.error_class = MismatchError
        keep_for_ever((arrays, parts.dispatch))  # the other ranks may be anywhere in it, and write to its memory
        self.positions.leave(failed=True)
        self.refusal.give_up(f"{self._name(operation, number)} failed: {error!r}")
        if isinstance(error, MPI.Exception):
            raise OperationError(f"{self._name(operation, number)} failed: {error}") from error
        raise raised

    def _name(self, operation: str, number: int) -> str:
        return f"{operation} (operation {number} of {self.parts.rank_in_words})"
