"""The memory that tensors lie in: order among streams, copies during their work, compounds; on the stand-in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from collectives import ArgumentError, Communicator
from collectives.backends.cuda.copies import GpuCopies
from collectives.devices import HOST, GpuPlace, place_at, unusable_reason
from tests.collectives.backends.cuda.standin import Gpu


def test_copies_come_after_the_current_stream_and_before_what_joins_them(standin: Gpu) -> None:
    stream, copies = standin.stream(), GpuCopies(standin)
    there = copies.room(1000, torch.float32)
    with standin.using(stream):
        back = standin.put(torch.zeros(1000), "tensor")
    for number in range(20):
        with standin.using(stream):
            x = standin.put(torch.full((1000,), float(number)), "tensor")
            copies.start(there, x).wait()
            assert (there == number).all()
            copies.start(back, there)
            copies.join()
            assert (standin.get(back) == number).all()
        copies.finish()


def test_streams_follow_and_lead_each_other(standin: Gpu) -> None:
    place, streams = GpuPlace(0), [standin.stream() for _ in range(3)]
    seen: list[int] = []
    streams[1].queue(lambda: (__import__("time").sleep(0.05), seen.append(1)))
    with standin.using(streams[0]):
        assert place.stream() == streams[0]
        place.wait_for_streams({streams[0], streams[1]})
        streams[0].queue(lambda: seen.append(0))
        place.make_wait(streams[2])
        streams[2].queue(lambda: seen.append(2))
        place.synchronize()
    streams[2].record().wait()
    assert seen == [1, 0, 2]


def test_a_captured_graph_is_refused(standin: Gpu) -> None:
    stream = standin.stream()
    with standin.using(stream):
        GpuPlace(0).refuse_capture("a step")
        stream.capturing = True
        with pytest.raises(ArgumentError, match=r"a step: .*CUDA graph"):
            GpuPlace(0).refuse_capture("a step")
        stream.capturing = False


def test_the_host_is_a_place_where_there_is_nothing_to_wait_for() -> None:
    assert place_at("cpu") is HOST
    assert HOST.stream() is None
    copies, x = HOST.copies(), torch.arange(5.0)
    copies.start(room := copies.room(5, torch.float32), x).wait()
    assert torch.equal(room, x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_said_why() -> None:
    assert unusable_reason() in ("this torch is built without CUDA", "torch sees no GPU")
    with pytest.raises(ArgumentError, match="no GPU can be used here: "):
        place_at("cuda:0")


@pytest.mark.mpi
def test_a_compound_keeps_its_place_in_the_stream_of_its_call(comm: Communicator, standin: Gpu) -> None:
    stream = standin.stream()
    for number in range(10):
        with standin.using(stream):
            x, table = standin.put(torch.full((100,), float(number))), np.array([comm.rank])

            def task(x: object = x, table: np.ndarray = table) -> None:
                comm.all_reduce(x)
                comm.all_reduce(table)
                comm.all_reduce(x, "max")

            work = comm.compound("two", task, async_op=bool(number % 2), device="cuda:0")
            if work is not None:
                work.wait()
            assert (standin.get(x) == number * comm.size).all()
            assert table[0] == sum(range(comm.size))
