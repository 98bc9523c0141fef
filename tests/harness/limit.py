"""A time limit for every test, that names the test, the rank and what each thread is in.

A thread of its own watches, so that it also works while the main thread is inside a blocking MPI call.
Should some code keep the interpreter's lock for good, so that no Python thread runs, faulthandler's timer
ends the process.
"""

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TextIO

LIMIT = float(os.environ.get("MPIDL_TEST_LIMIT", "120"))
# Seconds after the limit at which faulthandler ends a process whose watcher cannot.
_BACKSTOP = float(os.environ.get("MPIDL_TEST_BACKSTOP", "10"))


class _Watched(NamedTuple):
    what: str
    limit: float
    deadline: float


class Limit:
    """who: this process's name in messages. out: where they go, a file with a descriptor, not captured.

    waits_for: says which other ranks this one waits for. end: ends the whole run; if it returns, or hangs,
    the process is killed.
    """

    def __init__(self, who: str, out: TextIO, waits_for: Callable[[], str], end: Callable[[], None]) -> None:
        self._who, self._out, self._waits_for, self._end = who, out, waits_for, end
        self._watched: _Watched | None = None
        threading.Thread(target=self._watch, name="test-limit", daemon=True).start()

    @contextmanager
    def watch(self, what: str, limit: float) -> Iterator[None]:
        """Ends the run if the block takes longer than `limit` seconds."""
        self.start(what, limit)
        try:
            yield
        finally:
            self._watched = None
            faulthandler.cancel_dump_traceback_later()

    def start(self, what: str, limit: float) -> None:
        """Ends the run in `limit` seconds, unless the process has left by then or watches something else."""
        faulthandler.dump_traceback_later(limit + _BACKSTOP, exit=True, file=self._out)
        self._watched = _Watched(what, limit, time.monotonic() + limit)

    def _watch(self) -> None:
        while True:
            time.sleep(0.2)
            watched = self._watched
            if watched and time.monotonic() > watched.deadline:
                self._stop(watched)

    def _stop(self, watched: _Watched) -> None:
        self._out.write(
            f"\n{watched.what} did not finish on {self._who} within {watched.limit:g} s{self._waits_for()};"
            " its threads:\n"
        )
        self._out.flush()
        faulthandler.dump_traceback(file=self._out, all_threads=True)
        time.sleep(1)  # so that the other ranks' reports come out, too
        killer = threading.Timer(5, os.kill, (os.getpid(), signal.SIGKILL))
        killer.daemon = True
        killer.start()
        self._end()
        os.kill(os.getpid(), signal.SIGKILL)
