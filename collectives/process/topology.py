"""Topology of a group as one rank sees it: its node, its number there, and the number of nodes."""

from __future__ import annotations

from dataclasses import dataclass

from mpi4py import MPI

from .cores import usable


@dataclass(frozen=True)
class Topology:
    """This rank's place: its number among the `local_size` ranks of its node, and the number of nodes.

    members: this node's ranks.
    node: a communicator of them.
    across: one of the ranks with this rank's number on all nodes.
    regular: whether rank = node number * local_size + local_rank on every rank, with the same local_size everywhere.
    oversubscribed: whether this node has more ranks than cores that they may use.
    fills_cores: whether it has at least as many ranks as such cores.
    cores: how many of them.
    layout: by which tables of algorithms are kept, the same on all ranks: "2x4" for two nodes of four ranks, "3+1" for
        nodes of three and one.
    """

    local_rank: int
    local_size: int
    nodes: int
    regular: bool
    members: tuple[int, ...]
    node: MPI.Intracomm
    across: MPI.Intracomm
    oversubscribed: bool
    fills_cores: bool
    cores: int
    layout: str


def discover(comm: MPI.Intracomm, owned_comms: list[MPI.Intracomm]) -> Topology:
    """Finds each rank's node: ranks that can share memory are on one. Collective over `comm`.

    owned_comms: gets the two communicators.
    """
    rank = comm.Get_rank()
    node = split_by_node(comm, rank)
    owned_comms.append(node)
    local_rank, local_size = node.Get_rank(), node.Get_size()
    sizes = [size for number, size in comm.allgather((local_rank, local_size)) if number == 0]
    nodes = len(sizes)
    across = comm.Split(local_rank, rank)
    assert isinstance(across, MPI.Intracomm)
    owned_comms.append(across)
    in_place = across.Get_size() == nodes and rank == across.Get_rank() * local_size + local_rank
    regular = bool(comm.allreduce(int(in_place), MPI.MIN))
    members, cores = zip(*node.allgather((rank, usable())), strict=True)
    together = len(set().union(*cores))
    spare = together - local_size
    layout = f"{nodes}x{local_size}" if len(set(sizes)) == 1 else "+".join(map(str, sizes))
    return Topology(
        local_rank, local_size, nodes, regular, members, node, across, spare < 0, spare <= 0, together, layout
    )


def split_by_node(comm: MPI.Intracomm, rank: int) -> MPI.Intracomm:
    """A communicator of the ranks that share memory with this one, in their order. Collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=rank)
    assert isinstance(node, MPI.Intracomm)
    return node


def reported_ranks(comm: MPI.Intracomm) -> list[int]:
    """The numbers by which errors and reports name a group's ranks: those in the world, or the group's own outside."""
    found = world_ranks(comm)
    return found if min(found) >= 0 else list(range(len(found)))


def world_ranks(comm: MPI.Intracomm) -> list[int]:
    """The number in MPI.COMM_WORLD of each of a group's ranks."""
    ours, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    try:
        return list(MPI.Group.Translate_ranks(ours, range(ours.size), world))
    finally:
        ours.Free()
        world.Free()
