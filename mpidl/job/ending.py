"""Ends the job when one rank ends, with one report.

    an uncaught exception, in any thread               the rank's traceback, status 1
    Ctrl-C, SIGINT                                     one line, status 130; also while the rank waits inside MPI
    sys.exit(3) while others wait for the rank         the watchdog's report, status 3
    a failure in the background, of which the          one line, status 1, or that of the program if it is not 0
    program ends without a `wait` for it (`BACKGROUND_ERRORS`)

A directory that is being written when the job ends so is removed (`TEMP_PATHS`), and so are files that stand for the
running job (`JOB_FILES`).

Often all ranks fail with one error, or all are interrupted. The ranks of a node share a page. The first of them claims
it and writes its message there: the others print nothing unless they have another message.

Everything runs in the thread that fails, or in the program's, except where an interrupt comes while that one waits
inside MPI: Python cannot handle it there, and the thread `mpidl-interrupt` ends the job. `end_job_with_any_rank`, which
`mpidl.init()` calls in the main thread, starts that thread unless another library handles SIGINT; it ends with the
process. No collective runs here once `end_job_with_any_rank` has returned, so that nothing waits for a rank.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

import torch

from collectives import Communicator, OperationError
from collectives.diagnostics import PASS_ON_S, exit_status, print_to_stderr

from ..digest import DIGEST, digest

INTERRUPTED = 130  # exit status, as shells have it for SIGINT
_NOTICE_S = 1.0  # seconds that Python has to notice an interrupt; it does not while it is inside a C function
TEMP_PATHS: set[Path] = set()  # DIR/NAME.tmp, directories and files of all ranks, renamed when they are finished
JOB_FILES: set[Path] = set()  # files of all ranks, such as locks
BACKGROUND_ERRORS: dict[Path, tuple[Communicator, str]] = {}  # by the directory that could not be written


def end_job_with_any_rank(comm: Communicator) -> None:
    """Takes over the hooks for uncaught exceptions, SIGINT where Python has it, and sys.exit. Collective."""
    ending = _Ending(comm)
    sys.excepthook = ending.on_uncaught_exception
    threading.excepthook = ending.on_uncaught_exception_in_thread
    exit_status.watch_sys_exit()
    if threading.current_thread() is threading.main_thread():
        ending.end_on_interrupt()
        _restore_hangup_handler()


class _Ending:
    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._page = comm.pages(DIGEST)
        self._message_digest: torch.Tensor | None = None
        try:
            self._page.reserve(0, DIGEST)
            self._message_digest = self._page.tensor(0, DIGEST, torch.uint8)
        except OperationError:  # then every rank says what it has to say
            pass
        self._noticed_at = 0.0  # by time.monotonic(): when Python last called the handler
        self._wakeup_pipe: int | None = None

    def on_uncaught_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Ends the job with an exception that no one caught; is sys.excepthook."""
        if issubclass(kind, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # one is enough
            self._interrupted()
        self._failed(kind, error, trace, "")

    def on_uncaught_exception_in_thread(self, failure: threading.ExceptHookArgs) -> None:
        """Ends the job with an exception in a thread, whose work other ranks may wait for; is threading.excepthook."""
        if failure.exc_type is SystemExit or failure.exc_value is None:
            return
        name = failure.thread.name if failure.thread else "a thread"
        self._failed(failure.exc_type, failure.exc_value, failure.exc_traceback, f", in {name}")

    def _failed(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, where: str
    ) -> NoReturn:
        text = "".join(traceback.format_exception(kind, error, trace))
        if self._is_first_to_say("".join(traceback.format_exception_only(kind, error))):
            print_to_stderr(f"mpidl: rank {self._comm.rank} of {self._comm.size}{where} ends the job: {text}")
        _end(self._comm, 1)

    def _interrupted(self) -> NoReturn:
        if self._is_first_to_say("interrupted"):
            print_to_stderr(f"mpidl: rank {self._comm.rank} of {self._comm.size} ends the job: interrupted\n")
            _end(self._comm, INTERRUPTED)
        time.sleep(10 * PASS_ON_S)  # the one that has said so ends all
        _end(self._comm, INTERRUPTED)

    def _is_first_to_say(self, text: str) -> bool:
        """Returns whether no other rank of this node has said the same as the first of them."""
        mine = torch.frombuffer(bytearray(digest(text)), dtype=torch.uint8)
        if self._message_digest is None:
            return True
        if self._page.claim():
            self._message_digest.copy_(mine)
            return True
        deadline = time.monotonic() + PASS_ON_S
        while not self._message_digest.any() and time.monotonic() < deadline:
            time.sleep(0.001)  # the first one is about to write it
        return not torch.equal(self._message_digest, mine)

    # ---- interrupts ---------------------------------------------------------------------------------------------

    def end_on_interrupt(self) -> None:
        """Ends the job at an interrupt that Python does not notice, as its main thread waits in MPI for other ranks.

        The byte that the C-level handler writes comes through all the same, and a thread reads it. A program that
        notices, and catches KeyboardInterrupt, is left alone, and so is one that has since put a handler of its own in
        place, for as long as it stands.
        """
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if before != -1:  # another library's, such as asyncio's
            signal.set_wakeup_fd(before)
            os.close(reading)
            os.close(writing)
            return
        self._wakeup_pipe = writing
        signal.signal(signal.SIGINT, self._on_interrupt)
        threading.Thread(
            target=self._end_at_unnoticed_interrupts, args=(reading,), name="mpidl-interrupt", daemon=True
        ).start()

    def forget_interrupts(self) -> None:
        """Stops listening in a forked child, whose bytes would come to its parent."""
        if self._wakeup_pipe is not None and (other := signal.set_wakeup_fd(-1)) != self._wakeup_pipe:
            signal.set_wakeup_fd(other)  # another library's
        self._wakeup_pipe = None

    def _on_interrupt(self, number: int, frame: FrameType | None) -> NoReturn:
        # Without a lock, as Event has one: the handler of an interrupt before could hold it.
        self._noticed_at = time.monotonic()
        raise KeyboardInterrupt

    def _handler_is_ours(self) -> bool:
        return signal.getsignal(signal.SIGINT) == self._on_interrupt

    def _end_at_unnoticed_interrupts(self, reading: int) -> None:
        since = 0.0
        while received := os.read(reading, 64):
            if signal.SIGINT not in received:
                continue
            if self._handler_is_ours() and not self._is_noticed(since) and self._handler_is_ours():
                self._interrupted()
            has_bytes = True
            while has_bytes:  # of interrupts that came meanwhile, for which Python has called the handler once
                since = time.monotonic()  # what comes from now on may be noticed before its byte is read
                has_bytes = bool(select.select([reading], [], [], 0)[0] and os.read(reading, 64))

    def _is_noticed(self, since: float) -> bool:
        """Returns whether Python has called the handler since then, or calls it within a while."""
        deadline = time.monotonic() + _NOTICE_S
        while self._noticed_at <= since and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._noticed_at > since


def _restore_hangup_handler() -> None:
    """Gives SIGHUP its meaning back, also that of nohup: UCX, which MPI libraries use, takes it when it is loaded.

    A program without mpirun would go on for ever when its terminal is closed.
    """
    handler = signal.getsignal(signal.SIGHUP)
    if handler is not None:
        signal.signal(signal.SIGHUP, handler)


def _end(comm: Communicator, status: int) -> NoReturn:
    time.sleep(PASS_ON_S)
    for path in list(TEMP_PATHS):
        gone = path.with_suffix(".gone")
        with contextlib.suppress(OSError):  # it has been finished, or another rank has been here
            path.rename(gone)  # at once: from here on it cannot be finished any more
        # Every rank removes it, and also what another rank may be about to remove: a rank that left that to the other
        # would end the job before all is gone.
        for useless in {gone, *path.parent.glob("step-*.gone")}:
            shutil.rmtree(useless, ignore_errors=True)
            with contextlib.suppress(OSError):
                useless.unlink()
    for path in list(JOB_FILES):
        with contextlib.suppress(OSError):
            path.unlink()
    with contextlib.suppress(Exception):  # of a communicator that has been closed
        comm.abort(status)
    os._exit(status)  # mpirun then ends the other ranks


def _remove_handlers() -> None:
    """Removes the handlers in a forked child: its errors and signals do not end the job."""
    BACKGROUND_ERRORS.clear()
    if isinstance(getattr(sys.excepthook, "__self__", None), _Ending):
        sys.excepthook = sys.__excepthook__
    hook_owner = getattr(threading.excepthook, "__self__", None)
    if isinstance(hook_owner, _Ending):
        threading.excepthook = threading.__excepthook__
        hook_owner.forget_interrupts()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_remove_handlers)


@atexit.register
def _end_with_failed_writes() -> None:
    """Ends the job with failed writes of which no `wait` has told. Python has joined all threads.

    This comes before `collectives` drains its groups and ends the job with its own failures: it waits for no rank, and
    removes `TEMP_PATHS`.
    """
    for comm, text in BACKGROUND_ERRORS.values():
        print_to_stderr(f"mpidl: rank {comm.rank} of {comm.size} ends the job: {text}\n")
    for comm, _ in BACKGROUND_ERRORS.values():
        _end(comm, exit_status.noted() or 1)
