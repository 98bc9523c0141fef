"""Set-up of a group: communicators of MPI, topology, tables of algorithms and watchdog, the same on every rank.

    mpi4py communicator -- checks -- duplicates -- topology -- Dispatch, Messages -- tables -- Guard

Where something fails on all ranks, as reading a file of tables does, no communicators of MPI are left behind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar

from mpi4py import MPI

from ..backends.checks import CheckedDispatch, is_debugging
from ..backends.dispatch import Dispatch
from ..backends.selection import Selection
from ..backends.tables import Tables, default_tables, library, read_tables, tuning_path
from ..base import arguments
from ..errors import ArgumentError, OperationError
from ..memory.leftovers import remove_names
from ..messages.messages import Messages
from ..process.forked import refuse_if_forked
from ..process.topology import discover, reported_ranks, world_ranks
from ..runtime.dropped import Key, free_dropped, freed_if_it_fails, freed_if_mpi_fails
from ..runtime.positions import group_name
from ..runtime.watchdog import Guard, limit_of, watch

Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class GroupParts:
    """The objects and facts that a group is set up with.

    mpi: the communicator that was given.
    owned_comms: those that are made for the group, to be freed with it; more may be added.
    for_messages: one of them, for messages alone.
    name: may be empty.
    rank_in_words: this rank and its group, as errors name them.
    is_debugging: whether the ranks compare each operation before it begins.
    dispatch: what carries operations out.
    messages: what sends and receives.
    world: the number in MPI.COMM_WORLD of each rank, or MPI.UNDEFINED.
    key: of `dropped`.
    guard: the watchdog's view of the group; None where it watches none.
    """

    mpi: MPI.Intracomm
    owned_comms: list[MPI.Intracomm]
    for_messages: MPI.Intracomm
    name: str
    rank_in_words: str
    is_debugging: bool
    dispatch: Dispatch
    messages: Messages
    world: list[int]
    key: Key
    guard: Guard | None

    @property
    def description(self) -> str:
        """The group as Python shows it: "Communicator(rank=0, size=2)"."""
        name = f", name={self.name!r}" if self.name else ""
        return f"Communicator(rank={self.dispatch.rank}, size={self.dispatch.size}{name})"


def set_up(
    mpi: MPI.Intracomm | None, timeout: float | None, name: str, scratch: bool, make: Callable[[MPI.Intracomm], Any]
) -> GroupParts:
    """Sets up the parts of a group. Collective.

    mpi, timeout, name, scratch: see `Communicator`.
    make: makes the Communicator that is measured where no table of algorithms covers the group.
    """
    refuse_if_forked("Communicator")
    if not isinstance(name, str):
        raise arguments.wrong_type("name", name, "a text")
    if mpi is not None and not isinstance(mpi, MPI.Intracomm):
        raise arguments.wrong_type("mpi", mpi, "an mpi4py intracommunicator")
    if mpi == MPI.COMM_NULL:
        raise ArgumentError("mpi: got MPI.COMM_NULL, as of a group that was closed; needs a communicator of ranks")
    given: MPI.Intracomm = MPI.COMM_WORLD if mpi is None else mpi
    limit = _agreed(given, lambda: limit_of(timeout))
    scratches, debugs = zip(*given.allgather((bool(scratch), is_debugging())), strict=True)
    if len(set(scratches)) > 1:
        raise ArgumentError(f"scratch: got {scratch!r} on rank {given.rank}; needs the same on every rank")
    free_dropped(given)
    owned_comms: list[MPI.Intracomm] = []
    with freed_if_mpi_fails("Communicator", owned_comms):
        collective = _duplicated(given, owned_comms)
        for_messages = _duplicated(given, owned_comms)
        topology = discover(collective, owned_comms)
    if mpi is None and topology.local_rank == 0:  # all ranks have come through MPI_Init
        remove_names()
    debugging = any(debugs)
    dispatch = (CheckedDispatch if debugging else Dispatch)(
        collective, topology, owned_comms, use_scratch=bool(scratch)
    )
    positions = dispatch.positions
    messages = Messages(for_messages, positions, dispatch.takes_device_addresses, name)
    number = collective.bcast(next(_numbers))
    with freed_if_it_fails(owned_comms):
        dispatch.selection = _select(dispatch, given, make)
    world, named = world_ranks(given), reported_ranks(given)
    size = MPI.COMM_WORLD.size
    rank_in_words = f"{group_name(named, size, name)}, rank {named[given.rank]} of {size}"
    key = world[0], number
    guard: Guard | None = None
    if given.size > 1 and limit < inf:
        seen = list(topology.members) if positions.shared else [given.rank]
        guard = Guard(for_messages, positions, seen, named, limit, name=name, group=key)
        watch(guard)
    return GroupParts(
        given, owned_comms, for_messages, name, rank_in_words, debugging, dispatch, messages, world, key, guard
    )


_numbers = itertools.count()


def _duplicated(mpi: MPI.Intracomm, owned_comms: list[MPI.Intracomm]) -> MPI.Intracomm:
    duplicate = mpi.Dup()
    owned_comms.append(duplicate)
    return duplicate


def _select(dispatch: Dispatch, mpi: MPI.Intracomm, make: Callable[[MPI.Intracomm], Any]) -> Selection:
    """The choices of algorithms, the same on all ranks; measured now, if no table covers the group. Collective."""
    topology = dispatch.topology
    defaults = default_tables(library(), topology.nodes, topology.local_size, topology.oversubscribed)

    def kept() -> Tables | None:
        """Rank 0's tables; None where the group is to measure some."""
        tuned = read_tables(tuning_path(), library(), topology.layout) if dispatch.rank == 0 else {}
        if dispatch.rank or tuned or defaults is not None or dispatch.size == 1:
            return tuned
        from ..calibration import is_on, known  # seldom needed

        return known(topology.layout) if is_on() else {}

    # Rank 0's defaults too: where ranks disagree on whether the part in C is there, so do their own.
    measured, defaults = dispatch.comm.bcast((_agreed(mpi, kept), defaults))
    if measured is None:
        from ..calibration import calibrate

        measured = calibrate(make, mpi, topology.layout)
    return Selection(dispatch.backends, measured, defaults)


def _agreed(mpi: MPI.Intracomm, make: Callable[[], Made]) -> Made:
    """Returns `make()`; if it raises on some rank, the first such rank's error is raised on all. Collective.

    An error that is no ArgumentError is an OperationError on the other ranks.
    """
    made: Made | None = None
    error: Exception | None = None
    error_for_others: Exception | None = None
    try:
        made = make()
    except ArgumentError as failure:
        error = error_for_others = failure
    except Exception as failure:
        error, error_for_others = failure, OperationError(f"rank {mpi.rank} failed: {failure!r}")
    for rank, found in enumerate(mpi.allgather(error_for_others)):
        if found is not None:
            raise error if error is not None and rank == mpi.rank else found
    return made  # type: ignore[return-value]
