"""Waiting without a core for it, in operations that run beside the program.

MPI looks for messages all the time that it waits, which takes a core from whoever computes. Between nodes a message
takes long enough for naps. Within one they are taken where its ranks fill its cores: there a rank that only looks keeps
off its core those that it waits for, with Linux 6.18 for minutes on end. Who can sleeps until woken (`counters`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mpi4py import MPI

_SHORTEST_NAP, _LONGEST_NAP = 2e-5, 2e-4  # seconds


class _Local(threading.local):
    """naps: whether this thread may nap. apart: whether all ranks run the operation in a thread like this one.

    hurried: whether the program waits for what this thread does.
    """

    hurried: Callable[[], bool] = staticmethod(lambda: True)
    naps = False
    apart = False


_local = _Local()


def run_beside(hurried: Callable[[], bool], *, naps: bool) -> None:
    """This thread is not the program's, which waits for it while `hurried()`. naps: whether it may nap."""
    _local.hurried, _local.naps = hurried, naps


def in_a_hurry() -> bool:
    """Returns whether the program waits for what this thread does: always, in its own."""
    return _local.hurried()


@contextmanager
def on_all_ranks() -> Iterator[None]:
    """Inside, every rank runs the operation beside its program, so that all may start collectives without blocking."""
    before, _local.apart = _local.apart, True
    try:
        yield
    finally:
        _local.apart = before


def wait_all(requests: Sequence[MPI.Request]) -> None:
    """Returns when all are complete."""
    if not _local.naps:
        MPI.Request.Waitall(list(requests))
        return
    nap = _SHORTEST_NAP
    while not MPI.Request.Testall(list(requests)):
        time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP)


def collective(comm: MPI.Comm, name: str, *arguments: Any) -> Callable[[], None]:
    """A call of one of MPI's collectives, by the name of the blocking one."""
    blocking = getattr(comm, name)
    started = getattr(comm, f"I{name.lower()}")

    def call() -> None:
        # Blocking ones do not match the others, so that all ranks must take the same.
        if _local.naps and _local.apart:
            wait_all([started(*arguments)])
        else:
            blocking(*arguments)

    return call
