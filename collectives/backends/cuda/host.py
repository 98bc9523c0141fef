"""The collectives between the ranks' CPUs that operations on GPU memory need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mpi4py import MPI

from ...memory.shared_memory import Allocator
from ...process.topology import Topology
from ..selection import Selection


class Host(Protocol):
    """One rank's view of a group, with the operations on host memory (`backends.dispatch`)."""

    comm: MPI.Intracomm
    rank: int
    size: int
    topology: Topology
    allocator: Allocator
    selection: Selection

    def call(self, operation: str, algorithm: str, arguments: Sequence[Any]) -> Callable[[], None]:
        """The operation on host memory by the backend of that name, to be made again and again."""

    def part(self, color: int) -> Host:
        """The group of the ranks that give the same colour, for what this one leaves to it. Collective."""
