"""Waiting that gives the core to others, for operations that run in the background of the program.

MPI polls for messages all the time that it waits, which takes a core from the thread that computes. Between nodes a
message takes long enough for a waiting thread to sleep for moments. Inside a node it sleeps too if the ranks fill the
cores: a rank that polls takes the core that the rank it waits for needs, with Linux 6.18 for minutes. Waits for shared
memory sleep until another rank wakes them (`counters`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mpi4py import MPI

from ..native import compiled

_SHORTEST_NAP, _LONGEST_NAP = 2e-5, 2e-4  # seconds


def always() -> bool:
    """The program waits for what runs in its own thread."""
    return True


class _Local(threading.local):
    """State of a thread.

    caller_is_waiting: returns True while the program waits for this thread's operation.
    may_sleep: the thread may sleep while it waits for messages.
    all_in_background: all ranks run the operation in a thread that is not the program's.
    """

    caller_is_waiting: Callable[[], bool] = staticmethod(always)
    may_sleep = False
    all_in_background = False


_local = _Local()


def enter_background(caller_is_waiting: Callable[[], bool], *, may_sleep: bool) -> None:
    """Marks this thread as one that runs operations for the program's thread; see `_Local`.

    caller_is_waiting: with `always` it is none, but the program's own.
    """
    _local.caller_is_waiting, _local.may_sleep = caller_is_waiting, may_sleep
    if compiled is not None:
        compiled.in_background(caller_is_waiting is not always)


def caller_is_waiting() -> bool:
    """Returns True while the program waits for this thread's operation: always, in its own thread."""
    return _local.caller_is_waiting()


@contextmanager
def background_on_all_ranks() -> Iterator[None]:
    """Context in which every rank runs the operation in the background, so that all may use nonblocking collectives."""
    before, _local.all_in_background = _local.all_in_background, True
    try:
        yield
    finally:
        _local.all_in_background = before


def wait_all(requests: Sequence[MPI.Request]) -> None:
    """Returns when all are complete."""
    if not _local.may_sleep:
        MPI.Request.Waitall(list(requests))
        return
    nap = _SHORTEST_NAP
    while not MPI.Request.Testall(list(requests)):
        time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP)


def collective(comm: MPI.Comm, name: str, *arguments: Any, over_nodes: bool = False) -> Callable[[], None]:
    """Returns a function that calls one of MPI's collectives, by the name of the blocking one.

    over_nodes: the ranks are on several nodes. On all of them the call is then the nonblocking one, so that one in the
    background can sleep, whether other ranks have theirs there or in the program's thread.
    """
    blocking = getattr(comm, name)
    started = getattr(comm, f"I{name.lower()}")

    def call() -> None:
        # Blocking collectives do not match nonblocking ones, so that all ranks must choose the same.
        if over_nodes or (_local.may_sleep and _local.all_in_background):
            wait_all([started(*arguments)])
        else:
            blocking(*arguments)

    return call
