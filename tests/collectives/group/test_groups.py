"""Groups: splitting, nesting, closing."""

from __future__ import annotations

import gc
import socket
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from mpi4py import MPI

from collectives import ArgumentError, Communicator, OperationError
from collectives.backends.tables import NO_LIMIT
from collectives.group import setup
from collectives.runtime import dropped

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


@pytest.mark.brief_on(2)
@pytest.mark.limit(600)  # over hosts, with more ranks than cores, each takes a tenth of a second
def test_communicators_can_be_made_and_closed_again_and_again(comm: Communicator) -> None:
    """MPI has some two thousand communicators in all; leaking any would run out of them."""
    for _ in range(700):
        group = comm.split(0)
        assert group is not None
        group.close()
    x = np.ones(1)
    comm.all_reduce(x)
    assert x[0] == comm.size


@pytest.fixture
def count_dropped(comm: Communicator) -> Callable[[], int]:
    """Counts the Communicators that this test has dropped and that are not freed; collective."""
    gc.collect()
    comm.split(None)
    known = set(dropped.DROPPED)

    def count() -> int:
        comm.split(None)
        return len(set(dropped.DROPPED) - known)

    return count


@pytest.mark.brief_on(2)
def test_dropped_communicators_are_freed_as_others_are_made(
    comm: Communicator, count_dropped: Callable[[], int]
) -> None:
    """Without that, MPICH would run out of them after 291."""
    for _ in range(320):
        comm.split(comm.rank % 2)
    assert count_dropped() == 0


def test_a_communicator_that_one_rank_has_not_dropped_is_freed_on_none(
    comm: Communicator, count_dropped: Callable[[], int]
) -> None:
    group, x = comm.split(0), np.ones(1)
    assert group is not None
    kept = comm.split(0) if comm.rank == 0 else bool(comm.split(0))
    assert count_dropped() == (comm.rank > 0)
    del kept
    assert count_dropped() == 0
    group.all_reduce(x)
    assert x[0] == comm.size
    group.close()
    assert count_dropped() == 0


@pytest.mark.mpi(min_size=2)
def test_messages_of_a_dropped_communicator_reach_none_that_is_made_later(
    comm: Communicator, count_dropped: Callable[[], int]
) -> None:
    """MPI uses the same context again."""
    for number in range(3):
        group, x = comm.split(0), np.zeros(1)
        assert group is not None
        if comm.rank == 0:
            group.send(np.full(1, number + 1.0), 1, async_op=True)
            group.send(np.full(100_000, -1.0), 1, async_op=True)  # which nothing receives
        elif comm.rank == 1:
            group.recv(x, 0)
            assert x[0] == number + 1
        del group
    assert count_dropped() == 0


@pytest.mark.thorough
@pytest.mark.ranks(2)
@pytest.mark.skipif(MPI.get_vendor()[0] != "MPICH", reason="only MPICH has so few communicators")
def test_more_communicators_than_mpi_has_are_an_error_that_says_what_to_do(comm: Communicator) -> None:
    kept: list[Communicator] = []

    def make() -> None:
        while (made := comm.split(0)) is not None:
            kept.append(made)

    with pytest.raises(OperationError, match=r"(split|Communicator): MPI could make no .*close\(\)"):
        make()
    assert len(kept) > 100
    for group in kept[1:]:
        group.close()
    again = comm.split(0)
    assert again is not None
    x = np.ones(1)
    for group in (comm, kept[0], again):
        group.all_reduce(x)
        if group is not comm:
            group.close()
    assert x[0] == comm.size**3


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
    x, parts, none = np.ones(1), np.ones(comm.size), None
    root = parts if comm.rank == 0 else none
    calls = {
        "all_reduce": lambda **how: group.all_reduce(x, **how),
        "reduce_scatter": lambda **how: group.reduce_scatter(x, parts, **how),
        "reduce": lambda **how: group.reduce(x, **how),
        "all_gather": lambda **how: group.all_gather(parts, x, **how),
        "all_to_all": lambda **how: group.all_to_all(parts.copy(), parts, **how),
        "broadcast": lambda **how: group.broadcast(x, **how),
        "gather": lambda **how: group.gather(root, x, **how),
        "scatter": lambda **how: group.scatter(x, root, **how),
        "barrier": lambda **how: group.barrier(**how),
        "compound": lambda **how: group.compound("step", group.barrier, **how),
    }
    for name, call in calls.items():
        for async_op in (False, True):
            with pytest.raises(OperationError, match=rf"{name}: .*it was closed"):
                call(async_op=async_op)
    memory = {
        "partitioned_all_reduce": lambda: group.partitioned_all_reduce([x]),
        "split": lambda: group.split(0),
        "empty": lambda: group.empty(3, np.float32),
        "shared": lambda: group.shared(3, np.float32),
        "pages": lambda: group.pages(4096),
    }
    for name, make in memory.items():
        with pytest.raises(OperationError, match=rf"{name}: .*it was closed"):
            make()
    with pytest.raises(ArgumentError, match=r"mpi: got MPI\.COMM_NULL.*closed"):
        Communicator(group.mpi)


