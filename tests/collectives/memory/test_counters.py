"""Waiting inside a node: no rank goes on too early, and none sleeps too long, in any way of waiting."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.memory import counters
from collectives.memory.counters import STRIDE, Barrier, Counters
from collectives.memory.shared_memory import Allocator, SharedMemory
from collectives.process import idle_wait
from collectives.process.topology import Topology, discover

pytestmark = pytest.mark.mpi
_ROUNDS = 60
_LONG = 60.0  # seconds in which another rank comes to anything


@pytest.fixture(params=["sleeps", "polls"], autouse=True)
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the futex of this system, and as on one that has none."""
    if request.param == "polls":
        monkeypatch.setattr(counters, "_futex", None)


@pytest.fixture
def topology(comm: Communicator) -> Iterator[Topology]:
    """The places of the ranks on their nodes."""
    made: list[MPI.Intracomm] = []
    yield discover(comm.mpi, made)
    for each in made:
        each.Free()


@pytest.fixture
def memory(topology: Topology) -> Iterator[SharedMemory]:
    """Zeros, the node's ranks'."""
    made = Allocator(topology.node).allocate(1 << 16, shared=True)
    assert made is not None
    yield made
    topology.node.Barrier()


@pytest.fixture(params=[False, True], ids=["in background", "waiting"])
def waiting(request: pytest.FixtureRequest) -> Iterator[None]:
    """The program is, or is not, waiting for what this thread does."""
    idle_wait.enter_background(lambda: request.param, may_sleep=False)
    yield
    idle_wait.enter_background(idle_wait.always, may_sleep=False)


@pytest.fixture
def own(comm: Communicator, memory: SharedMemory) -> Counters:
    """This rank's view of the node's numbers, which are followed by the sleepers."""
    ranks = comm.local_size
    return Counters(memory, 0, ranks * STRIDE, comm.local_rank, ranks, oversubscribed=False)


@pytest.mark.parametrize("oversubscribed", [False, True])
def test_what_was_written_before_a_barrier_is_there_after_it(
    topology: Topology, memory: SharedMemory, oversubscribed: bool, waiting: None
) -> None:
    rank, ranks = topology.local_rank, topology.local_size
    barrier = Barrier(memory, STRIDE, rank, ranks, oversubscribed=oversubscribed, fence=topology.node.Barrier)
    written = np.frombuffer(memory, np.int64, ranks, 1 << 15)
    delays = random.Random(rank)
    for number in range(1, _ROUNDS):
        time.sleep(delays.choice([0, 0, 0, 1e-5, 1e-4, 4e-3]))
        written[rank] = number
        barrier()
        assert written.tolist() == [number] * ranks
        barrier()


@pytest.mark.ranks(2, 3, 4)
def test_a_rank_that_waits_long_sleeps_until_it_is_woken(
    comm: Communicator, memory: SharedMemory, own: Counters
) -> None:
    rank, ranks = comm.local_rank, comm.local_size
    sleepers = ranks * STRIDE
    if rank == 0:  # the last to come, once all others sleep for it
        waited = time.monotonic()
        while sum(memory[sleepers : sleepers + ranks]) < ranks - 1 and time.monotonic() < waited + _LONG:
            time.sleep(1e-3)
        assert list(memory[sleepers : sleepers + ranks]) == [0] + [1] * (ranks - 1)
    own.advance(1)
    own.wait_for_all(1)
    comm.barrier()
    assert not any(memory[sleepers : sleepers + Counters.nbytes_of_sleepers(ranks)])


@pytest.mark.mpi(max_size=1)
@pytest.mark.parametrize("ranks", [2, 8, 9, 20])
def test_a_rank_that_sleeps_is_woken_among_few_and_many_ranks(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[int] = []
    monkeypatch.setattr(counters, "_futex", lambda address, operation, value, seconds=0.0: woken.append(address) or 0)
    sleepers = ranks * STRIDE
    memory = bytearray(sleepers + Counters.nbytes_of_sleepers(ranks))
    views = [Counters(memory, 0, sleepers, rank, ranks, oversubscribed=False) for rank in range(ranks)]
    for rank, view in enumerate(views):
        view.advance(1)
        assert not woken
        for other in range(ranks):
            if other != rank:
                place = next(found.asleep for found in views[other].others if found.rank == rank)
                memory[place] = 1
                view.advance(2)
                assert woken == [rank * STRIDE]
                memory[place] = 0
                woken.clear()


@pytest.mark.ranks(2, 3, 4)
def test_mpi_looks_for_messages_meanwhile(
    comm: Communicator, memory: SharedMemory, own: Counters, waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = np.frombuffer(memory, np.int64, comm.local_size, 1 << 15)

    def look() -> None:
        looks[comm.local_rank] += 1

    monkeypatch.setattr(counters, "progress_mpi", look)
    if comm.local_rank == 0:  # the last to come, once all others have had MPI look, time and again
        waited = time.monotonic()
        while looks[1:].min(initial=5) < 5 and time.monotonic() < waited + _LONG:
            time.sleep(1e-3)
        assert looks[1:].min(initial=5) >= 5
    own.advance(1)
    own.wait_for_all(1)
    comm.barrier()


@pytest.mark.ranks(2, 3, 4)
def test_who_waits_for_less_than_there_is_goes_on_at_once(comm: Communicator, own: Counters) -> None:
    own.advance(5)
    own.wait_for_all(5)
    for number in (5, 3, 0):
        own.wait_for_all(number)
    if comm.local_rank:  # without the first, who may be ahead
        own.advance(6)
    own.wait_for_all(5)
    comm.barrier()


def test_one_thread_waits_while_others_of_the_process_work(comm: Communicator, own: Counters) -> None:
    """The wait itself keeps no lock that Python's other threads need."""
    waiter = threading.Thread(target=own.wait_for_all, args=(1,), daemon=True)
    waiter.start()
    assert sum(range(200_000)) == 19_999_900_000
    comm.barrier()  # in the program's thread, while the other waits
    own.advance(1)
    waiter.join(_LONG)
    assert not waiter.is_alive()
    comm.barrier()


def test_a_node_is_oversubscribed_if_it_has_more_ranks_than_cores(topology: Topology) -> None:
    cores = set[int]().union(*topology.node.allgather(os.sched_getaffinity(0)))
    assert topology.oversubscribed == (topology.local_size > len(cores))
