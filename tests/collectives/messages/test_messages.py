"""send and recv."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch

from collectives import ArgumentError, Communicator, OperationError, WorkTimeout
from collectives.messages import message as message_work
from collectives.messages.message import under_way
from collectives.runtime.positions import Positions

pytestmark = pytest.mark.mpi

PIECE = 16_000  # bytes


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


def test_tags_distinguish_messages(comm: Communicator) -> None:
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


LONG = 2 * PIECE // 8  # float64 elements of two pieces, in tests that cut messages into small ones


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        *((3, 2), (3, 4), (0, 4), (3, 0), (3, LONG), (LONG, 3)),
        *((LONG, LONG // 2), (LONG // 2, LONG), (LONG, LONG + 1), (LONG + 1, LONG), (5 * LONG, LONG)),
    ],
)
def test_a_message_of_another_length_is_an_error_and_the_next_one_is_not(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, sent: int, wanted: int
) -> None:
    if comm.size == 1:
        return
    monkeypatch.setattr(message_work, "PIECE_BYTES", PIECE)
    right, left = neighbours(comm)
    sending = [comm.send(np.full(size, comm.rank + 1.0), right, async_op=True) for size in (sent, LONG, 4)]
    found = [np.zeros(size) for size in (wanted, LONG, 4)]
    receiving = [comm.recv(x, left, async_op=True) for x in found]
    assert receiving[0] is not None
    with pytest.raises(OperationError, match=rf"x has {wanted} elements of float64, .* {sent} of float64"):
        receiving[0].wait()
    for work in [*receiving[1:], *sending]:
        assert work is not None
        work.wait()
    assert all((x == left + 1).all() for x in found[1:])


@pytest.mark.parametrize("size", [100, 20_000])
def test_a_message_of_another_dtype_is_an_error(comm: Communicator, size: int) -> None:
    if comm.size == 1:
        return
    right, left = neighbours(comm)
    sending = [comm.send(torch.ones(size), right, async_op=True) for _ in range(2)]
    with pytest.raises(OperationError, match=rf"x has {size // 2} elements of float64, .* {size} of float32"):
        comm.recv(np.zeros(size // 2), left)
    comm.recv(np.zeros(size, np.float32), left)
    for work in sending:
        assert work is not None
        work.wait()


def test_a_wait_that_gives_up_says_how_long_it_took(comm: Communicator) -> None:
    if comm.size == 1:
        return
    right, left = neighbours(comm)
    receiving = comm.recv(np.zeros(4), left, async_op=True)
    assert receiving is not None
    with pytest.raises(WorkTimeout, match=r"not complete after 0\.01 s"):
        receiving.wait(0.01)
    comm.barrier()
    comm.send(np.ones(4), right)
    receiving.wait()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "soon", [1]])
def test_a_wait_for_no_time_at_all_is_refused(comm: Communicator, timeout: Any) -> None:
    works = [comm.all_reduce(np.ones(4), async_op=True), comm.send(np.ones(4), comm.rank, async_op=True)]
    for work in works:
        assert work is not None
        with pytest.raises((ArgumentError, TypeError), match=r"wait: got .*seconds"):
            work.wait(timeout)
    comm.recv(np.zeros(4), comm.rank)
    for work in works:
        assert work is not None
        work.wait(30)


def test_a_rank_that_waits_does_not_stop_a_thread_that_asks(comm: Communicator) -> None:
    if comm.size == 1:
        return
    right, left = neighbours(comm)
    receiving = comm.recv(np.zeros(4), left, async_op=True)
    assert receiving is not None
    with receiving._lock:  # as while another thread waits
        assert not receiving.is_completed()
        comm.barrier()
        comm.send(np.ones(4), right, async_op=True)
    receiving.wait()


# ---- arrays whose message is still under way ---------------------------------------------------------------------

SIZE = 1 << 20  # float64 elements: more than is sent ahead of the receiver, and memory that is unmapped when freed


@pytest.mark.parametrize("tag", [0, 5])
def test_close_delivers_what_was_sent(tag: int) -> None:
    comm = Communicator()
    if comm.size > 1:
        right, left = neighbours(comm)
        early, late, small = np.zeros(SIZE), np.zeros(SIZE), np.zeros(3)
        receiving = [comm.recv(x, left, tag, async_op=True) for x in (early, small)]
        for size in (SIZE, 3, SIZE):
            comm.send(np.full(size, comm.rank + 1.0), right, tag, async_op=True)
        comm.recv(late, left, tag)
        comm.close()
        for work in receiving:
            assert work is not None
            assert work.is_completed()
            work.wait()
        assert all((x == left + 1).all() for x in (early, small, late))
    comm.close()


def test_close_cancels_a_receive_that_nothing_was_sent_for() -> None:
    comm = Communicator()
    if comm.size > 1:
        right, left = neighbours(comm)
        found = [np.zeros(size) for size in (SIZE, SIZE, 3)]
        receiving = [comm.recv(x, left, async_op=True) for x in found]
        comm.send(np.full(SIZE, 7.0), right, async_op=True)
        comm.close()
        assert receiving[0] is not None
        receiving[0].wait()
        assert (found[0] == 7).all()
        for work in receiving[1:]:
            assert work is not None
            with pytest.raises(OperationError, match=r"recv from rank .*was closed"):
                work.wait()
    comm.close()
    assert not under_way


@pytest.mark.parametrize("size", [3, SIZE])
def test_close_drops_messages_that_were_not_received(size: int) -> None:
    comm = Communicator()
    works = [comm.send(np.ones(size), other, async_op=True) for other in range(comm.size) if other != comm.rank]
    comm.close()
    for work in works:
        assert work is not None
        work.wait()
    assert not under_way


def test_a_closed_communicator_takes_no_messages() -> None:
    comm = Communicator()
    comm.close()
    if comm.size > 1:
        for call in (comm.send, comm.recv):
            with pytest.raises(OperationError, match="it was closed"):
                call(np.zeros(3), (comm.rank + 1) % comm.size)


@pytest.mark.parametrize("how", ["dropped", "interrupted"])
def test_a_receive_without_a_handle_writes_to_no_other_array(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if comm.size == 1:
        return
    made = Communicator()
    if comm.rank == 1:
        if how == "interrupted":
            monkeypatch.setattr(Positions, "waiting", interrupted)
            with pytest.raises(KeyboardInterrupt):
                made.recv(np.zeros(SIZE), 0)
        else:
            made.recv(np.zeros(SIZE), 0, async_op=True)
        del made
        gc.collect()
    others = [np.full(SIZE, -1.0) for _ in range(3)]  # would take the memory if it were free
    comm.barrier()
    if comm.rank == 0:
        made.send(np.ones(SIZE), 1, async_op=True)
    while [message for message in list(under_way) if not message.is_completed()]:
        pass
    comm.barrier()
    assert all((other == -1).all() for other in others)


@pytest.mark.parametrize("how", ["send", "recv", "sendrecv"])
def test_a_message_that_was_interrupted_is_not_taken_for_the_next_one(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It may still come, so that the next receive would get what follows it."""
    if comm.size == 1:
        return
    made = Communicator()
    right, left = neighbours(comm)
    x, came = np.zeros(SIZE), np.zeros(SIZE)
    calls = {
        "send": lambda: made.send(x, right),
        "recv": lambda: made.recv(came, left),
        "sendrecv": lambda: made.sendrecv(x, right, came, left),
    }
    monkeypatch.setattr(Positions, "waiting", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calls[how]()
    for call in calls.values():
        with pytest.raises(OperationError, match=f"{how} was interrupted"):
            call()


def interrupted(positions: Positions, kind: str, other: int) -> AbstractContextManager[None]:
    raise KeyboardInterrupt


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
