"""Python objects between ranks."""

from __future__ import annotations

import pytest

import mpidl
from collectives import Communicator

pytestmark = pytest.mark.mpi


def test_objects_go_over_a_communicator_or_the_world(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpidl.job.runtime._default", comm)
    group = comm.split(comm.rank % 2)
    assert group is not None
    ranks = list(range(comm.size))
    assert mpidl.all_gather_object(comm.rank) == mpidl.all_gather_object(comm, comm.rank) == ranks
    assert mpidl.all_gather_object(group, comm.rank) == ranks[comm.rank % 2 :: 2]
    assert mpidl.all_gather_object(None) == [None] * comm.size
    last = comm.size - 1
    assert mpidl.broadcast_object({"rank": comm.rank}) == {"rank": 0}
    assert mpidl.broadcast_object(comm.rank, root=last) == mpidl.broadcast_object(comm, comm.rank, last) == last
    group.close()


def test_a_communicator_in_place_of_a_value_is_refused(comm: Communicator) -> None:
    with pytest.raises(mpidl.ConfigurationError, match="needs a value, or a Communicator"):
        mpidl.all_gather_object(comm)
    with pytest.raises(mpidl.ConfigurationError, match=r"got int first; needs .*Communicator"):
        mpidl.broadcast_object(3, comm)  # type: ignore[call-overload]


def test_a_value_that_cannot_be_pickled_is_an_error_on_every_rank(comm: Communicator) -> None:
    last = comm.size - 1
    value = (lambda: None) if comm.rank == last else 3
    for call in (lambda: mpidl.all_gather_object(comm, value), lambda: mpidl.broadcast_object(comm, value, last)):
        with pytest.raises(mpidl.ConfigurationError, match=f"rank {last} cannot be pickled"):
            call()
    assert mpidl.all_gather_object(comm, comm.rank) == list(range(comm.size))
