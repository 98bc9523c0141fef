"""Finds out, for a rank that waits, that those it waits for wait for it elsewhere, so that none of them can go on.

    rank 0   in "gather units" of one communicator, to which rank 1 has not come
    rank 1   in "barrier" of another one, to which rank 0 has not come

Ranks of one node see each other's positions; of others nothing is known here, and the watchdog reports them later.
"""

from __future__ import annotations

from mpi4py import MPI

from .communicator import Communicator


def deadlocked(here: Communicator, there: Communicator) -> dict[int, str]:
    """The ranks that this one waits for in `here`, and that wait for it in `there`: their operations. Not collective.

    Positions are read one after the other, and a progress thread may be late: only what is found again and again is a
    deadlock.

    here: in an operation of which this rank is now. there: a communicator that has the ranks of `here` among its own,
    by whose numbers the result goes.
    """
    if not (here._positions.shared and there._positions.shared):
        return {}
    members = here._dispatch.topology.members
    numbers = MPI.Group.Translate_ranks(here.mpi.Get_group(), list(members), there.mpi.Get_group())
    positions = dict(zip(there._dispatch.topology.members, there._positions.all(), strict=True))
    found = {}
    for local, number in enumerate(numbers):
        position = positions[number]
        waits = position.inside and not position.queued and position.number > positions[there.rank].number
        if waits and not here._positions.has_come(local):
            found[number] = f"{position.operation} (operation {position.number})"
    return found
