"""A pool of duplicates of Communicators: one of its own for every engine that needs one.

Buckets of two engines may fill in a different order on each rank, and units are gathered while buckets fill; on one
Communicator the ranks would then meet in different operations. Duplicates stay in the pool and are used again, as MPI
libraries offer a limited number.

`take` and `PooledCommunicator.take` are collective, in the thread of the program; `give_back` is local, and may come at
any time, as from the garbage collector.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np

from collectives import Communicator
from collectives.draining import exempt_from_watchdog, register_drain_hook


class PooledCommunicator:
    """A duplicate of a Communicator.

    comm: the duplicate.
    free: whether no engine of this rank uses it.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.free = False
        self._drain: Callable[[], None] | None = None

    def set_drain(self, drain: Callable[[], None] | None) -> None:
        """Sets the function that all ranks call together before the next engine, or the end of the program.

        drain: completes operations that single ranks have left; the same on every rank; must not keep the engine.
        """
        self._drain = drain
        register_drain_hook(self.comm, drain)

    def give_back(self) -> None:
        """Makes it free for another engine. An operation in flight may wait for the other ranks until the drain."""
        if self._drain is not None:
            exempt_from_watchdog(self.comm)
        self.free = True

    def take(self) -> None:
        """Drains it and takes it for another engine. Collective."""
        self.free = False
        if self._drain is not None:
            self._drain()
            self.set_drain(None)
        exempt_from_watchdog(self.comm, False)


_pooled: weakref.WeakKeyDictionary[Communicator, list[PooledCommunicator]] = weakref.WeakKeyDictionary()


def take(group: Communicator) -> PooledCommunicator:
    """Returns a duplicate of `group` that is free on every rank, made if there is none. Collective.

    The engine that takes it gives it back.
    """
    pool = _pooled.setdefault(group, [])
    free = np.array([each.free for each in pool] + [False], np.uint8)
    group.all_reduce(free, "min")
    number = int(free.argmax())
    if free[number]:
        pool[number].take()
    else:
        pool.append(PooledCommunicator(group.duplicate()))
        number = -1
    return pool[number]
