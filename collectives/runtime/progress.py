"""Progress thread of a Communicator, in which its asynchronous operations run in the order of their issue.

`Progress.submit` starts the thread, `mpidl-progress`, with the first operation that has `async_op` or a `timeout`.
`Progress.close` ends it, once what is queued has run; at the end of the program it is called for every Communicator.

Order of issue is order of execution, on every rank, so no operation can overtake another and none can deadlock by
reordering. A synchronous operation runs in the caller's thread when nothing is queued, else it takes its turn. Where
the MPI library gives less than MPI_THREAD_MULTIPLE there is no thread: an asynchronous operation runs in the caller's
as it is issued, and the order is the same.

While the program computes, a thread that waits for a late rank inside MPI takes a core from it, as MPI looks for
messages all the time. So the thread first sleeps until the node's other ranks have come to the operation (`counters`),
and then starts it. Where the ranks fill the cores of one node, the thread is pinned to the core of the thread that
issues: the system would often move it to the core of the rank that wakes it, so that this core works for two ranks and
the others wait.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from mpi4py import MPI

from ..base.arguments import seconds
from ..errors import MismatchError, OperationError, WorkTimeout
from ..process import cores, exit_status
from ..process.forked import refuse_if_forked
from ..process.idle_wait import enter_background
from ..process.labels import label
from . import background_errors
from .watchdog import PASS_ON_S, abort_job, mark_end, print_to_stderr

_STRANDED = 2.0  # seconds


class Work:
    """The handle of an operation under way. Its arrays must not be touched until it is complete.

    source: as `background_errors` has it; by default this object.
    """

    def __init__(
        self, name: str, count_waiter: Callable[[int], None] | None = None, source: Progress | None = None
    ) -> None:
        self.name, self.source = name, source or self
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._given_up = False
        self._count_waiter = count_waiter

    def is_completed(self) -> bool:
        """Returns whether the operation has ended, well or not; never blocks."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the operation has ended.

        timeout: seconds above 0; WorkTimeout when they pass first (the operation goes on). Raises OperationError if the
        operation failed, MismatchError if the ranks were in different ones.
        """
        if timeout is not None:
            timeout = seconds(f"{self.name}: wait", timeout)
        if not self._done.is_set():
            refuse_if_forked(self.name)
        if self._count_waiter is not None and not self._done.is_set():
            self._count_waiter(1)
            try:
                with label("collectives::wait", self.name):
                    self._done.wait(timeout)
            finally:
                self._count_waiter(-1)
        else:
            self._done.wait(timeout)
        self._raise(timeout)

    def has_ended_within(self, seconds: float) -> bool:
        """Returns whether the operation has ended, well or not; waits so long for it."""
        return self._done.wait(seconds)

    def give_up(self) -> None:
        """Gives up a wait for good, as the program has been told: a later error is not told again."""
        self._given_up = True

    def _raise(self, timeout: float | None) -> None:
        """Raises unless the operation has ended well; timeout: seconds that were waited for it."""
        if not self._done.is_set():
            raise WorkTimeout(f"{self.name} is not complete after {timeout} s")
        if self._error is not None:
            background_errors.clear(self.source)
        if isinstance(self._error, (OperationError, MismatchError)):
            raise self._error
        if self._error is not None:
            raise OperationError(f"{self.name} failed: {self._error}") from self._error

    def _end(self, error: BaseException | None = None, *, expected: bool = False) -> None:
        """Ends it. expected: the error is not told to a program that does not wait."""
        self._error = error
        if error is not None and not (expected or self._given_up):
            background_errors.note(self)
        self._done.set()


class Progress:
    """The queue of one Communicator and the thread that works it off; the thread starts with the first task.

    The thread that runs an operation has the turn: the progress thread, or a caller for whom nothing is queued. The
    progress thread takes it before it takes a task off the queue, so that an empty queue and a free turn mean that
    nothing is before a caller, who then takes the turn and runs its operation.

    queue, turn: what is queued, and the lock of the thread that runs an operation.
    may_sleep: the thread may sleep while it waits for messages (`idle_wait`).
    pins_thread: it runs on the core of the thread that issues; both to be set before the first task.
    drain_hook: see `collectives.draining`.
    number: in the order in which they were made.
    stranded: an operation that its caller has given up, if there is one; it may never end.
    """

    def __init__(self) -> None:
        self.may_sleep = self.pins_thread = False
        self.drain_hook: Callable[[], None] | None = None
        self.number = next(_numbers)
        self._condition = threading.Condition()
        self.queue: deque[tuple[Work, Callable[[], None]]] = deque()
        self.turn = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._waiters = 0
        self.stranded: Work | None = None
        self._core = -1  # of the thread that has issued the last task
        _alive.add(self)

    def count_waiter(self, more: int) -> None:
        """Adds to the number of callers that wait for queued tasks. more: 1, or -1 when a caller has ended its wait."""
        with self._condition:
            self._waiters += more

    def submit(self, name: str, task: Callable[[], None]) -> Work:
        """Queues a task; returns at once. Raises RuntimeError, and queues nothing, where no thread can be started."""
        work = Work(name, self.count_waiter, self)
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:  # the library cannot be called from a second thread
            with self.turn:
                self._carry_out(work, task)
            return work
        with self._condition:
            self.queue.append((work, task))
            if self.pins_thread:
                self._core = cores.current()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_queue, name="mpidl-progress", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:
                    self._thread = None
                    self.queue.pop()
                    raise
            self._condition.notify()
        return work

    def drain(self) -> None:
        """Returns when everything queued so far has run."""
        if self.queue or not self.turn.acquire(False):
            self.submit("drain", lambda: None).wait()
        else:
            self.turn.release()

    def close(self) -> None:
        """Drains the queue and ends the thread."""
        if self._closed or self.is_stranded():
            return
        self.drain()
        self.abandon()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def is_stranded(self) -> bool:
        """Returns whether an operation that was given up is still under way, after a moment in which it may end."""
        return self.stranded is not None and not self.stranded.has_ended_within(_STRANDED)

    def abandon(self) -> None:
        """Ends the thread once it has run what is queued; waits for nothing."""
        with self._condition:
            self._closed = True
            self._condition.notify()

    def forget(self) -> None:
        """Makes it as if nothing had been queued and no thread started."""
        self._condition, self.turn = threading.Condition(), threading.Lock()
        self.queue.clear()
        self._thread = None

    def _run_queue(self) -> None:
        enter_background(lambda: self._waiters > 0, may_sleep=self.may_sleep)
        own = -1
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self.queue or self._closed)
                if not self.queue:
                    return
            if own != self._core:
                own = self._core
                cores.pin_thread(own)
            with self.turn:
                self._carry_out(*self.queue.popleft())

    @staticmethod
    def _carry_out(work: Work, task: Callable[[], None]) -> None:
        error: BaseException | None = None
        try:
            task()
        except BaseException as failure:  # raised in the thread that waits
            error = failure
        del task  # and with it the arrays, before the caller goes on
        work._end(error)


_alive: weakref.WeakSet[Progress] = weakref.WeakSet()
_final_tasks: list[Callable[[], None]] = []  # at the end of the program
_numbers = itertools.count()


def _forget_all() -> None:
    """Replaces queues and locks in a forked child, where the threads that held them do not exist."""
    for progress in _alive:
        progress.forget()
    _alive.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def after_all_operations(task: Callable[[], None]) -> Callable[[], None]:
    """Registers a task for the end of the program, when the other ranks know that this one is there. A decorator."""
    _final_tasks.append(task)
    return task


@atexit.register
def _finish_what_is_queued() -> None:
    """Runs every operation that was issued before MPI is finalized, as the other ranks rely on it.

    Then it ends the job if one has failed and nothing has told the program.
    """
    with_hook = [progress for progress in _alive if progress.drain_hook is not None]
    to_drain = sorted(with_hook, key=lambda found: found.number)
    for progress in set(_alive).difference(to_drain):
        progress.close()
    _end_with_failed_operations()
    mark_end(of_all=False)
    for progress in to_drain:
        if progress.drain_hook is not None and not MPI.Is_finalized():
            with contextlib.suppress(OperationError, MismatchError):  # of a group that has failed, as has been said
                progress.drain_hook()
        progress.close()
    _end_with_failed_operations()
    mark_end(of_all=True)
    for task in _final_tasks:
        task()
    _end_if_stranded()


def _end_if_stranded() -> None:
    """Ends the job if an operation that was given up is still under way, as MPI cannot be finalized meanwhile."""
    stranded = [progress.stranded for progress in list(_alive) if progress.is_stranded()]
    if not stranded or MPI.Is_finalized():
        return
    world, names = MPI.COMM_WORLD, ", ".join(work.name for work in stranded if work is not None)
    print_to_stderr(
        f"mpidl: rank {world.rank} of {world.size} ends the job: {names} has timed out and is still under way\n"
    )
    time.sleep(PASS_ON_S)
    abort_job(exit_status.noted() or 1)


def _end_with_failed_operations() -> None:
    """Ends the job with operations and messages whose errors no `wait` has raised.

    Python takes no other exit status any more.
    """
    failed = background_errors.find()
    if not failed or MPI.Is_finalized():
        return
    world = MPI.COMM_WORLD
    for work in failed:
        try:
            work.wait()
        except (OperationError, MismatchError) as error:
            print_to_stderr(
                f"mpidl: rank {world.rank} of {world.size} ends the job: {error}; no wait() has raised it\n"
            )
    time.sleep(PASS_ON_S)
    abort_job(exit_status.noted() or 1)
