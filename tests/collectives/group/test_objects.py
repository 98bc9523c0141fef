"""Python objects between ranks."""

from __future__ import annotations

import numpy as np
import pytest

from collectives import ArgumentError, ArgumentTypeError, Communicator, OperationError

pytestmark = pytest.mark.mpi


def value(rank: int) -> dict[str, object]:
    return {"rank": rank, "text": "x" * (rank * 10_000)}


def test_objects_are_gathered_broadcast_and_scattered(comm: Communicator) -> None:
    everyone = [value(rank) for rank in range(comm.size)]
    assert comm.all_gather_object(value(comm.rank)) == everyone
    for root in range(comm.size):
        at_root = comm.rank == root
        assert comm.gather_object(value(comm.rank), root) == (everyone if at_root else None)
        assert comm.broadcast_object(value(root) if at_root else None, root) == value(root)
        assert comm.scatter_object(everyone if at_root else None, root) == value(comm.rank)
        assert comm.scatter_object([None] * comm.size if at_root else None, root) is None


@pytest.mark.mpi(min_size=2)
def test_messages_with_objects_say_who_has_sent_them(comm: Communicator) -> None:
    if comm.rank:
        comm.send_object(value(comm.rank), 0, tag=3)
        comm.send_object(None, 0, tag=3)
    else:
        for source in range(1, comm.size):
            assert comm.recv_object(source, tag=3) == (value(source), source)
        others = [comm.recv_object(tag=3) for _ in range(1, comm.size)]
        assert sorted(others, key=lambda found: found[1]) == [(None, rank) for rank in range(1, comm.size)]


def test_an_object_to_oneself(comm: Communicator) -> None:
    comm.send_object(value(2), comm.rank)
    assert comm.recv_object(comm.rank) == (value(2), comm.rank)


def test_an_array_is_no_object(comm: Communicator) -> None:
    comm.send(np.ones(3, np.float32), comm.rank)
    with pytest.raises(OperationError, match=r"3 elements of float32 from rank .; .*send_object"):
        comm.recv_object(comm.rank)
    x = np.zeros(3, np.float32)
    comm.recv(x, comm.rank)
    assert x.tolist() == [1, 1, 1]


def test_bytes_that_are_no_object_are_an_error(comm: Communicator) -> None:
    comm.send(np.full(3, 7, np.uint8), comm.rank)
    with pytest.raises(OperationError, match=r"3 uint8 from rank . cannot be unpickled"):
        comm.recv_object(comm.rank)
    assert comm.iprobe(comm.rank) is None


def test_what_cannot_be_pickled_is_an_error_on_every_rank(comm: Communicator) -> None:
    last = comm.size - 1
    own = (lambda: None) if comm.rank == last else 3
    calls = {
        "all_gather_object": lambda: comm.all_gather_object(own),
        "gather_object": lambda: comm.gather_object(own),
        "broadcast_object": lambda: comm.broadcast_object(own, last),
        "scatter_object": lambda: comm.scatter_object([own] * comm.size if comm.rank == last else None, last),
    }
    for name, call in calls.items():
        with pytest.raises(ArgumentTypeError, match=rf"{name}: .*rank {last} cannot be pickled"):
            call()
    with pytest.raises(ArgumentTypeError, match=r"send_object: .*rank . cannot be pickled"):
        comm.send_object(lambda: None, comm.rank)
    assert comm.all_gather_object(comm.rank) == list(range(comm.size))


def test_another_number_of_objects_is_an_error_on_every_rank(comm: Communicator) -> None:
    many = [1] * (comm.size + 1) if comm.rank == 0 else None
    with pytest.raises(ArgumentError, match=f"got {comm.size + 1} values on rank 0; needs {comm.size},"):
        comm.scatter_object(many)
    with pytest.raises(ArgumentError, match="got 0 values on rank 0"):
        comm.scatter_object()
    with pytest.raises(ArgumentTypeError, match=r"values: .*rank 0.* no list"):
        comm.scatter_object(7)
    with pytest.raises(ArgumentError, match="root: got 9"):
        comm.gather_object(1, 9)
