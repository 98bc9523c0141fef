"""Finds ranks that wait for each other in two Communicators.

    rank 0   in "gather units" of one Communicator, to which rank 1 has not come
    rank 1   in "barrier" of another one, to which rank 0 has not come

Ranks of one node see each other's positions; those of others are asked of their watchdogs.
"""

from __future__ import annotations

from mpi4py import MPI

from ..runtime.positions import Position
from .ordered_group import OrderedGroup


def deadlocked(here: OrderedGroup, there: OrderedGroup) -> dict[int, str]:
    """Finds the ranks that this one waits for in `here` and that wait for it in `there`. Not collective.

    Returns the operation of each, by its rank in `there`.

    Positions are read one after the other, and a progress thread may be late: only what is found again and again is a
    deadlock.

    here: a Communicator in an operation of which this rank is now.
    there: another Communicator, with ranks of `here`.
    """
    groups = here.mpi.Get_group(), there.mpi.Get_group()
    numbers = MPI.Group.Translate_ranks(groups[0], list(range(here.size)), groups[1])
    for group in groups:
        group.Free()
    positions_there, positions_here = _positions(there), _positions(here)
    found = {}
    for rank, number in enumerate(numbers):
        if (
            rank in positions_here
            and number in positions_there
            and positions_here[rank].number < positions_here[here.rank].number
        ):
            position = positions_there[number]
            if position.inside and not position.queued and position.number > positions_there[there.rank].number:
                found[number] = f"{position.operation} (operation {position.number})"
    return found


def _positions(comm: OrderedGroup) -> dict[int, Position]:
    """Positions by rank, of this rank and of those that can be asked."""
    guard, positions = comm._parts.guard, comm._dispatch.positions
    if guard is not None:
        return guard.positions_of_all()
    members = comm.node_ranks if positions.shared else [comm.rank]
    return dict(zip(members, positions.all(), strict=True))
