"""Which ranks share a node."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mpi4py import MPI


@dataclass(frozen=True)
class Topology:
    """This rank's place: its number among the `local_size` ranks of its node, and the number of nodes.

    members: this node's ranks. node: a communicator of them. across: one of the ranks with this rank's number on all
    nodes. regular: whether rank = node number * local_size + local_rank on every rank, with the same local_size
    everywhere. crowded: whether this node has more ranks than cores that they may use.
    """

    local_rank: int
    local_size: int
    nodes: int
    regular: bool
    members: tuple[int, ...]
    node: MPI.Intracomm
    across: MPI.Intracomm
    crowded: bool

    def free(self) -> None:
        """Frees the two communicators. Collective."""
        self.node.Free()
        self.across.Free()


def _cores() -> set[int]:
    """Those that this process may use, by number."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def discover(comm: MPI.Intracomm) -> Topology:
    """Collective over `comm`: ranks that can share memory are on one node."""
    rank = comm.Get_rank()
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=rank)
    local_rank, local_size = node.Get_rank(), node.Get_size()
    nodes = comm.allreduce(int(local_rank == 0))
    across = comm.Split(local_rank, rank)
    in_place = across.Get_size() == nodes and rank == across.Get_rank() * local_size + local_rank
    regular = bool(comm.allreduce(int(in_place), MPI.MIN))
    assert isinstance(node, MPI.Intracomm)
    assert isinstance(across, MPI.Intracomm)
    members, cores = zip(*node.allgather((rank, _cores())), strict=True)
    crowded = local_size > len(set().union(*cores))
    return Topology(local_rank, local_size, nodes, regular, members, node, across, crowded)
