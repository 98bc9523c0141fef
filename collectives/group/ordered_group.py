"""A group of ranks whose operations run in the order of issue, on every rank: set-up, issue, failure and end.

    issue    at once, in the caller's thread, if nothing is queued; else, or with async_op, in the progress thread
    limit    an operation with a timeout of its own runs in the progress thread, and is left there when it passes
    failure  of one operation makes the object unusable, as other ranks may be anywhere in it and write to its memory
    end      `close` runs what is queued and frees the MPI communicators; without `close`, `dropped` frees them

Each operation is noted in `positions` from its beginning to its end, for the watchdog. Nothing here knows what an
operation does; `Communicator` has them.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any, NamedTuple, NoReturn, TypeVar

from mpi4py import MPI

from ..backends.checks import CheckedDispatch, is_debugging
from ..backends.cuda.task import Task
from ..backends.dispatch import Dispatch
from ..backends.meeting import MeetsInMemory
from ..backends.selection import Selection
from ..backends.tables import Tables, default_tables, library, read_tables, tuning_path
from ..base import arguments
from ..errors import ArgumentError, MismatchError, OperationError, OperationTimeout, WorkTimeout
from ..memory.leftovers import remove_names
from ..memory.lifetime import keep_for_ever
from ..messages.messages import Messages
from ..process.forked import is_forked, refuse_if_forked, why
from ..process.labels import is_profiled, label
from ..process.topology import discover, names, world_ranks
from ..runtime import background_errors
from ..runtime.dropped import Remains, free_dropped, freed_if_it_fails, freed_if_mpi_fails, when_dropped
from ..runtime.positions import AFTER, NO_WORDS, group_name
from ..runtime.progress import Progress, Work
from ..runtime.watchdog import Guard, limit_of, watch

_CLOSE_AFTER_ERROR = 2.0  # seconds
Plain = Callable[[], None]
Call = Plain | Task
Made = TypeVar("Made")


class Prepared(NamedTuple):
    """An operation that is checked and chosen. detail: its words, from `details`.

    at_once: issues it, given the group and the arrays that it must keep alive, and returns when it has run.
    """

    operation: str
    task: Call
    detail: bytes
    at_once: Callable[[OrderedGroup, Any], None]


class OrderedGroup:
    """The ranks of an mpi4py communicator, and one queue of operations among them. Construction is collective.

    Arguments and attributes: see `Communicator`.
    """

    def __init__(
        self, mpi: MPI.Intracomm | None = None, *, timeout: float | None = None, name: str = "", scratch: bool = True
    ) -> None:
        refuse_if_forked("Communicator")
        if not isinstance(name, str):
            raise arguments.wrong_type("name", name, "a text")
        if mpi is not None and not isinstance(mpi, MPI.Intracomm):
            raise arguments.wrong_type("mpi", mpi, "an mpi4py intracommunicator")
        if mpi == MPI.COMM_NULL:
            raise ArgumentError("mpi: got MPI.COMM_NULL, as of a group that was closed; needs a communicator of ranks")
        self.mpi: MPI.Intracomm = MPI.COMM_WORLD if mpi is None else mpi
        limit = self._agreed(lambda: limit_of(timeout))
        scratches, debugs = zip(*self.mpi.allgather((bool(scratch), is_debugging())), strict=True)
        if len(set(scratches)) > 1:
            raise ArgumentError(f"scratch: got {scratch!r} on rank {self.mpi.rank}; needs the same on every rank")
        free_dropped(self.mpi)
        self._made: list[MPI.Intracomm] = []  # by this object, to be freed
        with freed_if_mpi_fails("Communicator", self._made):
            self._collective = self._duplicated(self.mpi)
            self._for_messages = self._duplicated(self.mpi)
            topology = discover(self._collective, self._made)
        self._progress = Progress()
        self._issued = 0
        self._calls: OrderedDict[tuple[Any, ...], Prepared] = OrderedDict()
        self._unusable, self._failed = "", False
        self._refusal: type[MismatchError | OperationError] = OperationError
        self._closed = self._exempt = False
        self._compound_in: int | None = None  # the thread that runs one
        self._duplicates: list[OrderedGroup] = []
        weakref.finalize(self, self._progress.abandon).atexit = False  # there everything queued is waited for
        self._timeout, self.name, self._scratch = timeout, name, bool(scratch)
        self.rank: int = self.mpi.Get_rank()
        self.size: int = self.mpi.Get_size()
        self.local_rank, self.local_size, self.nodes = topology.local_rank, topology.local_size, topology.nodes
        self.node_ranks: tuple[int, ...] = topology.members
        self.node_cores: int = topology.cores
        self.layout: str = topology.layout
        if mpi is None and topology.local_rank == 0:  # all ranks have come through MPI_Init
            remove_names()
        self._crowded = topology.crowded
        self._progress.may_sleep = topology.nodes > 1 or topology.full
        self._progress.follows = topology.full and not topology.crowded and topology.nodes == 1
        self.is_debugging: bool = any(debugs)
        self._dispatch = (CheckedDispatch if self.is_debugging else Dispatch)(
            self._collective, topology, self._made, stages=self._scratch
        )
        self._positions = self._dispatch.positions
        self._messages = Messages(self._for_messages, self._positions, self._dispatch.takes_addresses, name)
        number = self._collective.bcast(next(_numbers))
        with freed_if_it_fails(self._made):
            self._selection = self._dispatch.selection = self._select()
        self._choose = self._selection.choose
        self._barrier = self._prepared("barrier", self._dispatch.prepare("barrier", "mpi"), NO_WORDS)
        world, named = world_ranks(self.mpi), names(self.mpi)
        self.world_ranks: tuple[int, ...] = tuple(max(rank, -1) for rank in world)
        self._called = (
            f"{group_name(named, MPI.COMM_WORLD.size, name)}, rank {named[self.rank]} of {MPI.COMM_WORLD.size}"
        )
        self._guard: Guard | None = None
        if self.size > 1 and limit < inf:
            seen = list(topology.members) if self._positions.shared else [self.rank]
            self._guard = Guard(
                self._for_messages, self._positions, seen, named, limit, name=name, group=(world[0], number)
            )
            watch(self._guard)
        guard = weakref.ref(self._guard) if self._guard is not None else lambda: None
        remains = Remains(world, self._made, self._messages.channels, guard)
        self._when_dropped = when_dropped(self, (world[0], number), remains)
        _alive.add(self)

    def _duplicated(self, mpi: MPI.Intracomm) -> MPI.Intracomm:
        made = mpi.Dup()
        self._made.append(made)
        return made

    def _select(self) -> Selection:
        """The choices of algorithms, the same on all ranks; measured now, if no table covers the group. Collective."""
        defaults = default_tables(library(), self.nodes, self.local_size, self._crowded)

        def kept() -> Tables | None:
            """Rank 0's tables; None where the group is to measure some."""
            tuned = read_tables(tuning_path(), library(), self.layout) if self.rank == 0 else {}
            if self.rank or tuned or defaults is not None or self.size == 1:
                return tuned
            from ..calibration import is_on, known  # seldom needed

            return known(self.layout) if is_on() else {}

        measured = self._collective.bcast(self._agreed(kept))
        if measured is None:
            from ..calibration import calibrate

            measured = calibrate(type(self), self.mpi, self.layout)
        return Selection(self._dispatch.backends, measured, defaults)

    def _agreed(self, make: Callable[[], Made]) -> Made:
        """Returns `make()`; if it raises on some rank, the first such rank's error is raised on all. Collective.

        An error that is no ArgumentError is an OperationError on the other ranks.
        """
        made: Made | None = None
        error: Exception | None = None
        told: Exception | None = None
        try:
            made = make()
        except ArgumentError as failure:
            error = told = failure
        except Exception as failure:
            error, told = failure, OperationError(f"rank {self.mpi.rank} failed: {failure!r}")
        for rank, found in enumerate(self.mpi.allgather(told)):
            if found is not None:
                raise error if error is not None and rank == self.mpi.rank else found
        return made  # type: ignore[return-value]

    def __repr__(self) -> str:
        name = f", name={self.name!r}" if self.name else ""
        return f"Communicator(rank={self.rank}, size={self.size}{name})"

    # ---- issue ------------------------------------------------------------------------------------------------

    def _issue(
        self, operation: str, task: Call, detail: bytes, async_op: bool, arrays: Any = None, name: str | None = None
    ) -> Work | None:
        """Runs the operation now if nothing is before it, else queues it, with the arrays that it must keep alive.

        detail: from `details`.
        """
        if self._unusable:
            self._refuse_if_unusable(operation)
        if isinstance(task, Task):
            started = task.start(arrays, hold=async_op)
            return started.finish(self._issue(operation, started.run, detail, async_op, arrays, name))
        if self._compound_in is not None and self._compound_in == threading.get_ident():
            if async_op:
                raise ArgumentError(f"{operation}: async_op inside a compound operation, whose parts run at once")
            task()
            return None
        number = self._issued = self._issued + 1
        progress = self._progress
        if async_op or progress.queue or not progress.turn.acquire(False):
            called = self._name(name or operation, number)
            run = partial(self._run_queued, operation, number, task, detail, async_op, arrays)
            with label(f"collectives::{operation}", name):
                try:
                    work = progress.submit(called, run)
                except RuntimeError:  # no thread: the operation was not issued
                    self._issued = number - 1
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

    def _issue_prepared(self, call: Prepared, async_op: bool, timeout: float | None, arrays: Any) -> Work | None:
        """Issues a prepared operation as `_issue` does, or within a timeout."""
        issue = self._issue if timeout is None else self._within(timeout)
        return issue(call.operation, call.task, call.detail, async_op, arrays)

    def _prepared(self, operation: str, task: Call, detail: bytes) -> Prepared:
        """Makes an operation that can be issued again and again.

        It is run at once in half the time that `_issue` takes, as names of a function are found faster than those of an
        object. It does not refer to this object, which is freed as soon as the program drops it.
        """
        if isinstance(task, Task):

            def on_gpu(group: OrderedGroup, arrays: Any) -> None:
                group._issue(operation, task, detail, False, arrays)

            return Prepared(operation, task, detail, on_gpu)
        progress, positions = self._progress, self._positions
        queue, take_turn, end_turn = progress.queue, progress.turn.acquire, progress.turn.release
        enter, state, after = positions.entering(operation, detail), positions.state, AFTER
        wait_for_all = positions.wait_for_all if self._waits_for_all(task, queued=False) else None

        def at_once(group: OrderedGroup, arrays: Any) -> None:
            if queue or not take_turn(False):  # a compound operation has the turn while its parts run
                group._issue(operation, task, detail, False, arrays)
                return
            try:
                # After the turn is taken, so that what an operation in the background has just done is seen.
                unusual = is_profiled() or group._unusable or group._exempt
                if not unusual:
                    number = group._issued = group._issued + 1
                    enter(number)
                    try:
                        if wait_for_all is not None:
                            wait_for_all(number)
                        task()
                    except BaseException as error:
                        group._raise(error, operation, number, arrays)
                    state[0] = after
            finally:
                end_turn()
            if unusual:
                group._issue(operation, task, detail, False, arrays)

        return Prepared(operation, task, detail, at_once)

    # ---- a limit of time --------------------------------------------------------------------------------------

    def _within(self, timeout: Any) -> Callable[..., Work | None]:
        """Returns what takes the place of `_issue` for an operation with a timeout of its own, in seconds."""
        return partial(self._issue_within, timeout)

    def _issue_within(
        self,
        timeout: Any,
        operation: str,
        task: Call,
        detail: bytes,
        async_op: bool,
        arrays: Any = None,
        name: str | None = None,
    ) -> None:
        """Runs the operation in the progress thread and waits so long for it; after that it is left there."""
        if self._compound_in is not None and self._compound_in == threading.get_ident():
            raise ArgumentError(f"{operation}: got a timeout inside a compound operation; needs it on `compound`")
        if not async_op and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise OperationError(f"{operation}: got a timeout; needs an MPI library with MPI_THREAD_MULTIPLE")
        with self._giving_up(operation, timeout, async_op) as seconds:
            work = self._issue(operation, task, detail, True, arrays, name)
            assert work is not None
            try:
                work.wait(seconds)
            except WorkTimeout:
                keep_for_ever((arrays, self._dispatch))
                work.give_up()
                self._progress.stranded = work
                self._positions.leave(failed=True)
                raise

    @contextmanager
    def _giving_up(self, operation: str, timeout: Any, async_op: bool = False) -> Iterator[float]:
        """Context of a wait of so many seconds, which it gives; makes the communicator unusable when they pass."""
        seconds = arguments.seconds(f"{operation}: timeout", timeout)
        if async_op:
            raise ArgumentError(
                f"{operation}: got timeout={timeout} and async_op; needs Work.wait(timeout), after which the "
                "operation goes on"
            )
        try:
            yield seconds
        except WorkTimeout as late:
            self._give_up(f"{late}, its timeout")
            raise OperationTimeout(f"{late}, its timeout; the communicator cannot be used any more") from None

    def _interrupted(self, operation: str) -> None:
        """Makes the communicator unusable: an interrupt has left a message of which no call knows any more."""
        self._give_up(f"{operation} was interrupted, and its message may still come or go")

    def _refuse_if_unusable(self, operation: str, queued: bool = False) -> None:
        if self._unusable:
            if not queued:
                background_errors.clear(self._progress)  # the refusal says why
            group = f"communicator {self.name!r}" if self.name else "this communicator"
            raise self._refusal(f"{operation}: {group} cannot be used any more: {self._unusable}")

    def _next_number(self) -> int:
        """The number of the next operation that is issued here."""
        self._refuse_if_unusable("hand_in")
        return self._issued + 1

    def _run(self, operation: str, number: int, task: Plain, detail: bytes, arrays: Any, queued: bool = False) -> None:
        if self._failed:  # since this operation was issued
            self._refuse_if_unusable(operation, queued)
        self._positions.enter(number, operation, detail, queued)
        if self._exempt:
            self._positions.leave()  # for the watchdog it waits for no rank
        try:
            if self._waits_for_all(task, queued):
                self._positions.wait_for_all(number)
            task()
        except BaseException as error:
            self._raise(error, operation, number, arrays)
        self._positions.leave()

    def _waits_for_all(self, task: Call, queued: bool) -> bool:
        """Returns whether the node's ranks wait for each other before the operation, so that none polls for another."""
        return (queued or self._crowded) and not isinstance(task, MeetsInMemory)

    def _raise(self, error: BaseException, operation: str, number: int, arrays: Any) -> NoReturn:
        """Ends an operation that an exception, which is being handled, has ended."""
        told = error
        if isinstance(error, MismatchError):
            if self.name:
                told = MismatchError(f"communicator {self.name!r}: {error}")
            if self.nodes == 1 or self.is_debugging:  # all ranks raise it, and sent nothing
                self._positions.leave()
                raise told from None
            self._refusal = MismatchError  # this node's ranks raise it, and those of others may be in the operation
        keep_for_ever((arrays, self._dispatch))  # the other ranks may be anywhere in it, and write to its memory
        self._positions.leave(failed=True)
        self._give_up(f"{self._name(operation, number)} failed: {error!r}")
        if isinstance(error, MPI.Exception):
            raise OperationError(f"{self._name(operation, number)} failed: {error}") from error
        raise told

    def _run_queued(self, operation: str, number: int, task: Plain, detail: bytes, async_op: bool, arrays: Any) -> None:
        """Runs an operation in its turn. arrays: to be kept alive until then.

        A MismatchError of an asynchronous operation makes the communicator unusable: each rank must find the same
        before the same operation, and when a rank waits for the error is up to its program.
        """
        try:
            self._run(operation, number, task, detail, arrays, queued=True)
        except MismatchError as error:
            if async_op:
                self._refusal = MismatchError
                self._give_up(f"{self._name(operation, number)} failed: {error}")
            raise

    def _give_up(self, why: str) -> None:
        """Refuses every operation from here on, also those that are queued."""
        self._unusable, self._failed = why, True
        self._when_dropped.detach()  # MPI may still be at work in it

    def _name(self, operation: str, number: int) -> str:
        return f"{operation} (operation {number} of {self._called})"

    # ---- end --------------------------------------------------------------------------------------------------

    @property
    def exempt_from_watchdog(self) -> bool:
        """Exempts this rank's waits from the watchdog: the other ranks may come late without an error. May be set."""
        return self._exempt

    @exempt_from_watchdog.setter
    def exempt_from_watchdog(self, on: bool) -> None:
        self._exempt = on
        if on and not self._unusable:
            self._positions.leave()

    def register_drain_hook(self, task: Plain | None) -> None:
        """Registers a task to run before the last wait for what is queued here; to be called on every rank.

        That is in `close`, or at the end of the program. There it comes after the end of all groups that have no such
        task, which the other ranks are told of: they may still be in the middle of their program.
        """
        self._progress.drain_hook = task
        if self._guard is not None:
            self._guard.late = task is not None

    def close(self) -> None:
        """Finishes what is queued and frees the duplicated communicators. Collective; the object is unusable after.

        Messages that were sent are delivered, or dropped if their receiver has not asked for them. Receives that
        nothing was sent for end with an OperationError.

        While an exception is handled, as in a `finally` block, it waits two seconds for the other ranks. If they do not
        come it frees nothing, so that the exception goes on and ends the job.

        Raises, once all is freed, the error of an asynchronous operation or message that no `wait` has raised; while an
        exception is handled that is left to the end of the program, which then fails.
        """
        if self._closed:
            return
        self._close()
        if sys.exc_info()[0] is None:
            for work in background_errors.find(self._has_made):
                work.wait()

    def _has_made(self, work: Any) -> bool:
        """Returns whether an operation or message is of this group or a duplicate of it."""
        own = work.source is self._progress or self._messages.channels.has(work)
        return own or any(made._has_made(work) for made in self._duplicates)

    def _close(self) -> None:
        if self._closed:
            return
        self._when_dropped.detach()
        if self._progress.is_stranded():
            self._leave_open(MPI.REQUEST_NULL, ended=True)
            return
        everywhere = MPI.REQUEST_NULL if self._failed else self._for_messages.Ibarrier()
        if not _all_arrive(everywhere):
            self._leave_open(everywhere)
            return
        self._drain()
        self._closed, self._unusable = True, "it was closed"
        for made in self._duplicates:
            made._close()
        self._progress.close()
        if not self._failed:  # else the other ranks may never come here
            self._positions.enter(self._issued + 1, "close")
            everywhere.Wait()
            self._messages.channels.close()
            self._positions.leave()
        else:
            self._messages.channels.drop_queued()  # which would look for messages in what is freed
            if self._guard is not None and not self._guard.closed:
                self._positions.end()  # a rank that waits for this one, as in its own `close`, hears of it
        if self._guard is not None:
            self._guard.close()
        self._dispatch.close()
        for comm in self._made:
            comm.Free()

    def _drain(self) -> None:
        """Returns when what is queued here and in the duplicates has run: parts of one may be operations of another."""
        if self._closed or self._progress.is_stranded():
            return
        if self._progress.drain_hook is not None:
            self._progress.drain_hook()
            self.register_drain_hook(None)
        for made in self._duplicates:
            made._drain()
        self._progress.drain()

    def _leave_open(self, everywhere: MPI.Request, *, ended: bool = False) -> None:
        """Makes this rank's object unusable and frees nothing, as other ranks are elsewhere and may use the memory.

        ended: a rank that waits for this one, as in its own `close`, hears of it.
        """
        self._closed, self._unusable = True, "it was closed after an exception, while other ranks were elsewhere"
        self.register_drain_hook(None)
        for made in self._duplicates:
            made._when_dropped.detach()
            made._leave_open(MPI.REQUEST_NULL, ended=ended)
        self._progress.abandon()
        self._messages.channels.drop_queued()
        self._positions.leave(failed=True)
        if ended:
            self._positions.end()
        keep_for_ever((self._dispatch, self._made, everywhere))

    def abort(self, status: int = 1) -> None:
        """Ends all processes of the job at once with an exit status. Does not return. From any thread."""
        refuse_if_forked("abort")
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED and not MPI.Is_thread_main():
            os._exit(status)  # mpirun then ends the other ranks
        self.mpi.Abort(status)


_alive: weakref.WeakSet[OrderedGroup] = weakref.WeakSet()
_numbers = itertools.count()


def _all_arrive(everywhere: MPI.Request) -> bool:
    """True unless an exception is being handled and the request does not complete within `_CLOSE_AFTER_ERROR`."""
    if sys.exc_info()[0] is None:
        return True
    limit = time.monotonic() + _CLOSE_AFTER_ERROR
    while not everywhere.Test():
        if time.monotonic() > limit:
            return False
        time.sleep(1e-3)
    return True


def _close_in_child() -> None:
    """Refuses operations in a forked child of a rank, which frees nothing."""
    if is_forked():
        for comm in _alive:
            comm._closed, comm._unusable = True, why()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
