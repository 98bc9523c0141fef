"""Where ranks are, as the process sees it that has started them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import numpy as np
import pytest

from collectives import Communicator
from collectives.witness import Witness, tell

pytestmark = pytest.mark.mpi


@pytest.fixture
def witness(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Witness]:
    """Rank 0 of each node stands for the process that waits for the job."""
    token = comm.mpi.bcast(secrets.token_hex(8)) + str(comm.rank - comm.local_rank)
    made = Witness(token) if comm.local_rank == 0 else Witness(secrets.token_hex(8))
    monkeypatch.setenv("MPIDL_JOB", token)
    comm.barrier()
    yield made
    made.close()


def here(comm: Communicator) -> list[int]:
    """This node's ranks, in the world."""
    nodes = comm.mpi.allgather((comm.rank - comm.local_rank, comm.rank))
    return [rank for first, rank in nodes if first == comm.rank - comm.local_rank]


def test_it_sees_each_group_by_the_world_s_numbers(comm: Communicator, witness: Witness) -> None:
    backwards = Communicator(comm.mpi.Split(0, -comm.rank))
    backwards.all_reduce(np.ones(3))
    backwards.barrier()
    comm.barrier()
    witness.look()
    node = here(comm)
    if comm.local_rank == 0:
        (group,) = witness.groups()
        assert sorted(group) == node
        assert {there.operation for there in group.values()} == {"barrier"}
        assert {there.number for there in group.values()} == {2}
    comm.barrier()
    backwards.close()


def test_it_sees_peers_by_the_world_s_numbers(comm: Communicator, witness: Witness) -> None:
    backwards = Communicator(comm.mpi.Split(0, -comm.rank))
    witness.look()
    comm.barrier()
    if backwards.rank == backwards.size - 1 and comm.size > 1:  # rank 0 of the world waits for the last one
        with backwards._positions.waiting("recv", 0):
            assert witness.groups()[0][0].peer == comm.size - 1
    comm.barrier()
    backwards.close()


def test_it_hears_which_process_is_which_rank(
    comm: Communicator, witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collectives.witness._AT_ONCE", 2)
    told = [(f"node{rank // 2}", 10 + rank) for rank in range(5)]
    if comm.local_rank == 0:
        tell(told)
        witness.look()
        witness.close()
        assert witness.processes == dict(enumerate(told))


def test_what_it_keeps_is_bounded_and_goes_with_it(
    comm: Communicator, witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collectives.witness._KEPT", 3)
    for _ in range(5):
        made = Communicator()
        comm.barrier()
        witness.look()
        made.close()
    if comm.local_rank == 0:
        assert len(witness.groups()) == 3
        before = len(os.listdir("/proc/self/fd"))
        witness.close()
        assert len(os.listdir("/proc/self/fd")) == before - 4
        assert witness.groups() == []


def test_nobody_need_be_there(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDL_JOB", secrets.token_hex(8))
    made = Communicator()
    made.barrier()
    made.close()
