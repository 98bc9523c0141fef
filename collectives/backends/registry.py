"""Makes the backends of a group (`MAKERS`), by their names, which `algorithm=` accepts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..schedules.algorithms import NAMES
from .backend import Backend, Resources
from .mpi import Library
from .schedule_backend import ScheduleBackend
from .symmetric.backend import Symmetric
from .symmetric_or_mpi import SymmetricOrLibrary


def _hierarchical(resources: Resources) -> Backend | None:
    """The backend of several nodes, whose modules a job on one node does not import."""
    if resources.topology.nodes == 1:
        return None
    from .hierarchical.hierarchy import Hierarchy

    return Hierarchy.of_nodes(resources)


# In the order in which `Communicator.algorithms` lists them; each gives None where the group cannot have it.
MAKERS: tuple[Callable[[Resources], Backend | None], ...] = (
    Library.of_group,
    Symmetric.of_node,
    _hierarchical,
    *(partial(ScheduleBackend, name) for name in NAMES),
)


def make_backends(resources: Resources) -> dict[str, Backend]:
    """Makes the backends that a group has, in the order of MAKERS. Collective.

    "symmetric_or_mpi" follows "symmetric".
    """
    made: dict[str, Backend] = {}
    for make in MAKERS:
        backend = make(resources)
        if backend is not None:
            made[backend.name] = backend
        if isinstance(backend, Symmetric):
            made[SymmetricOrLibrary.name] = SymmetricOrLibrary(backend, made[Library.name])
    return made
