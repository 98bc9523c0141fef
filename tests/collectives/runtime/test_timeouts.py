"""Timeouts of single operations, and names of groups."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest

from collectives import Communicator, MismatchError, OperationError, OperationTimeout, WorkTimeout
from collectives.messages.message import under_way
from collectives.runtime.positions import group_name

pytestmark = pytest.mark.mpi


def test_an_operation_within_its_timeout_is_as_without_one(comm: Communicator) -> None:
    x, parts = np.full(1000, comm.rank + 1.0), np.zeros(comm.size)
    total = comm.size * (comm.size + 1) / 2
    comm.all_reduce(x, timeout=60)
    assert (x == total).all()
    comm.all_gather(parts, np.full(1, float(comm.rank)), timeout=60)
    assert parts.tolist() == list(range(comm.size))
    comm.all_reduce([x, parts], timeout=60)
    assert (x == total * comm.size).all()
    comm.barrier(timeout=60 if comm.rank == 0 else None)  # of this rank alone
    comm.compound("sum", lambda: comm.all_reduce(x), timeout=60)
    comm.send(x, comm.rank, timeout=60)
    assert comm.recv(np.zeros(1000), comm.rank, timeout=60) == comm.rank
    assert comm.sendrecv(parts, comm.rank, parts.copy(), comm.rank, timeout=60) == comm.rank
    assert comm.broadcast_object(comm.rank, timeout=60) == 0
    everyone = list(range(comm.size))
    assert comm.all_gather_object(comm.rank, timeout=60) == everyone
    assert comm.gather_object(comm.rank, timeout=60) == (None if comm.rank else everyone)
    assert comm.scatter_object(everyone, timeout=60) == comm.rank
    comm.send_object("it", comm.rank, timeout=60)
    assert comm.recv_object(comm.rank, timeout=60) == ("it", comm.rank)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("algorithm", ["auto", "ring", "mpi"])
def test_an_operation_that_times_out_leaves_its_communicator_unusable(comm: Communicator, algorithm: str) -> None:
    group, x = Communicator(name="late"), np.ones(100_000)
    if comm.rank == 0:
        with pytest.raises(OperationTimeout, match=r"all_reduce .*'late'.* not complete after 0\.05 s") as raised:
            group.all_reduce(x, algorithm=algorithm, timeout=0.05)
        assert isinstance(raised.value, TimeoutError)
        for call in (group.barrier, lambda: group.send(x, 1)):
            with pytest.raises(OperationError, match=r"'late' cannot be used .*all_reduce .*its timeout"):
                call()
    comm.barrier()
    if comm.rank:  # what was given up goes on in another thread
        group.all_reduce(x, algorithm=algorithm)
        assert (x == comm.size).all()
    comm.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_group_that_is_closed_while_an_operation_is_under_way_says_so(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collectives.runtime.progress._STRANDED", 0.05)  # s
    group, x = Communicator(timeout=math.inf), np.ones(100)
    if comm.rank == 0:
        with pytest.raises(OperationTimeout):
            group.all_reduce(x, timeout=0.05)
        group.close()
        with pytest.raises(OperationError, match="while an operation that had timed out was still under way"):
            group.barrier()
    comm.barrier()
    if comm.rank:
        group.all_reduce(x)
    comm.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_receive_that_times_out_ends_with_its_group(comm: Communicator) -> None:
    """Once that is closed, it no longer looks for messages while the program waits for others."""
    group, of_others = Communicator(), set(under_way)
    with pytest.raises(OperationTimeout, match=r"recv from any rank .*0\.05 s, its timeout"):
        group.recv(np.zeros(3), timeout=0.05)
    with pytest.raises(OperationError, match=r"cannot be used .*recv from any rank"):
        group.barrier()
    comm.barrier()
    group.close()
    assert under_way <= of_others
    x = np.zeros(3)
    comm.send(np.ones(3), (comm.rank + 1) % comm.size)
    assert comm.recv(x) == (comm.rank - 1) % comm.size
    assert x.tolist() == [1, 1, 1]


def test_a_timeout_may_be_longer_than_a_lock_can_be_waited_for(comm: Communicator) -> None:
    x = np.ones(3)
    comm.all_reduce(x, timeout=1e10)
    work = comm.all_reduce(x, async_op=True)
    assert work is not None
    work.wait(1e300)
    assert (x == comm.size**2).all()


def test_a_sendrecv_whose_time_is_over_has_ended_or_has_timed_out(comm: Communicator) -> None:
    group, x, out = comm.split_self(), np.ones(3), np.zeros(3)
    with contextlib.suppress(OperationTimeout):
        group.sendrecv(x, 0, out, 0, timeout=1e-9)
        assert (out == 1).all()


@pytest.mark.mpi(min_size=2)
def test_a_probe_that_times_out_leaves_all_as_it_was(comm: Communicator) -> None:
    with pytest.raises(WorkTimeout, match=r"probe: .*0\.05 s"):
        comm.probe(timeout=0.05)
    with pytest.raises(TimeoutError):
        comm.recv_object(tag=3, timeout=0.05)
    comm.barrier()
    comm.send_object("late", (comm.rank + 1) % comm.size, tag=3)
    assert comm.recv_object(tag=3, timeout=60) == ("late", (comm.rank - 1) % comm.size)
    comm.barrier()


def test_names_are_in_errors_and_stay_with_duplicates(comm: Communicator) -> None:
    group = comm.split(0, comm.rank, name="dp")
    assert group is not None
    other = group.duplicate()
    assert (comm.name, group.name, other.name) == ("", "dp", "dp")
    assert repr(group) == f"Communicator(rank={comm.rank}, size={comm.size}, name='dp')"
    group.send(np.ones(3), comm.rank)
    with pytest.raises(OperationError, match=r"recv from rank .*'dp', rank . of .*x has 2"):
        group.recv(np.ones(2), comm.rank)
    group.close()
    for closed in (group, other):
        with pytest.raises(OperationError, match=r"barrier: .*'dp' .*it was closed"):
            closed.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_name_is_in_the_error_of_ranks_that_differ(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDL_DEBUG", "1")
    with Communicator(name="dp") as group:
        with pytest.raises(MismatchError, match=r"'dp': .*different operations: rank.* 0"):
            group.all_reduce(np.ones(3)) if comm.rank else group.scan(np.ones(3))
        group.barrier()


def test_a_name_stands_before_the_ranks_of_a_group_that_is_not_the_world() -> None:
    assert group_name([0, 1], 2, "dp") == "communicator 'dp'"
    assert group_name([2, 0], 4, "dp") == "communicator 'dp' of ranks 0, 2"
    assert group_name([2, 0], 4) == "the communicator of ranks 0, 2"
