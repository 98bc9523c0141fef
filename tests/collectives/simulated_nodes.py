"""Nodes that are simulated on one machine: the ranks of each share memory with each other and with no others."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.process import topology

Nodes = tuple[tuple[int, ...], ...]

# By name and number of ranks.
LAYOUTS: dict[str, dict[int, Nodes]] = {
    "even": {4: ((0, 1), (2, 3))},
    "uneven": {3: ((0, 1), (2,)), 4: ((0, 1, 2), (3,))},
    "uneven, three": {4: ((0,), (1, 2), (3,))},
    "mixed": {4: ((0, 3), (1, 2))},
    "alone": {2: ((0,), (1,)), 3: ((0,), (1,), (2,))},
}


def over_nodes(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Communicator, Nodes]:
    """A Communicator of all ranks on simulated nodes. Collective."""
    nodes = LAYOUTS[name][MPI.COMM_WORLD.Get_size()]

    def split_by_node(comm: MPI.Intracomm, rank: int) -> MPI.Intracomm:
        world = MPI.COMM_WORLD.Get_rank()
        made = comm.Split(next(number for number, members in enumerate(nodes) if world in members), rank)
        assert isinstance(made, MPI.Intracomm)
        return made

    monkeypatch.setattr(topology, "split_by_node", split_by_node)
    return Communicator(), nodes
