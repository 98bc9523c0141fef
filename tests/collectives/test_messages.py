"""send and recv."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from collectives import Communicator, OperationError

pytestmark = pytest.mark.mpi


def neighbours(comm: Communicator) -> tuple[int, int]:
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


@pytest.mark.parametrize("size", [0, 1, 1_000_003])
def test_messages_around_the_ring_both_receive_first(comm: Communicator, size: int) -> None:
    if comm.size == 1:
        return
    right, left = neighbours(comm)
    came = torch.zeros(size, dtype=torch.bfloat16)
    receiving = comm.recv(came, left, async_op=True)
    sending = comm.send(torch.full((size,), comm.rank, dtype=torch.bfloat16), right, async_op=True)
    assert receiving is not None
    assert sending is not None
    receiving.wait(60)
    sending.wait()
    assert receiving.is_completed()
    assert (came == left).all()


def test_a_message_whose_handle_is_dropped_keeps_its_memory(comm: Communicator) -> None:
    size = 300_000  # more than is sent ahead of the receiver
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.size == 1:
        return
    comm.send(np.full(size, float(comm.rank)), right, async_op=True)
    others = [np.full(size, -1.0) for _ in range(5)]  # would take the memory if it were free
    found = np.empty(size)
    comm.recv(found, left)
    assert (found == left).all()
    assert all((other == -1).all() for other in others)
    comm.barrier()


def test_tags_tell_messages_apart(comm: Communicator) -> None:
    if comm.size == 1:
        return
    if comm.rank == 0:
        works = [comm.send(np.array([tag]), 1, tag, async_op=True) for tag in (3, 1, 2)]
        for work in works:
            assert work is not None
            work.wait()
    elif comm.rank == 1:
        for tag in (1, 2, 3):
            x = np.array([0])
            comm.recv(x, 0, tag)
            assert x[0] == tag


def test_a_message_of_another_length_is_an_error(comm: Communicator) -> None:
    if comm.size == 1:
        return
    if comm.rank == 0:
        comm.send(np.ones(3), 1)
        comm.send(np.ones(3), 1)
    elif comm.rank == 1:
        for size in (2, 4):
            with pytest.raises(OperationError, match="recv from rank 0"):
                comm.recv(np.zeros(size), 0)
    comm.barrier()


def test_messages_and_collectives_do_not_meet(comm: Communicator) -> None:
    if comm.size == 1:
        return
    right, left = neighbours(comm)
    came, x = np.zeros(4), np.ones(100_000)
    receiving = comm.recv(came, left, async_op=True)
    comm.all_reduce(x, algorithm="ring")
    comm.send(np.full(4, 7.0), right)
    assert receiving is not None
    receiving.wait()
    assert (came == 7).all()
    assert (x == comm.size).all()