def test_auto_goes_by_the_defaults_of_rank_0(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without the part in C would have other ones."""
    defaults = {"all_reduce": ((NO_LIMIT, "tree" if comm.rank else "ring"),)}
    monkeypatch.setattr(setup, "default_tables", lambda *_: defaults)
    monkeypatch.setenv("MPIDL_DEBUG", "1")  # it compares the algorithms
    with Communicator() as group:
        x = np.ones(100)
        group.all_reduce(x)
        assert (x == comm.size).all()


def test_ranks_are_translated_between_groups(comm: Communicator) -> None:
    """Ranks are those of MPI_Group_translate_ranks."""
    assert comm.world_ranks == tuple(range(comm.size))
    reversed_ = comm.split(0, key=-comm.rank)
    part = comm.split(comm.rank % 2)
    assert reversed_ is not None
    assert part is not None
    assert part.world_ranks == tuple(range(comm.rank % 2, comm.size, 2))
    for one in (comm, reversed_, part):
        for other in (comm, reversed_, part):
            ours, theirs = one.mpi.Get_group(), other.mpi.Get_group()
            expected = MPI.Group.Translate_ranks(ours, range(one.size), theirs)
            found = one.translate_ranks(range(one.size), other)
            assert found == [None if rank == MPI.UNDEFINED else rank for rank in expected]
            assert one.translate_ranks(one.rank, other) == other.rank
            ours.Free()
            theirs.Free()
    assert reversed_.translate_ranks([0, comm.size - 1]) == [comm.size - 1, 0]
    reversed_.close()
    part.close()
    assert reversed_.translate_ranks(0, comm) == comm.size - 1


def test_a_with_statement_closes_at_its_end(comm: Communicator) -> None:
    x = np.ones(100_000)
    with comm.duplicate() as group:
        group.all_reduce(x, async_op=True)
    assert (x == comm.size).all()
    with pytest.raises(OperationError, match="it was closed"):
        group.barrier()


def test_a_closed_duplicate_is_not_kept(comm: Communicator) -> None:
    with Communicator() as group:
        first = group.duplicate()
        first.close()
        seen = weakref.ref(first), weakref.ref(first._end)
        del first
        group.duplicate()
        gc.collect()
        assert [where() for where in seen] == [None] * 2


@pytest.mark.mpi(min_size=2)
def test_an_exception_leaves_a_with_statement_though_other_ranks_do_not_come(comm: Communicator) -> None:
    group = Communicator()
    if comm.rank == 0:
        with pytest.raises(KeyError, match="lost"), group:
            raise KeyError("lost")
        with pytest.raises(OperationError, match="closed after an exception"):
            group.barrier()
    comm.barrier()


def test_closing_finishes_what_is_queued(comm: Communicator) -> None:
    group = comm.split(0)
    assert group is not None
    x = np.ones(100_000)
    group.all_reduce(x, async_op=True)
    group.close()
    assert (x == comm.size).all()


def test_ranks_that_close_after_the_same_exception_close_together(comm: Communicator) -> None:
    with pytest.raises(ArgumentError):  # noqa: PT012
        group = comm.duplicate()
        try:
            group.all_reduce(np.zeros(3), "median")
        finally:
            group.close()
    assert all(made == MPI.COMM_NULL for made in group._parts.owned_comms)
