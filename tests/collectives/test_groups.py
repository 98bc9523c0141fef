"""Groups: splitting, nesting, closing."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from collectives import Communicator, OperationError

pytestmark = pytest.mark.mpi


def test_split_by_colour_and_key(comm: Communicator) -> None:
    group = comm.split(comm.rank % 2, key=-comm.rank)
    assert group is not None
    members = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2]
    assert group.size == len(members)
    assert group.rank == members[::-1].index(comm.rank)
    x = np.array([float(comm.rank)])
    group.all_reduce(x)
    assert x[0] == sum(members)
    group.close()


def test_no_colour_is_no_group(comm: Communicator) -> None:
    group = comm.split(None if comm.rank == 0 else 1)
    assert (group is None) == (comm.rank == 0)
    if group is not None:
        assert group.size == comm.size - 1
        group.close()


def test_groups_work_at_the_same_time_as_the_whole(comm: Communicator) -> None:
    group = comm.split(comm.rank // 2)
    assert group is not None
    a, b = np.full(50_000, 1.0), np.full(50_000, 2.0)
    works = [comm.all_reduce(a, async_op=True), group.all_reduce(b, async_op=True)]
    for work in works:
        assert work is not None
        work.wait()
    assert (a == comm.size).all()
    assert (b == 2.0 * group.size).all()
    group.close()


def test_communicators_can_be_made_and_closed_again_and_again(comm: Communicator) -> None:
    """MPI has some two thousand communicators in all; leaking any would run out of them."""
    for _ in range(700):
        group = comm.split(0)
        assert group is not None
        group.close()
    x = np.ones(1)
    comm.all_reduce(x)
    assert x[0] == comm.size


def test_topology_counts_this_node(comm: Communicator) -> None:
    names = comm.mpi.allgather(socket.gethostname())
    here = [rank for rank, name in enumerate(names) if name == names[comm.rank]]
    assert (comm.local_rank, comm.local_size) == (here.index(comm.rank), len(here))
    assert comm.nodes == len(set(names))
    assert comm.node_ranks == tuple(here)


def test_a_rank_makes_a_communicator_of_itself_without_the_others(comm: Communicator) -> None:
    if comm.rank == 0:
        group = comm.split_self()
        assert (group.rank, group.size) == (0, 1)
        x = np.ones(3)
        group.all_reduce(x)
        assert x.tolist() == [1.0] * 3
        group.close()
    comm.barrier()


def test_closing_twice_does_nothing_and_a_closed_one_says_so(comm: Communicator) -> None:
    group = comm.split(0)
    assert group is not None
    group.close()
    group.close()
    for async_op in (False, True):
        with pytest.raises(OperationError, match=r"all_reduce: this communicator cannot .* it was closed"):
            group.all_reduce(np.ones(2), async_op=async_op)


def test_closing_finishes_what_is_queued(comm: Communicator) -> None:
    group = comm.split(0)
    assert group is not None
    x = np.ones(100_000)
    group.all_reduce(x, async_op=True)
    group.close()
    assert (x == comm.size).all()
