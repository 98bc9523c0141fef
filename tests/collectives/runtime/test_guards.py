"""Guards of the watchdog, of one group each: their limits, their start, and what they ask of other nodes."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives import ArgumentError, Communicator
from collectives.runtime import watchdog
from collectives.runtime.positions import Positions
from collectives.runtime.watchdog import TAGS, Guard, limit_of


def test_limits_that_make_no_sense_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limit_of(None) == 600
    assert limit_of(0) == float("inf")
    monkeypatch.setenv("MPIDL_TIMEOUT", "20")
    assert limit_of(None) == 20
    assert limit_of(3) == 3
    monkeypatch.setenv("MPIDL_TIMEOUT", "soon")
    with pytest.raises(ArgumentError, match=r"MPIDL_TIMEOUT: got 'soon'; .*seconds"):
        limit_of(None)
    with pytest.raises(ArgumentError, match="timeout: got -1"):
        limit_of(-1)


def over_nodes(comm: Communicator, ranks: int) -> Guard:
    """The guard of a group of which every rank here is the first of another node's so many, and the others idle."""
    here = [comm.rank, *(comm.size + comm.rank * ranks + number for number in range(ranks - 1))]
    positions = Positions(bytearray(Positions.nbytes(ranks)), 0, ranks)
    return Guard(comm.mpi.Dup(), positions, here, list(range(comm.size * (ranks + 1))), 4.0)


@pytest.mark.mpi
@pytest.mark.ranks(2, exactly=True)
def test_answers_to_other_nodes_last_until_they_are_taken(comm: Communicator) -> None:
    """With 64 ranks on a node MPI reads an answer from its memory later; the program allocates and frees meanwhile."""
    guard, known = over_nodes(comm, 64), set()
    enough, both = time.monotonic() + 0.3, None
    while both is None or not both.Test():  # the other rank may still ask
        known |= set(guard.positions_of_all())
        if both is None and len(known) == 2 * 64 and time.monotonic() > enough:
            both = guard.messages.Ibarrier()
        junk = [bytes([0xEE]) * size for size in range(7000, 30000, 61)]
        time.sleep(0.005)
    assert len(known) == 2 * 64
    assert junk


@pytest.mark.mpi
@pytest.mark.ranks(2, exactly=True)
def test_late_messages_of_a_group_that_is_gone_are_forgotten(comm: Communicator) -> None:
    """MPI gives its place to another group, which may have fewer ranks."""
    guard = over_nodes(comm, 3)
    old = Guard(guard.messages, Positions(bytearray(Positions.nbytes(1)), 0, 1), [7], list(range(8)), 4.0, group=(0, 5))
    other = 1 - comm.rank
    old.positions.enter(3, "barrier")
    answer = old.group, old.ranks, old.positions.snapshot(), [0.0]
    sent = [guard.messages.Isend(np.array(old.group), other, TAGS[0]), guard.messages.isend(answer, other, TAGS[1])]
    enough, known = time.monotonic() + 1.0, set[int]()
    both = None
    while both is None or not both.Test():
        known |= set(guard.positions_of_all())
        if both is None and time.monotonic() > enough:
            both = guard.messages.Ibarrier()
        time.sleep(0.01)
    MPI.Request.Waitall(sent)
    assert len(known) == 6
    assert 7 not in known


@pytest.mark.mpi
@pytest.mark.ranks(2, exactly=True)
def test_without_threads_in_mpi_other_nodes_are_not_asked(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = over_nodes(comm, 2)
    guard.messages = SimpleNamespace(size=4)  # type: ignore[assignment]  # which can send nothing
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_FUNNELED)
    for now in (0.0, 1.0, 2.0):
        assert set(guard.positions_of_all()) == set(guard.ranks)
        guard.look(now, "", "")


def test_a_watchdog_that_could_not_be_started_is_started_with_the_next_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(thread: Any) -> None:
        raise RuntimeError("can't start new thread")

    group: Any = SimpleNamespace()
    begun: list[Any] = []
    monkeypatch.setattr(watchdog, "_guards", {})
    monkeypatch.setattr(watchdog, "_thread", [])
    monkeypatch.setattr(watchdog.threading.Thread, "start", fails)
    with pytest.raises(RuntimeError, match="new thread"):
        watchdog.watch(group)
    monkeypatch.setattr(watchdog.threading.Thread, "start", lambda thread: begun.append(thread))
    for _ in range(2):
        watchdog.watch(group)
    assert len(begun) == 1
