"""The MPI communicators of Communicators that were dropped without `close`.

To free them is collective, and ranks drop a Communicator at different times, as the garbage collector comes by. So the
MPI communicators of a dropped one are kept here. Whenever ranks make new ones, which they do together, they tell each
other what they have dropped: what all its ranks have dropped is freed, in the same order on each of them.

    rank 0   drops A, B | makes a group of 0, 1, 2:   A B   --- all have dropped A: frees A
    rank 1   drops A    | makes a group of 0, 1, 2:   A         frees A
    rank 2   drops A, B | makes a group of 0, 1, 2:   A B       frees A; B stays until rank 1 drops it

Nothing here waits for a rank that does not come: all ranks of what is freed are in the call, and have dropped it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from mpi4py import MPI

from ..errors import OperationError
from ..process.topology import world_ranks

Key = tuple[int, int]  # of a Communicator, the same on all its ranks: of its first rank and that rank's count


class Closes(Protocol):
    """An object that works over a group's MPI communicators, and ends that in `close`."""

    def close(self) -> None:
        """Ends its work; all ranks of the group call it."""


@dataclass
class Remains:
    """The parts of a dropped Communicator that are still to be freed.

    members: its ranks, by their numbers in the world, or MPI.UNDEFINED, with which it stays.
    comms: to be freed; more may be added as long as it lives.
    """

    members: Sequence[int]
    comms: list[MPI.Intracomm]
    channels: Closes
    guard: Callable[[], Closes | None]

    def free(self) -> None:
        """Frees the communicators. Collective over the members."""
        guard = self.guard()
        if guard is not None:
            guard.close()
        self.channels.close()
        for comm in self.comms:
            comm.Free()


DROPPED: dict[Key, Remains] = {}


def when_dropped(owner: Any, key: Key, remains: Remains) -> weakref.finalize[..., Any]:
    """Registers a finalizer that keeps `remains` in DROPPED when `owner` is collected."""
    finalizer = weakref.finalize(owner, DROPPED.__setitem__, key, remains)
    finalizer.atexit = False
    return finalizer


def free_dropped(comm: MPI.Intracomm) -> None:
    """Frees what all its ranks have dropped, if they are all in `comm`. Collective over it."""
    own = sorted(DROPPED.copy())  # a copy at once, as the garbage collector may add to it
    offers = dict(zip(world_ranks(comm), map(frozenset, comm.allgather(own)), strict=True))
    for key in own:
        remains = DROPPED.get(key)
        if remains is not None and all(member >= 0 and key in offers.get(member, ()) for member in remains.members):
            del DROPPED[key]
            remains.free()


@contextmanager
def freed_if_it_fails(owned_comms: list[MPI.Intracomm]) -> Iterator[None]:
    """Context that frees the communicators in `owned_comms` if its body fails, on all ranks or on none."""
    try:
        yield
    except Exception:
        for comm in owned_comms:
            comm.Free()
        raise


@contextmanager
def freed_if_mpi_fails(what: str, owned_comms: list[MPI.Intracomm]) -> Iterator[None]:
    """Context that makes communicators; if MPI makes no more, frees those in `owned_comms` and raises OperationError.

    MPI libraries agree on a new communicator, so that all ranks come to the same end.
    """
    try:
        with freed_if_it_fails(owned_comms):
            yield
    except MPI.Exception as error:
        why = error.Get_error_string().strip().splitlines()[-1]
        raise OperationError(
            f"{what}: MPI could make no more communicators: {why}; close() those that are not used any more"
        ) from error
