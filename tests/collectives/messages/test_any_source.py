"""Receives from any rank, probes, sendrecv, messages to oneself, batches."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from collectives import Communicator, Envelope, OperationError, P2POp
from collectives.messages.message import INLINE_BYTES, Receiving, begin_in_turn, under_way

pytestmark = pytest.mark.mpi
LONG = INLINE_BYTES  # float64 elements: a message of pieces


@pytest.mark.parametrize("size", [3, LONG])
def test_messages_from_any_rank_say_who_has_sent_them(comm: Communicator, size: int) -> None:
    if comm.rank:
        comm.send(np.full(size, float(comm.rank)), 0, 4)
        return
    senders = []
    for _ in range(comm.size - 1):
        x = np.zeros(size)
        senders.append(comm.recv(x, tag=4))
        assert (x == senders[-1]).all()
    assert sorted(senders) == list(range(1, comm.size))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("size", [3, LONG])
def test_receives_take_messages_in_the_order_in_which_they_are_posted(comm: Communicator, size: int) -> None:
    """Also where one from any rank comes before one from a named rank, and is waited for last."""
    if comm.rank == 1:
        for value in range(4):
            comm.send(np.full(size, float(value)), 0)
    elif comm.rank == 0:
        found = [np.zeros(size) for _ in range(4)]
        works = [comm.recv(x, source, async_op=True) for x, source in zip(found, (1, None, 1, None), strict=True)]
        for work in reversed(works):
            work.wait()
        assert [x[-1] for x in found] == [0, 1, 2, 3]
        assert [work.sender for work in works] == [1] * 4
    comm.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("size", [3, LONG])
def test_a_message_that_another_thread_is_beginning_has_not_arrived(
    comm: Communicator, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    start = Receiving._start

    def slowly(message: Receiving) -> None:
        begun.set()
        time.sleep(0.2)
        start(message)

    def begin() -> None:
        while not begun.is_set():
            begin_in_turn()

    x = np.zeros(size)
    if comm.rank == 0:
        monkeypatch.setattr(Receiving, "_start", slowly)
        work = comm.recv(x, tag=2, async_op=True)
        other = threading.Thread(target=begin)
        other.start()
    comm.barrier()
    if comm.rank == 1:
        comm.send(np.ones(size), 0, 2)
    elif comm.rank == 0:
        begun.wait()
        work.wait()
        assert x.all()
        other.join()
    comm.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_receive_from_any_rank_does_not_know_its_sender_before(comm: Communicator) -> None:
    x = np.zeros(2)
    if comm.rank == 0:
        work = comm.recv(x, tag=1, async_op=True)
        assert not work.is_completed()
        with pytest.raises(OperationError, match=r"recv from any rank .*no message"):
            work.sender  # noqa: B018
    comm.barrier()
    if comm.rank == comm.size - 1:
        comm.send(np.ones(2), 0, 1)
    elif comm.rank == 0:
        work.wait(60)
        assert work.sender == comm.size - 1
        assert x.tolist() == [1, 1]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("size", [3, LONG])
def test_a_probe_describes_what_the_next_receive_takes(comm: Communicator, size: int) -> None:
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    assert comm.iprobe(left, 2) is None
    comm.barrier()
    sending = [comm.send(torch.full((n,), float(n), dtype=torch.bfloat16), right, 2, async_op=True) for n in (size, 1)]
    assert comm.probe(tag=2) == comm.probe(left, 2) == comm.iprobe(left, 2) == Envelope(left, 2, "bfloat16", size)
    assert comm.iprobe(left, 3) is None
    for n in (size, 1):
        envelope = comm.probe(left, 2)
        x = torch.zeros(envelope.size, dtype=torch.bfloat16)
        assert comm.recv(x, tag=2) == left
        assert x.tolist() == [float(n)] * n if n < LONG else (x == x[0]).all()
    assert comm.iprobe(tag=2) is None
    for work in sending:
        assert work is not None
        work.wait()
    comm.barrier()


@pytest.mark.parametrize("size", [0, 3, LONG])
def test_sendrecv_goes_around_a_ring(comm: Communicator, size: int) -> None:
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for source in (left, None):
        out = np.full(size, -1.0)
        assert comm.sendrecv(np.full(size, float(comm.rank)), right, out, source) == left
        assert (out == left).all()
        comm.barrier()  # else a faster rank's second message might be the first that comes


@pytest.mark.parametrize("size", [3, 20 * LONG])
def test_messages_to_oneself(comm: Communicator, size: int) -> None:
    x, first, second = np.full(size, 1.0), np.zeros(size), np.zeros(size)
    assert comm.send(x, comm.rank) is None  # though nothing receives it yet
    x[:] = 2
    work = comm.send(x, comm.rank, async_op=True)
    assert comm.recv(first, comm.rank) == comm.rank
    assert comm.recv(second, None) == comm.rank
    assert work is not None
    work.wait()
    assert (first == 1).all()
    assert (second == 2).all()
    assert comm.sendrecv(x, comm.rank, first, comm.rank, 7) == comm.rank
    assert (first == 2).all()
    comm.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("size", [3, LONG])
def test_a_sendrecv_of_which_one_half_fails_ends_the_other(comm: Communicator, size: int) -> None:
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    x = np.full(size, float(comm.rank))
    with pytest.raises(OperationError, match=rf"x has 1 elements of float64, .* {size} of float64"):
        comm.sendrecv(x, right, np.zeros(1), left)
    assert not under_way  # x has left
    comm.barrier()


def test_a_batch_begins_all_messages_in_any_order_of_the_list(comm: Communicator) -> None:
    """Every rank sends two messages to every rank, itself too, its list in an order of its own."""
    sent = {(to, n): np.full(LONG if n else 2, comm.rank * 10.0 + to) for to in range(comm.size) for n in range(2)}
    came = {(source, n): np.zeros(LONG if n else 2) for source in range(comm.size) for n in range(2)}
    batch = [P2POp("send", x, to) for (to, _), x in sent.items()]
    batch += [P2POp("recv", x, source) for (source, _), x in came.items()]
    if comm.rank % 2:
        batch = batch[len(sent) :] + batch[: len(sent)]
    works = comm.batch_isend_irecv(batch)
    assert len(works) == len(batch)
    for op, work in zip(batch, works, strict=True):
        assert op.kind in work.name
        work.wait()
    for (source, _), x in came.items():
        assert (x == source * 10 + comm.rank).all()
    assert comm.batch_isend_irecv([]) == []


@pytest.mark.mpi(min_size=2)
def test_ranks_that_wait_for_their_sends_take_messages_from_any_rank_meanwhile(comm: Communicator) -> None:
    right, x, out = (comm.rank + 1) % comm.size, np.full(20 * LONG, float(comm.rank)), np.zeros(20 * LONG)
    receiving = comm.recv(out, async_op=True)
    comm.send(x, right)  # which ends as the next rank takes it, from inside its own send
    receiving.wait()
    assert (out == (comm.rank - 1) % comm.size).all()
    comm.barrier()


@pytest.mark.mpi(min_size=2)
def test_close_ends_receives_from_any_rank() -> None:
    """Those that messages were sent for are filled, the others end with an error, also behind each other."""
    comm = Communicator()
    found = [np.zeros(LONG) for _ in range(4)]
    if comm.rank == 0:
        works = [comm.recv(x, source, async_op=True) for x, source in zip(found, (None, 1, None, 1), strict=True)]
    elif comm.rank == 1:
        for value in (1.0, 2.0):
            comm.send(np.full(LONG, value), 0, async_op=True)
    comm.close()
    if comm.rank == 0:
        for number, work in enumerate(works):
            if number < 2:
                work.wait()
                assert (found[number] == number + 1).all()
                continue
            with pytest.raises(OperationError, match="closed, and no message"):
                work.wait()
    assert not under_way


@pytest.mark.mpi(min_size=2)
def test_close_drops_what_was_probed_and_not_received() -> None:
    comm = Communicator()
    if comm.rank == 1:
        comm.send(np.ones(LONG), 0, async_op=True)
    elif comm.rank == 0:
        assert comm.probe().size == LONG
    comm.close()
    assert not under_way
