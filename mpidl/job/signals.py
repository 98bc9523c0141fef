"""Signals that ask the job to stop, obeyed by all ranks after the same step.

    stop = mpidl.StopSignal()                    rank 0      rank 1      rank 2
    for step in range(start, steps):               |        SIGUSR1        |       in the middle of a step
        train_one_step()                           |           |           |
        if stop.requested():                       SIGUSR1 on every rank           at its end
            save_a_checkpoint()
            stop.exit()                            status 75 on every rank

Slurm warns a job before its time is over (`--signal=USR1@120`), and asks it to go by SIGTERM. Which rank gets it, and
when, depends on the launcher, and a rank that stopped by itself would leave the others waiting. So a handler only takes
note, and the ranks compare notes where the program asks: the maximum of one byte, a few microseconds on a node.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import weakref
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, NoReturn

import numpy as np

from collectives import Communicator

from ..errors import ConfigurationError
from .runtime import default_communicator

STOPPED = 75  # exit status of a job that was asked to stop and can go on; EX_TEMPFAIL of sysexits.h


class StopSignal:
    """Takes note of signals from now on, in place of what they did before. To be made by the main thread.

    signals: which.
    process_group: the ranks that stop together; the world by default.

    signal: what the ranks have agreed on in `requested`; None before.

    Later signals change nothing once the ranks have agreed on one: launchers and schedulers send several. `close`, or
    the end of a `with`, gives the signals back.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1),
        process_group: Communicator | None = None,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError(
                f"StopSignal: made in thread {threading.current_thread().name!r}; needs the main thread, as signals do"
            )
        self._comm = default_communicator(process_group)
        self.signal: signal.Signals | None = None
        self._noted = np.zeros(1, np.uint8)
        self._agreed = np.zeros(1, np.uint8)
        self._before: dict[signal.Signals, Any] = {}
        for given in signals:
            try:
                number = signal.Signals(given)
                self._before[number] = signal.signal(number, self._note)
            except (ValueError, OSError) as error:
                self.close()
                raise ConfigurationError(f"StopSignal: got signal {given!r}, which cannot be caught: {error}") from None
        _listening.add(self)

    def requested(self) -> signal.Signals | None:
        """The signal that any rank has received, the same on all; None if there was none. Collective.

        With several, the one of the highest number. Once it has given a signal it does so for good.
        """
        if self.signal is None:
            self._agreed[0] = self._noted[0]
            self._comm.all_reduce(self._agreed, "max")
            if self._agreed[0]:
                self.signal = signal.Signals(int(self._agreed[0]))
        return self.signal

    def exit(self, what: str = "") -> NoReturn:
        """Rank 0 prints one line, and every rank exits with status 75. Collective.

        what: what was done before, for the line.
        """
        if self._comm.rank == 0:
            name = "the program itself" if self.signal is None else self.signal.name
            print(f"stopped by {name}{f', {what}' if what else ''}; status {STOPPED}: can go on", flush=True)
        self._comm.barrier()  # Open MPI ends all ranks when the first one ends with a status
        sys.exit(STOPPED)

    def close(self) -> None:
        """Restores the former handlers."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def __enter__(self) -> StopSignal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted[0] = max(self._noted[0], number)


_listening: weakref.WeakSet[StopSignal] = weakref.WeakSet()


def _give_signals_back() -> None:
    """Restores the signal handlers in a forked child, to which `Process.terminate` sends SIGTERM."""
    for stop in _listening:
        stop.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_give_signals_back)
