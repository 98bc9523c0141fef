"""A Communicator of its own for every engine at work that needs one.

Buckets of two wrappers, or of a wrapper and of synchronised norms, may fill in another order on each rank, and units
are gathered while buckets fill; on one Communicator the ranks would then meet in different operations. Duplicates are
kept and used again, as MPI has few.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np

from collectives import Communicator


class Lane:
    """A duplicate of a process group. free: nobody on this rank uses it."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.free = False
        self._settle: Callable[[], None] | None = None

    def settle_by(self, settle: Callable[[], None] | None) -> None:
        """What all ranks do together before the lane is used anew, or ends, as each may leave operations on it.

        Alike on every rank, and not to keep the engine.
        """
        self._settle = settle
        self.comm.before_end(settle)

    def give_back(self) -> None:
        """Its engine is gone. What it may have left waits for the other ranks until that is settled."""
        if self._settle is not None:
            self.comm.patient = True
        self.free = True

    def take(self) -> None:
        """For another engine. Collective."""
        self.free = False
        if self._settle is not None:
            self._settle()
            self.settle_by(None)
        self.comm.patient = False


_lanes: weakref.WeakKeyDictionary[Communicator, list[Lane]] = weakref.WeakKeyDictionary()


def take(group: Communicator) -> Lane:
    """A lane that is free on every rank, made if there is none. Collective; the user gives it back."""
    lanes = _lanes.setdefault(group, [])
    free = np.array([lane.free for lane in lanes] + [False], np.uint8)
    group.all_reduce(free, "min")
    number = int(free.argmax())
    if free[number]:
        lanes[number].take()
    else:
        lanes.append(Lane(group.duplicate()))
        number = -1
    return lanes[number]
